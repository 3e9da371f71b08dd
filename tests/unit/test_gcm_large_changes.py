"""Changes of the GCM that don't fit into one write: 1,000 groups of a queue, what no node can hold, and leaders that die
between two parts of a removal. A tree in memory that takes what ZooKeeper takes; not covered: ZooKeeper itself, hosts that act.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from gcm import term as terms
from gcm import transactions, work_queues
from gcm.background import Finisher
from gcm.cluster import ClusterState
from gcm.reconcile import changes
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.election import Fence
from roq.coordination.link import Check, Create, Delete, Node, NodeExists, NoNode, Op, SetData
from roq.coordination.session import DATA_BYTES_MAX
from roq.errors import HostFull, NotLeader, UnknownFormat, ZooKeeperUnavailable
from roq.ids import NAME_CHARACTERS_MAX
from roq.runtime.observe import Counters
from roq.wire.assignment import STORES, Assignment, QueueRecord, from_json, to_json, work_subject
from roq.wire.gcm import CreateExchange, CreateQueue, CreateWorkQueue, RemoveQueue, RemoveWorkQueue, SetPolicy
from roq.wire.policy import Policy
from roq.wire.recording import Record, tape_log, tapes_of
from roq.wire.tree_format import FORMAT, TreeFormat
from roq.wire.work_queue import GroupSource
from tests.unit.test_recorded_queues import cluster_of

CHANCE = random.Random(8)


class TreeTwin:
    """What a term asks of its session, kept in a tree. writes_left: multis that it takes before it is away, None: all."""

    def __init__(self) -> None:
        self.nodes: dict[str, bytes] = {}
        self.writes_left: int | None = None
        self.largest = 0
        self.watch_data = self.watch_children = Mock()

    async def children(self, path: str) -> list[str]:
        inside = (name.removeprefix(f"{path}/") for name in self.nodes if name.startswith(f"{path}/"))
        return sorted({name.partition("/")[0] for name in inside})

    async def get(self, path: str) -> Node | None:
        data = self.nodes.get(path)
        return Node(data, 0, 1, 1, 0) if data is not None else None

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [await self.get(path) for path in paths]

    async def ensure_path(self, path: str) -> None:
        self.nodes.setdefault(path, b"")

    async def multi(self, operations: tuple[Op, ...]) -> None:
        if self.writes_left is not None:
            if not self.writes_left:
                raise ZooKeeperUnavailable("away")
            self.writes_left -= 1
        self.apply(operations)

    def apply(self, operations: tuple[Op, ...] | list[Op]) -> None:
        nodes, count = dict(self.nodes), 0
        for one in operations:
            count += len(one.path.encode()) + 40
            match one:
                case Create(path, data) | SetData(path, data):
                    if (path in nodes) is isinstance(one, Create):
                        raise (NodeExists if isinstance(one, Create) else NoNode)("refused", path)
                    nodes[path] = data
                    count += len(data)
                case Delete(path):
                    if nodes.pop(path, None) is None:
                        raise NoNode("no such node", path)
                case Check():
                    pass
        self.largest = max(self.largest, count)
        assert count < 1024 * 1024, "ZooKeeper would cut the connection"
        self.nodes = nodes

    def names(self, folder: str) -> set[str]:
        return {path.removeprefix(f"{folder}/") for path in self.nodes if path.startswith(f"{folder}/")}

    def assigned(self) -> set[str]:
        """Queues and work queues that hosts shall run something of."""
        told = [from_json(self.nodes[path], Assignment) for path in map(paths.assignment, "ab") if path in self.nodes]
        return {spec.subject for assignment in told for spec in assignment.processes}


@asynccontextmanager
async def leading(tree: TreeTwin, cluster: ClusterState | None = None) -> AsyncIterator[LeaderTerm]:
    """A term that reads the tree; cluster: it has read this."""
    session: Any = tree
    fence, counters = Fence(2, 2), Counters()
    if cluster is None:
        term = await LeaderTerm.begin(session, fence, counters)
    else:
        term = LeaderTerm(session, fence, cluster, counters)
    yield term
    await term.end(None)


def group_of(queue: str, name: str, **fields: Any) -> Callable[[ClusterState], ClusterState]:
    request = CreateWorkQueue(f"{queue}@{name}", f"t-{name}", source=GroupSource(queue, **fields))
    return lambda now: work_queues.create(now, request, 7.0, CHANCE)


async def queue_with_groups(term: LeaderTerm, queue: str, names: list[str], **fields: Any) -> None:
    """The queue, and its groups as many clients ask for them at once."""
    request = CreateQueue(queue, f"t-{queue}", host="a", record=Record())
    await term.change(lambda now: transactions.create_queue(now, request, 7.0, CHANCE), queue, STORES)
    groups = [(work_subject(f"{queue}@{name}"), group_of(queue, name, **fields)) for name in names]
    await asyncio.gather(*(term.change(decide, subject, STORES) for subject, decide in groups))


@pytest.mark.parametrize(
    ("queue", "letter"), [("orders", "g"), ("q" * 50, "漢"), ("漢" * 90, "漢")], ids=["narrow", "wide", "widest"]
)
async def test_a_queue_of_a_thousand_groups_is_made_and_removed(queue: str, letter: str) -> None:
    tree, width = TreeTwin(), NAME_CHARACTERS_MAX - len(queue) - 1
    names = [f"{number}".ljust(width, letter) for number in range(work_queues.GROUPS_MAX)]
    async with leading(tree, cluster_of("a", "b")) as term:
        await queue_with_groups(term, queue, names)
        assert tree.names(paths.WORK_QUEUES) == {f"{queue}@{name}" for name in names}
        assert len(tree.assigned()) == 2 + work_queues.GROUPS_MAX, "with the queue, and the stores"
        assert max(map(len, tree.nodes.values())) < DATA_BYTES_MAX
        await term.change(lambda now: transactions.remove_queue(now, RemoveQueue(queue, "r"), 8.0), queue)
    assert (tree.names(paths.QUEUES), tree.names(paths.WORK_QUEUES)) == (set(), set())
    assert len(tree.assigned()) == 1
    assert tree.largest > 300_000, "the load was what it should be"


async def test_what_no_assignment_can_hold_is_refused_and_nothing_of_it_written() -> None:
    """Else the next leader would find a record whose assignment it can't write, and could not lead."""
    tree, topics = TreeTwin(), tuple(f"{number:0250}" for number in range(work_queues.TOPICS_MAX))
    async with leading(tree, cluster_of("a", "b")) as term:
        await queue_with_groups(term, "q", [])
        refused = ""
        for number in range(100):
            before = dict(tree.nodes)
            try:
                await term.change(group_of("q", f"{number}", topics=topics), work_subject(f"q@{number}"), STORES)
            except HostFull as error:
                refused = str(error)
                break
        assert refused.startswith("no more fits on these hosts: ")
        assert tree.nodes == before
        assert len(tree.names(paths.WORK_QUEUES)) > 30
        await term.change(lambda now: work_queues.remove(now, RemoveWorkQueue("q@0", "r"), 8.0), work_subject("q@0"))
        await term.change(group_of("q", "small"), work_subject("q@small"), STORES)
    async with leading(tree) as after:
        assert "q@small" in after.view.cluster.work_queues


