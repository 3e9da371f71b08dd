"""The pure parts of the replicated log that the model search does not walk through: metadata, placement, repair, health."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import LogFenced, LogUnavailable, StorageFull
from roq.log.replicated import metadata
from roq.log.replicated.appending import Appending
from roq.log.replicated.ensemble import SegmentHealth, SegmentRepair
from roq.log.replicated.health import StoreHealth, choose, rank
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState, SnapshotMetadata
from roq.log.replicated.recovery import SegmentRecovery
from roq.log.replicated.repair import Copy, Holding, garbage, holdings, plan
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import StaticDirectory
from roq.wire.store import Found, Refusal, entry_crc

ABC = ("a", "b", "c")


def chain(*lasts: int) -> LogMeta:
    """Closed segments that end there, then an open one."""
    meta = metadata.take(LogMeta(), 1)
    for place, last in enumerate(lasts):
        meta = metadata.open_next(meta, f"log~1.{place + 1}", ABC)
        meta = metadata.close_last(meta, last, meta.segments[-1].fragments)
        meta.check()
    return metadata.open_next(meta, f"log~1.{len(lasts) + 1}", ABC)


def test_segments_follow_each_other_without_gaps_and_empty_ones_vanish() -> None:
    meta = chain(10, 10, 25)
    meta.check()
    assert [(one.first, one.last) for one in meta.segments] == [(1, 10), (11, 25), (26, -1)]
    assert meta.segments[1].fragment_of(12).nodes == ABC


def test_a_later_term_takes_the_log_and_an_earlier_one_does_not() -> None:
    meta = metadata.take(chain(5), 3)
    assert (meta.epoch, meta.term, meta.segments[-1].state) == (2, 3, SegmentState.RECOVERY)
    assert metadata.take(meta, 3).epoch == 3  # the same term again: the master was restarted
    with pytest.raises(LogFenced):
        metadata.take(meta, 2)
    with pytest.raises(LogFenced):
        metadata.owned(meta, 1)
    with pytest.raises(LogFenced):
        metadata.change_ensemble(meta, meta.segments[-1].id, 6, ABC)


def test_a_fragment_that_began_where_nothing_was_acknowledged_is_replaced() -> None:
    meta = chain()
    id = meta.segments[-1].id
    meta = metadata.change_ensemble(meta, id, 1, ("a", "b", "d"))
    assert meta.segments[-1].fragments == (Fragment(1, ("a", "b", "d")),)
    meta = metadata.change_ensemble(meta, id, 4, ("a", "e", "d"))
    closed = metadata.close_last(meta, 9, meta.segments[-1].fragments).segments[-1]
    assert [(one.first, closed.end_of(one)) for one in closed.fragments] == [(1, 3), (4, 9)]
    early = metadata.close_last(meta, 3, meta.segments[-1].fragments).segments[-1]
    assert [one.first for one in early.fragments] == [1]


def test_a_snapshot_lets_go_what_it_covers() -> None:
    meta = metadata.set_snapshot(chain(10, 20, 30), SnapshotMetadata(25, "log~snapshot-1.5.25", 3, ABC))
    meta.check()
    assert (meta.trimmed, [one.first for one in meta.segments]) == (20, [21, 31])
    assert metadata.set_snapshot(meta, SnapshotMetadata(24, "older", 3, ABC)) == meta
    assert [one.name for one in holdings(meta)] == ["log~snapshot-1.5.25", "log~1.3"]


@given(st.sets(st.text(min_size=1, max_size=3), min_size=2, max_size=8), st.text())
def test_a_lost_host_moves_only_what_it_held(hosts: set[str], key: str) -> None:
    before = rank(key, hosts)
    assert sorted(before) == sorted(hosts)
    assert rank(key, hosts - {before[-1]}) == before[:-1]
    assert choose(key, hosts, 2) == tuple(before[:2])


SEGMENT = Holding("s", ABC, 1, 9)


@pytest.mark.parametrize(
    ("live", "gone", "lacking", "expected"),
    [
        ("abcd", "", (), None),
        ("bcd", "", (), None),  # not given up yet
        ("bcd", "a", (), Copy(SEGMENT, ("b", "c"), ("d",), ("a",))),
        ("bc", "a", (), None),  # nowhere to copy to
        ("d", "abc", (), None),  # no source
        ("abcd", "", ((SEGMENT, "b"),), Copy(SEGMENT, ("a", "c"), ("b",))),
        ("bcd", "a", ((SEGMENT, "b"),), Copy(SEGMENT, ("c",), ("b",))),  # first what is quick
        ("d", "ab", ((SEGMENT, "c"),), None),
    ],
)
def test_what_is_copied(live: str, gone: str, lacking: tuple[tuple[Holding, str], ...], expected: Copy | None) -> None:
    assert plan([SEGMENT], 3, set(live), set(gone), lacking) == ([] if expected is None else [expected])


def test_too_few_copies_grow_when_a_host_comes() -> None:
    assert plan([Holding("b", ("a",))], 2, {"a", "d"}, set()) == [Copy(Holding("b", ("a",)), ("a",), ("d",))]


def test_garbage_is_only_what_nobody_names_and_nobody_is_about_to_use() -> None:
    meta = metadata.take(chain(10), 2)  # epoch 2, serial 3
    names = ["log~1.1", "log~1.2", "log~1.7", "log~2.2", "log~2.3", "log~3.1", "other~1.1", "log~x", "log~snapshot-1.1.4"]
    assert garbage(meta, "log", 2, names, "a") == ["log~1.7", "log~2.2", "log~snapshot-1.1.4"]
    assert garbage(meta, "log", 2, ["log~1.1", "log~1.2"], "z") == ["log~1.1"]  # z is no node of the closed one


def writing(*held: int) -> Appending:
    """Three entries sent to a, b, c, which hold as many of them."""
    appending = Appending("s", 1, ABC, 2, 1)
    for number in range(3):
        appending.append(b"%d" % number)
    list(appending.frames())
    for node, count in zip(ABC, held, strict=True):
        appending.added(node, 1, count)
    appending.check()
    return appending


def test_a_node_that_owes_an_answer_is_late_even_if_the_others_are_enough() -> None:
    appending = writing(3, 3, 0)
    health = SegmentHealth(LogSettings(), appending, 0.0)
    assert appending.drained
    assert health.bad(1.0) == []
    assert health.bad(3.0) == ["c"]
    assert health.failure(["c"], (), 99.0) is None
    appending.send_again("c")
    assert health.sound == {"a", "b"}
    assert not health.complete(2)
    health = SegmentHealth(LogSettings(), writing(3, 3, 3), 0.0)
    assert health.complete(3)
    assert not health.complete(4)
    health.refused("b", Refusal.FULL)
    assert health.sound == {"a", "c"}


def test_a_writer_gives_up_when_waiting_can_not_help() -> None:
    health = SegmentHealth(LogSettings(), writing(3, 0, 0), 0.0)
    assert health.failure(["b", "c"], (), 5.0) is None
    assert isinstance(health.failure(["b", "c"], (), 20.0), LogUnavailable)
    health.refused("b", Refusal.FULL)
    assert health.failure(["b"], (), 1.0) is None  # a and c are enough
    health.refused("c", Refusal.FULL)
    assert health.bad(0.1) == ["b", "c"]
    assert isinstance(health.failure(["b", "c"], (), 1.0), StorageFull)
    assert health.failure(["b", "c"], {"d"}, 1.0) is None  # others may take their places


def test_metadata_that_make_no_sense_are_noticed() -> None:
    gap = LogMeta(
        1,
        1,
        3,
        3,
        2,
        0,
        (
            SegmentMetadata("x", 1, SegmentState.CLOSED, (Fragment(1, ABC),), 4),
            SegmentMetadata("y", 6, SegmentState.OPEN, (Fragment(6, ABC),)),
        ),
    )
    with pytest.raises(AssertionError, match="gap"):
        gap.check()


def test_a_recovery_confirms_nothing_to_nodes_before_the_metadata_name_who_has_it() -> None:
    recovery = SegmentRecovery(SegmentMetadata("s", 1, SegmentState.RECOVERY, (Fragment(1, ABC),)), 2, 2)
    recovery.node_fenced("a", 0)
    recovery.node_fenced("c", 0)
    for position in (1, 2):
        recovery.answered("a", position, [(Found.ENTRY, entry_crc("s", position, b"x"), b"x")])
        frames = dict(recovery.frames())
        assert frames["a"].first == position
        assert frames["a"].confirmed == 0, "or a second recovery would leave position 1 on a alone"
        assert recovery.writing is not None
        recovery.writing.added("a", position, 1)
        if position == 1:
            recovery.replace(("a", "d"))  # c is silent
            assert [node for node, _ in recovery.frames()] == ["d"]
            recovery.writing.added("d", 1, 1)
            assert recovery.writing.acked == 1


def test_quorums_grow_with_a_segment_that_has_nodes_for_them() -> None:
    """What was written under lower ones is closed by then; nothing shrinks."""
    one = metadata.open_next(LogMeta(1, 1, write_quorum=1, ack_quorum=1), "log~1.1", ("a",), quorums=(3, 2))
    assert (one.write_quorum, one.ack_quorum) == (1, 1), "a single node is no three"
    closed = metadata.close_last(one, 7, one.segments[-1].fragments)
    assert metadata.open_next(closed, "log~1.2", ("a", "b"), quorums=(3, 2)).write_quorum == 1
    grown = metadata.open_next(closed, "log~1.2", ABC, quorums=(3, 2))
    grown.check()
    assert (grown.write_quorum, grown.ack_quorum) == (3, 2)
    closed = metadata.close_last(grown, 9, grown.segments[-1].fragments)
    assert metadata.open_next(closed, "log~1.3", ABC, quorums=(2, 2)).write_quorum == 3
    with pytest.raises(AssertionError):  # an open segment of one node could not be recovered under an ack quorum of two
        msgspec.structs.replace(one, write_quorum=3, ack_quorum=2).check()


def test_a_recovery_that_no_node_can_decide_is_told_from_one_that_waits() -> None:
    recovery = SegmentRecovery(SegmentMetadata("s", 1, SegmentState.RECOVERY, (Fragment(1, ABC),)), 2, 2)
    for node in ABC:
        recovery.node_fenced(node, 0)
    unsure, absent = [(Found.UNKNOWN, 0, b"")], [(Found.NO_SUCH, 0, b"")]
    recovery.answered("a", 1, unsure)
    recovery.answered("b", 1, absent)
    assert recovery.undecidable is None, "c may have the entry"
    recovery.answered("c", 1, unsure)
    assert recovery.undecidable == (1, ("a", "c"))
    recovery.answered("c", 1, [(Found.ENTRY, entry_crc("s", 1, b"x"), b"x"), *absent])
    assert recovery.undecidable is None, "a disk was brought back"
    recovery.answered("b", 2, absent)
    assert recovery.end == 1


def test_a_node_that_lost_what_it_confirmed_makes_the_segment_close() -> None:
    appending = writing(3, 3, 3)
    health = SegmentHealth(LogSettings(), appending, 0.0)
    assert health.complete(3)
    health.lost("b")
    assert health.any_lost
    assert not health.complete(3)
    assert health.sound == {"a", "c"}
    appending.finish_change(("a", "c", "d"))
    health.changed(1.0)
    assert health.bad(1.5) == []
    assert health.any_lost, "its fragment is still one copy short"


def test_a_segment_is_closed_early_only_if_the_next_one_is_better_and_ever_more_seldom() -> None:
    appending = writing(3, 3, 0)
    appending.send_again("c")  # it misses what the others acknowledged
    health, repair, hosts = SegmentHealth(LogSettings(), appending, 0.0), SegmentRepair(LogSettings()), frozenset("abcd")
    health.took(b"x")
    assert repair.due(health, 3, hosts, 9.0) is None, "too early"
    assert repair.due(health, 3, hosts, 11.0) == frozenset({"c", "d"})
    assert repair.helps(health, frozenset("d"), 11.0)
    assert repair.due(health, 3, hosts, 19.0) is None, "twice as long after the second one"
    assert repair.due(health, 3, hosts, 21.0) == frozenset({"c", "d"})
    assert repair.due(health, 3, hosts - {"d"}, 11.0) == frozenset({"c"}), "other hosts: from the beginning"
    assert repair.helps(health, frozenset(), 11.0), "two nodes miss nothing, the third does"
    complete = SegmentHealth(LogSettings(), writing(3, 3, 3), 0.0)
    assert repair.due(complete, 4, hosts, 11.0) == frozenset({"d"}), "before the first entry: where nothing comes, too"
    assert not repair.helps(complete, frozenset(), 11.0), "nobody else answers"
    assert complete.since == 11.0
    assert repair.due(complete, 3, hosts, 99.0) is None, "nothing is missing"


def test_a_store_is_dead_after_some_beats_full_for_a_while_and_given_up_when_it_was_away_long() -> None:
    directory, now = StaticDirectory({name: name for name in ABC}), 0.0
    health = StoreHealth(directory, lambda: now, missed_beats=2)
    assert (health.changed(), health.changed(), health.live()) == (True, False, ["a", "b", "c"])
    assert not health.beat("a", answered=False)
    assert health.beat("a", answered=False)
    assert (health.dead("a"), health.live()) == (True, ["b", "c"])
    health.full("b")
    assert health.roomy() == ["c"]
    now = 10.0
    assert health.roomy() == ["b", "c"]
    assert health.beat("a", answered=True)
    directory.alive.remove("c")
    assert health.away(ABC, 5.0) == set()
    now = 15.0
    assert health.away(ABC, 5.0) == {"c"}
    directory.alive.add("c")
    assert health.away(ABC, 5.0) == set()
