"""What stores are asked to hold, what follows from what they lack, who is missing where, and how copies are performed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from roq.errors import StorageFailed, StorageFull, Unavailable
from roq.log.replicated import metadata
from roq.log.replicated.appending import Appending
from roq.log.replicated.health import choose
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState, SnapshotMetadata
from roq.log.replicated.repair import Comparison, Copy, Holding, OpenPart, garbage, holdings, open_parts, plan, under_replicated
from roq.log.replicated.repairer import Copier, from_sources
from roq.log.store.blobs import BlobFolder
from roq.log.store.index import BAD, SegmentIndex, StoredSegment
from roq.wire.master import Shortage

ABC = ("a", "b", "c")
SEGMENT = Holding("s", ABC, 1, 9)
BLOB = Holding("log~snapshot-1.2.3", ABC, size=5)
EVERYWHERE = [(SEGMENT, node) for node in ABC]


def test_a_blob_that_a_living_host_has_lost_is_copied_to_it_again() -> None:
    assert plan([BLOB], 3, set(ABC), set(), [(BLOB, "a")]) == [Copy(BLOB, ("b", "c"), ("a",))]
    assert plan([BLOB], 3, set(ABC), set(), [(BLOB, node) for node in ABC]) == []


def test_entries_that_no_node_has_in_full_are_gathered_from_several() -> None:
    assert plan([SEGMENT], 3, set(ABC), set(), EVERYWHERE) == [Copy(SEGMENT, ("b", "c"), ("a",))]


def test_a_node_that_can_not_be_filled_keeps_no_other_from_it() -> None:
    lacking, refusing = [(SEGMENT, "a"), (SEGMENT, "b")], [(SEGMENT, "a")]
    assert plan([SEGMENT], 3, set(ABC), set(), lacking, refusing) == [Copy(SEGMENT, ("c", "a"), ("b",))]
    refusing = lacking
    assert plan([SEGMENT], 3, set("abcd"), set(), lacking, refusing) == [Copy(SEGMENT, ("c",), ("d",), ("a",))]
    assert plan([SEGMENT], 3, set(ABC), set(), lacking, refusing) == [Copy(SEGMENT, ("c", "b"), ("a",))], "nobody else"


def test_the_nodes_of_the_open_segment_must_have_what_they_confirmed() -> None:
    segment = SegmentMetadata("s", 1, SegmentState.OPEN, (Fragment(1, ("a", "b", "d")), Fragment(3, ABC)))
    appending = Appending("s", 1, ABC, 2, 3)
    for number in range(4):
        appending.append(b"%d" % number)
    list(appending.frames())
    appending.added("a", 3, 4)
    appending.added("b", 3, 2)
    assert appending.acked == 4
    assert list(open_parts(segment, appending)) == [
        OpenPart("s", "a", 1, 2),
        OpenPart("s", "b", 1, 2),
        OpenPart("s", "d", 1, 2),
        OpenPart("s", "a", 3, 4),
        OpenPart("s", "b", 3, 4),
        OpenPart("s", "c", 3, 2),  # its opening
    ]


def test_what_is_under_replicated_names_the_hosts_where_a_copy_is_missing() -> None:
    found = Comparison(lacking={(BLOB, "a")}, disks=dict.fromkeys("ab", "x"), silent={"c": "is away"})
    parts = [OpenPart("o", node, 10, 12) for node in ABC]
    found.parts = [parts[0]]
    assert under_replicated([BLOB], parts, 3, (), found) == [
        Shortage("snapshot log~snapshot-1.2.3", 1, 3, ("a", "c")),
        Shortage("open segment o from entry 10 on", 1, 3, ("a", "c")),
    ]
    full = Comparison(disks=dict.fromkeys(ABC, "x"))
    assert under_replicated([BLOB, SEGMENT], parts, 3, (), full) == []
    assert under_replicated([], parts, 3, {"b"}, full) == [Shortage("open segment o from entry 10 on", 2, 3, ("b",))]


def test_what_is_being_uploaded_is_no_garbage_whatever_was_opened_meanwhile() -> None:
    meta = metadata.take(LogMeta(), 1)
    meta = metadata.open_next(
        metadata.close_last(metadata.open_next(meta, "log~1.1", ABC), 3, (Fragment(1, ABC),)), "log~1.2", ABC
    )
    name = "log~snapshot-1.1.0.1"
    assert garbage(meta, "log", 1, [name], "a") == [name]
    assert garbage(meta, "log", 1, [name], "a", {name}) == []


def test_a_snapshot_is_asked_for_by_its_length() -> None:
    meta = LogMeta(snapshot=SnapshotMetadata(3, "log~snapshot-1.2.3", 5, ABC))
    assert list(holdings(meta)) == [BLOB]


def test_a_segment_knows_at_once_whether_it_has_gaps() -> None:
    segment = StoredSegment("s", 1)
    for position in (5, 6, 9, 3):
        segment.put(position, 1 << 32)
    assert segment.gaps == 3
    assert (segment.holds(5, 6), segment.holds(3, 5), segment.holds(2, 3), segment.holds(9, 10)) == (True, False, False, False)
    for position in (4, 7, 8):
        segment.put(position, 2 << 32)
    assert segment.gaps == 0
    assert segment.holds(3, 9)
    segment.put(7, BAD)
    assert (segment.gaps, segment.holds(3, 6), segment.holds(7, 7), segment.holds(1, 0)) == (1, True, False, True)


def test_a_store_tells_what_it_lacks_of_segments() -> None:
    index = SegmentIndex()
    index.segment("s").put(1, 1 << 32)
    assert index.lacking([("s", 1, 1), ("s", 1, 2), ("t", 1, 1)]) == [1, 2]
    assert index.lacking([("s", 1, 1)], opened=True) == [0]
    index.segment("s").opened = True
    assert index.lacking([("s", 1, 1), ("s", 1, 0)], opened=True) == []


def test_a_store_tells_which_blobs_it_lacks_or_has_with_another_length(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path / "blobs", 0)
    for name in ("one", "two", "gone"):
        blobs.put(name, 0, 4, crc32(b"four"), b"four")
    assert blobs.lacking([("one", 4), ("two", 5), ("none", 4)]) == [1, 2]
    next(tmp_path.glob("blobs/*/gone")).unlink()
    assert not blobs.check("gone")
    assert blobs.lacking([("one", 4), ("gone", 4)]) == [1]


def test_several_targets_at_a_time_and_nobody_is_left_out_in_whose_place_nobody_came() -> None:
    one = Holding("log/1", ("a",), size=5)
    [copy] = plan([one], 3, set("abcd"), targets_max=3)
    assert copy == Copy(one, ("a",), choose("log/1", "bcd", 2))
    assert copy.nodes(copy.targets[1:]) == ("a", copy.targets[1])
    [copy] = plan([SEGMENT], 3, set("cde"), set("ab"), targets_max=3)
    assert (set(copy.targets), copy.replaced) == (set("de"), ("a", "b"))
    assert copy.nodes(("d",)) == ("b", "c", "d")
    assert copy.nodes(()) == ABC
    [copy] = plan([BLOB], 3, set(ABC), (), [(BLOB, "a")])
    assert copy.nodes(("a",)) == ABC


def test_a_host_that_refused_a_copy_is_asked_after_the_others() -> None:
    first, second = choose(SEGMENT.key, "def", 2)
    live = {"b", "c", first, second}
    assert plan([SEGMENT], 3, live, {"a"})[0].targets == (first,)
    assert plan([SEGMENT], 3, live, {"a"}, refusing=[(SEGMENT, first)])[0].targets == (second,)
    assert plan([SEGMENT], 3, {"b", "c", first}, {"a"}, refusing=[(SEGMENT, first)])[0].targets == (first,), "nobody else"


async def test_a_copy_comes_from_the_first_source_that_gives_it() -> None:
    asked: list[tuple[str, str]] = []
    under_way = most = 0

    async def fetch(copy: Copy, source: str, target: str) -> None:
        nonlocal under_way, most
        asked.append((source, target))
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        if source == "a" or target == "f":
            raise StorageFailed("lacks it")

    copier = Copier(fetch, at_once=1)
    assert await copier.perform(Copy(BLOB, ("a", "b", "c"), ("d", "f"))) == ("d",)
    assert asked == [("a", "d"), ("b", "d"), ("a", "f"), ("b", "f"), ("c", "f")]
    assert most == 1
    assert await Copier(fetch, at_once=2).perform(Copy(BLOB, ("b",), ("d", "e"))) == ("d", "e")
    assert most == 2


async def test_sources_are_gone_through_again_unless_another_one_would_not_help() -> None:
    asked: list[str] = []
    waited: list[float] = []

    def pauses() -> Iterator[float]:
        for number in range(9):
            waited.append(number)
            yield 0.0

    async def fetch(source: str) -> int:
        asked.append(source)
        if len(asked) == 5:
            return 7
        raise StorageFailed("lacks it") if len(asked) < 9 else StorageFull("here")

    assert await from_sources("x", "ab", fetch, rounds=3, pauses=pauses()) == 7
    assert (asked, len(waited)) == (list("ababa"), 2)
    with pytest.raises(StorageFailed):
        await from_sources("x", "ab", fetch)
    with pytest.raises(StorageFull):
        await from_sources("x", "abcd", fetch, retry_on=(StorageFailed,), rounds=3)
    assert "".join(asked[5:]) == "ab" + "ab"
    with pytest.raises(Unavailable, match="no source"):
        await from_sources("x", "", fetch, rounds=3)