def with_policy(queue: str) -> Callable[[ClusterState], ClusterState]:
    request = SetPolicy(queue, Policy(), "p")
    return lambda now: transactions.set_policy(now, request)


def too_large(now: ClusterState) -> ClusterState:
    record = msgspec.structs.replace(now.queues["q"], transaction="t" * DATA_BYTES_MAX)
    return replace(now, queues={**now.queues, "q": record})


async def test_a_change_that_does_not_fit_harms_none_that_was_asked_for_at_the_same_time() -> None:
    tree = TreeTwin()
    async with leading(tree, cluster_of("a", "b")) as term:
        await queue_with_groups(term, "q", [])
        changed = [
            term.change(with_policy("q")),
            term.change(too_large),
            term.change(group_of("q", "one"), work_subject("q@one")),
        ]
        first, second, third = await asyncio.gather(*changed, return_exceptions=True)
        assert isinstance(first, ClusterState)
        assert isinstance(second, HostFull)
        assert isinstance(third, ClusterState)
        assert "q@one" in tree.names(paths.WORK_QUEUES)
        assert "q" in third.policies
        assert not term.ended.done()
        writes = term.counters["writes"]
        await asyncio.gather(*(term.change(group_of("q", name), work_subject(f"q@{name}")) for name in ("two", "three")))
        assert term.counters["writes"] == writes + 1, "together again"


