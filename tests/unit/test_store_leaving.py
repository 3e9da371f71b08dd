"""Stores of hosts that are evacuated: they get nothing new, what they keep goes to others, and there is never less of it.

Not covered: how a copy is performed (test_repair_plan.py), the rest of the registry (test_master_registry.py).
"""

from __future__ import annotations

import itertools
from random import Random

import pytest

from roq.log.replicated.ensemble import SegmentLeave
from roq.log.replicated.health import candidates
from roq.log.replicated.repair import Holding, plan
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import StaticDirectory
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.master.registry import MakeCopies
from tests.unit.test_master_registry import PACE, Rig

SEGMENT = Holding("s", ("a", "b", "c"), 1, 9)


def test_something_new_goes_to_those_that_stay_and_only_then_to_others() -> None:
    directory = StaticDirectory({host: f"tcp://{host}" for host in "abcd"})
    before = candidates("log", directory)
    directory.evacuated = {before[0], "x"}
    assert candidates("log", directory) == [*before[1:], before[0]]
    directory.alive.discard(before[0])
    assert directory.leaving() == frozenset()


def test_another_host_takes_the_place_of_one_that_leaves_which_gives_it() -> None:
    (copy,) = plan([SEGMENT], 3, set("abcd"), leaving={"a"})
    assert (copy.targets, copy.replaced, "a" in copy.sources) == (("d",), ("a",), True)
    assert copy.nodes(copy.targets) == ("b", "c", "d")
    assert plan([SEGMENT], 3, set("abc"), leaving={"a"}) == [], "nobody could take its place"
    assert plan([SEGMENT], 3, set("abcd"), lacking=[(SEGMENT, "a")], leaving={"a"})[0].targets == ("d",), "it is not filled"


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_every_small_case_ends_without_those_that_leave_and_never_with_less(wanted: int) -> None:
    """Every set of nodes, of hosts that leave, and of nodes that lack something, of five hosts of which one may be gone."""
    hosts = "abcde"
    for nodes in itertools.combinations(hosts, wanted):
        for leaving in map(set, itertools.chain.from_iterable(itertools.combinations(hosts, n) for n in range(4))):
            for bad in ((), nodes[:1], nodes[1:2]):
                for gone in ((), ("e",)):
                    end = carried_out(Holding("s", nodes, 1, 9), wanted, set(hosts) - set(gone), set(gone), leaving, set(bad))
                    staying = set(hosts) - set(gone) - leaving
                    readable = set(nodes) - set(bad) - set(gone)
                    if readable and len(staying) >= wanted:
                        assert not leaving & set(end.nodes), (nodes, leaving, bad, gone)
                        assert len(end.nodes) == wanted


def carried_out(one: Holding, wanted: int, live: set[str], gone: set[str], leaving: set[str], bad: set[str]) -> Holding:
    """What becomes of it when every copy succeeds, one after the other."""
    lacking = set(bad)
    for _ in range(10):
        good = set(one.nodes) - lacking - gone
        copies = plan([one], wanted, live, gone, [(one, node) for node in lacking], leaving=leaving & live)
        if not copies:
            return one
        (copy,) = copies
        assert not leaving & set(copy.targets)
        lacking -= set(copy.targets)
        one = Holding(one.name, copy.nodes(copy.targets), one.first, one.last)
        lacking &= set(one.nodes)
        assert len(set(one.nodes) - lacking - gone) >= len(good), "fewer copies than there were"
    pytest.fail("it does not end")


def test_a_place_is_given_only_when_the_others_live_or_are_given_up() -> None:
    """b is away, and a leaves: with c for a, b's loss would leave one copy. As long as b is waited for, a stays."""
    one = Holding("s", ("a", "b"), 1, 9)
    assert plan([one], 2, {"a", "c"}, leaving={"a"}) == []
    (copy,) = plan([one], 2, {"a", "c"}, gone={"b"}, leaving={"a"})
    after = copy.nodes(copy.targets)
    assert after == ("a", "c"), "b's place is taken first"
    assert plan([Holding("s", after, 1, 9)], 2, {"a", "c"}, gone={"b"}, leaving={"a"}) == [], "then nobody is there for a's"
    (copy,) = plan([one], 2, {"a", "b", "c"}, leaving={"a"})
    assert copy.nodes(copy.targets) == ("b", "c")


