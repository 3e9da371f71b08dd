"""What of two broadcasts differs, told as events. Not covered: who broadcasts (tests/integration/test_topology.py)."""

from __future__ import annotations

import msgspec
import pytest

from roq.cli.status import event_row
from roq.client.broadcasts import Change, TopologyEvent, changes
from roq.wire.assignment import QueueRecord, QueueSettings
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, WorkQueueInfo
from roq.wire.policy import Policy
from roq.wire.work_queue import WorkQueueRecord, WorkQueueSpec


def host(name: str, alive: bool = True, draining: bool = False) -> HostInfo:
    return HostInfo(name, "10.0.0.1", 1, alive, draining, 0, 8, 0, 0.0, 0.0, None)


def queue(name: str, at: str = "a", running: bool = True, made: str = "t", **exchanges: str) -> QueueInfo:
    return QueueInfo(QueueRecord(name, QueueSettings(), running, at, 1, exchanges, 0.0, made), (), True, Policy())


def work(name: str, at: str = "a", made: str = "t") -> WorkQueueInfo:
    return WorkQueueInfo(WorkQueueRecord(name, WorkQueueSpec("log", 1, 1), 0, at, 1, (), 0.0, made), (), True)


def view(*parts: HostInfo | QueueInfo | WorkQueueInfo, epoch: int = 3, time: float = 9.0) -> ClusterView:
    hosts, queues, works = (
        tuple(one for one in parts if isinstance(one, kind)) for kind in (HostInfo, QueueInfo, WorkQueueInfo)
    )
    return ClusterView(epoch, "10.0.0.9:5500", time, hosts, queues, works)  # type: ignore[arg-type]


def told(before: ClusterView, after: ClusterView) -> list[tuple[str, ...]]:
    """Change and the names that are said."""
    events = changes(before, after)
    assert {(event.time, event.epoch, event.view) for event in events} <= {(after.time, after.epoch, None)}
    return [tuple(filter(None, (event.change, event.queue, event.work_queue, event.exchange, event.host))) for event in events]


def test_the_first_view_and_one_of_another_term_are_told_whole() -> None:
    first, later = view(host("a")), view(host("a"), host("b"), epoch=4)
    assert changes(None, first) == [TopologyEvent(Change.SNAPSHOT, 9.0, 3, view=first)]
    assert changes(first, later) == [TopologyEvent(Change.SNAPSHOT, 9.0, 4, view=later)]
    assert changes(later, msgspec.structs.replace(later, time=11.0)) == []


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        (view(), view(host("a")), [("host-joined", "a")]),
        (view(host("a")), view(), [("host-left", "a")]),
        (view(host("a")), view(host("a", alive=False)), [("host-left", "a")]),
        (view(host("a", alive=False)), view(host("a")), [("host-joined", "a")]),
        (view(host("a")), view(host("a", draining=True)), [("host-draining", "a")]),
        (view(host("a", draining=True)), view(host("a")), [("host-draining-ended", "a")]),
        (view(), view(host("a", draining=True)), [("host-joined", "a"), ("host-draining", "a")]),
        (view(), view(queue("q", x="a")), [("queue-created", "q", "a"), ("exchange-added", "q", "x", "a")]),
        (view(queue("q", x="a")), view(), [("queue-removed", "q", "a")]),
        (view(queue("q")), view(queue("q", made="u")), [("queue-removed", "q", "a"), ("queue-created", "q", "a")]),
        (view(queue("q")), view(queue("q", running=False)), [("queue-stopped", "q", "a")]),
        (view(queue("q", running=False)), view(queue("q")), [("queue-started", "q", "a")]),
        (view(queue("q")), view(queue("q", at="b")), [("monitor-moved", "q", "b")]),
        (view(queue("q", x="a")), view(queue("q", x="b")), [("exchange-moved", "q", "x", "b")]),
        (
            view(queue("q", x="a")),
            view(queue("q", y="b")),
            [("exchange-removed", "q", "x", "a"), ("exchange-added", "q", "y", "b")],
        ),
        (view(), view(work("w")), [("work-queue-created", "w", "a")]),
        (view(work("w")), view(), [("work-queue-removed", "w", "a")]),
        (view(work("w")), view(work("w", at="b")), [("master-moved", "w", "b")]),
        (view(work("w")), view(work("w", made="u")), [("work-queue-removed", "w", "a"), ("work-queue-created", "w", "a")]),
    ],
)
def test_what_differs_is_told(before: ClusterView, after: ClusterView, events: list[tuple[str, ...]]) -> None:
    assert told(before, after) == events


def test_an_event_as_json_has_all_but_the_view_which_is_told_by_names() -> None:
    known = msgspec.to_builtins(TopologyEvent(Change.EXCHANGE_MOVED, 9.0, 3, "a", "q", "x", "w"))
    assert known.pop("view") is None
    assert msgspec.to_builtins(event_row(msgspec.convert(known, TopologyEvent))) == known
    (snapshot,) = changes(None, view(host("a"), host("gone", alive=False), queue("q"), work("w")))
    assert msgspec.to_builtins(event_row(snapshot)) == {
        "change": "snapshot",
        "time": 9.0,
        "epoch": 3,
        "leader": "10.0.0.9:5500",
        "hosts": ["a"],
        "queues": ["q"],
        "work_queues": ["w"],
    }