async def test_what_a_leader_does_by_itself_is_tried_again_when_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not end its term."""
    monkeypatch.setattr(terms, "PAUSE_SECONDS", 0.01)
    async with leading(TreeTwin(), cluster_of("a", "b")) as term:
        await queue_with_groups(term, "q", [])
        full = True

        def decide(now: ClusterState) -> ClusterState:
            nonlocal full
            full, was_full = False, full
            return too_large(now) if was_full else with_policy("q")(now)

        after = await term.change_when_it_fits(decide)
        assert "q" in after.policies
        await term.end(None)
        with pytest.raises(NotLeader):
            await term.change_when_it_fits(decide)


async def test_only_a_tree_of_a_newer_format_is_told_as_one_that_nobody_here_may_lead(caplog: pytest.LogCaptureFixture) -> None:
    tree = TreeTwin()
    tree.nodes[paths.FORMAT] = to_json(TreeFormat(FORMAT + 1, FORMAT + 1, "9.0.0"))
    with pytest.raises(UnknownFormat):
        async with leading(tree):
            pass
    assert [line.levelname for line in caplog.records if "stands for no election" in line.message] == ["ERROR"]


Removal = tuple[Callable[[ClusterState], ClusterState], str]
REMOVALS: dict[str, Removal] = {
    "queue": (lambda now: transactions.remove_queue(now, RemoveQueue("q", "r"), 8.0), "q"),
    "group": (lambda now: work_queues.remove(now, RemoveWorkQueue("q@one", "r"), 8.0), work_subject("q@one")),
}
LEFT = {"queue": set[str](), "group": {"q@two"}}


async def written(tree: TreeTwin) -> ClusterState:
    """A queue of two Exchanges and two groups, another with one group, their tapes and logs, as a leader has written them."""
    cluster = cluster_of("a", "b")
    tree.apply(changes(ClusterState(1, {}), cluster))
    async with leading(tree, cluster) as term:
        await queue_with_groups(term, "q", ["one", "two"])
        await queue_with_groups(term, "r", ["one"])
        request = CreateExchange("q", "t-2")
        await term.change(lambda now: transactions.create_exchange(now, request, 7.0, CHANCE), "q")
        cluster = term.view.cluster
    logs = [record.spec.log for record in cluster.work_queues.values()]
    tapes = [tape_log(tapes_of(queue, f"t-{queue}"), "e") for queue in "qr"]
    tree.nodes |= {paths.log(name): b"" for name in (*logs, *tapes)}
    return cluster


async def asked(term: LeaderTerm, removal: Removal) -> None:
    """By a client, as often as it likes."""
    finisher = Finisher(term)
    decide, subject = removal
    await term.change(decide, subject)
    await finisher.settle("r", 5.0)
    await finisher.stop()


@pytest.mark.parametrize("what", REMOVALS)
async def test_a_removal_whose_leader_died_between_two_parts_is_finished_by_the_next(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "BYTES_AT_ONCE", 1)  # so each node is a part of its own
    for done in range(50):
        tree = TreeTwin()
        cluster = await written(tree)
        logs = {name: paths.log(record.spec.log) for name, record in cluster.work_queues.items()}
        tree.writes_left = done
        async with leading(tree, cluster) as first:
            complete = False
            try:
                await first.change(*REMOVALS[what])
                complete = True
            except NotLeader:
                assert first.ended.done()
        tree.writes_left = None
        async with leading(tree) as second:
            await asked(second, REMOVALS[what])
        groups = {*LEFT[what], "r@one"}
        assert tree.names(paths.WORK_QUEUES) == groups, done
        assert {subject for subject in tree.assigned() if subject.startswith(work_subject(""))} == set(
            map(work_subject, groups)
        )
        assert {name for name, path in logs.items() if path in tree.nodes} == groups
        assert tree.names(paths.QUEUES) == ({"r"} if what == "queue" else {"q", "r"})
        assert "r" in tree.assigned()
        assert ("q" in tree.assigned()) is (what != "queue")
        if what != "queue":
            exchanges = from_json(tree.nodes[paths.queue("q")], QueueRecord).exchanges
            assert len(exchanges) == 2
        if complete:
            break
    assert 2 <= done < 49, "each part was the last one once"


@pytest.mark.parametrize("transaction", ["t-new", "t-q"])
async def test_a_later_queue_of_this_name_is_not_taken_for_the_removed_one(transaction: str) -> None:
    """Not even one that is made under the same transaction id."""
    tree = TreeTwin()
    cluster = await written(tree)
    async with leading(tree, cluster) as first:
        await first.change(*REMOVALS["queue"])
        again = CreateQueue("q", transaction, host="a", record=Record())
        await first.change(lambda now: transactions.create_queue(now, again, 9.0, CHANCE), "q", STORES)
        await first.change(group_of("q", "three"), work_subject("q@three"), STORES)
    async with leading(tree) as second:
        await asked(second, REMOVALS["queue"])
    assert tree.names(paths.QUEUES) == {"q", "r"}
    assert tree.names(paths.WORK_QUEUES) == {"q@three", "r@one"}