def test_a_segment_is_ended_for_it_ever_more_seldom_and_only_if_there_are_others() -> None:
    settings = LogSettings()
    leave, hosts = SegmentLeave(settings), frozenset("abc")
    nodes, gone, now, tries = frozenset("ab"), frozenset("a"), 1000.0, 0
    assert not leave.due(nodes, 2, frozenset("ab"), gone, now), "nobody could take its place"
    assert not leave.due(nodes, 2, hosts, frozenset(), now)
    while now < 1000.0 + 6 * 3600:
        tries += leave.due(nodes, 2, hosts, gone, now)
        now += 1.0
    assert 10 < tries < 100, "c takes no segment: thousands of tries would cost as many segments"
    assert not leave.due(frozenset("bc"), 2, hosts, gone, now), "that one is left"
    more = hosts | {"d"}
    assert any(leave.due(nodes, 2, more, gone, now + second) for second in range(round(settings.repair_seconds) + 2))


def looked(rig: Rig, times: int = 4) -> None:
    for _ in range(times):
        rig.watch()
        rig.settle()


def test_payloads_go_to_others_and_then_from_the_store() -> None:
    rig = Rig()
    for number in range(1, 6):
        rig.put(number)
    (leaving,) = Random(1).sample(sorted({host for ref in rig.refs() for host in ref.holders}), 1)
    held = rig.registry.held_on(leaving)
    assert held > 0
    rig.directory.evacuated = {leaving}
    looked(rig)
    assert rig.registry.held_on(leaving) == 0
    assert all(len(ref.holders) == 3 and leaving not in ref.holders for ref in rig.refs())
    rig.now += PACE.orphan_seconds + PACE.inventory_seconds
    looked(rig)
    assert rig.stores[leaving] == set(), "what nobody names any more is deleted"
    rig.put(9)
    assert leaving not in rig.ref(9).holders


def test_with_too_few_others_payloads_stay_and_nobody_is_asked_again_and_again() -> None:
    rig = Rig()
    rig.directory.alive.discard("d")
    ref = rig.put()
    assert set(ref.holders) == {"a", "b", "c"}
    rig.directory.evacuated = {"a"}
    looked(rig)
    assert rig.ref() == ref
    for _ in range(5):
        rig.watch()
        assert not any(isinstance(one, MakeCopies) for one in rig.due)
        rig.settle()
    assert set(rig.put(2).holders) == {"a", "b", "c"}, "new ones need that host too"


def test_a_holder_that_dies_leaves_as_many_named_as_were() -> None:
    """Held by one that leaves and one that is dead, with one host more: that one's copy is beside the leaving one's."""
    rig = Rig()
    rig.registry.configure(WorkQueueSpec("log", 2, 1))
    rig.put()
    leaving, dying = rig.ref().holders
    for host in sorted(set("abcd") - {leaving, dying})[1:]:
        rig.directory.alive.discard(host)
    looked(rig)
    rig.directory.alive.discard(dying)
    rig.directory.evacuated = {leaving}
    looked(rig, 6)
    holders = [host for host in rig.ref().holders if host in rig.directory.alive]
    assert len(holders) == 2
    assert all(rig.ref().blob in rig.stores[host] for host in holders)
    rig.directory.alive.add(dying)
    rig.now += PACE.inventory_seconds
    looked(rig, 6)
    assert leaving not in rig.ref().holders
    assert len(rig.ref().holders) == 2


def test_a_host_that_dies_while_it_is_left_is_made_up_for() -> None:
    rig = Rig()
    rig.put()
    leaving = rig.ref().holders[0]
    rig.directory.evacuated = {leaving}
    rig.watch()
    rig.settle(MakeCopies)
    rig.directory.alive.discard(leaving)
    looked(rig, 6)
    assert len({*rig.ref().holders} - {leaving}) == 3, "made up for, whether or not it is still named"
    rig.directory.alive.add(leaving)
    rig.now += PACE.inventory_seconds
    looked(rig, 6)
    assert leaving not in rig.ref().holders
    assert len(rig.ref().holders) == 3
