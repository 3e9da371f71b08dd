"""What of two views is told as events, and what decisions and tapes add. Not covered: who broadcasts, and the asking
(tests/integration/test_events.py)."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from roq.cli.events import event_line, wanted
from roq.client.broadcasts import Change
from roq.client.events import (
    SENTENCES,
    ClusterEvent,
    DecisionLog,
    EventKind,
    closed_tapes,
    events_between,
    watching,
)
from roq.client.fleet_events import SHOWN, asks_fleet, fleet_changes
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.wire.assignment import (
    HostReport,
    Leaving,
    MonitorAddress,
    ProcessKind,
    ProcessState,
    QueueRecord,
    QueueSettings,
    RunningProcess,
    to_json,
)
from roq.wire.fleet import FleetInfo, MachineState, MachineView
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, Tapes, TapeView, WorkQueueInfo
from roq.wire.kpi import Decision
from roq.wire.policy import Bounds, Policy
from roq.wire.recording import Record
from roq.wire.work_queue import GroupSource, WorkQueueRecord, WorkQueueSpec

MONITORS = (MonitorAddress("a", "10.0.0.1", 1, 2),)
POLICY = Policy(bounds=Bounds(max_exchanges=9))


def process(name: str, restarts: int = 0, state: ProcessState = ProcessState.RUNNING, error: str = "") -> RunningProcess:
    kind, _, rest = name.partition("/")
    queue, _, exchange = rest.partition("/")
    return RunningProcess(name, ProcessKind(kind), queue, exchange, state, 7, {}, restarts, error)


def host(
    name: str,
    *processes: RunningProcess,
    alive: bool = True,
    draining: bool = False,
    life: str = "life",
    leaving: Leaving = Leaving.NOTHING,
    stopping: bool = False,
) -> HostInfo:
    report = HostReport(name, "10.0.0.1", life, 1, 1, processes) if alive else None
    return HostInfo(name, "10.0.0.1", 1, alive, draining, 0, 8, 0, 0.0, 0.0, report, leaving, stopping)


def queue(
    name: str = "q",
    at: str = "a",
    *,
    running: bool = True,
    made: str = "t",
    serves: bool = True,
    policy: Policy | None = None,
    record: Record | None = None,
    recorded: bool = False,
    term: int = 1,
    **exchanges: str,
) -> QueueInfo:
    kept = QueueRecord(name, QueueSettings(), running, at, term, exchanges, 0.0, made, record=record, recorded=recorded)
    return QueueInfo(kept, MONITORS if serves else (), True, policy or Policy())


def work(
    name: str = "w", at: str = "a", *, made: str = "t", ready: bool = True, term: int = 1, source: GroupSource | None = None
) -> WorkQueueInfo:
    spec = WorkQueueSpec("log", 1, 1, source=source)
    return WorkQueueInfo(WorkQueueRecord(name, spec, 0, at, term, (), 0.0, made), (), ready)


def group(**options: object) -> WorkQueueInfo:
    return work("q@g", source=GroupSource("q"), **options)  # type: ignore[arg-type]


def view(
    *parts: HostInfo | QueueInfo | WorkQueueInfo, epoch: int = 3, leader: str = "10.0.0.9:5500", time: float = 9.0
) -> ClusterView:
    hosts, queues, works = (
        tuple(one for one in parts if isinstance(one, kind)) for kind in (HostInfo, QueueInfo, WorkQueueInfo)
    )
    return ClusterView(epoch, leader, time, hosts, queues, works)  # type: ignore[arg-type]


BETWEEN = [  # before, after, what is told: kind and sentence
    (view(), view(epoch=4, leader="10.0.0.8:5500"), {"leader-changed": "another GCM leads: 10.0.0.8:5500, epoch 4"}),
    (view(), view(epoch=4), {"leader-changed": "another GCM leads: 10.0.0.9:5500, epoch 4"}),
    (view(), view(host("a")), {"host-joined": "host a joined"}),
    (view(host("a")), view(), {"host-left": "host a left: its HCM ended or can't be reached"}),
    (view(host("a")), view(host("a", alive=False)), {"host-left": "host a left: its HCM ended or can't be reached"}),
    (view(host("a")), view(host("a", draining=True)), {"host-draining": "host a is cordoned: nothing new is placed there"}),
    (
        view(host("a")),
        view(host("a", draining=True, leaving=Leaving.PROCESSES)),
        {"host-draining": "host a is drained: its queues and work queues move to other hosts"},
    ),
    (
        view(host("a")),
        view(host("a", draining=True, leaving=Leaving.EVERYTHING)),
        {"host-draining": "host a is evacuated: its queues, work queues and what its store keeps move to other hosts"},
    ),
    (
        view(host("a")),
        view(host("a", draining=True, stopping=True)),
        {"host-draining": "host a is about to end: its queues and work queues move to other hosts"},
    ),
    (
        view(host("a", draining=True)),
        view(host("a", draining=True, stopping=True)),
        {"host-draining": "host a is about to end: its queues and work queues move to other hosts"},
    ),
    (view(host("a", draining=True, stopping=True)), view(host("a", draining=True, stopping=True)), {}),
    (view(host("a", draining=True)), view(host("a")), {"host-draining-ended": "host a takes new things again"}),
    (
        view(host("a", process("exchange/q/e1"))),
        view(host("a", process("exchange/q/e1", 1))),
        {"process-died": "exchange/q/e1 died on a and was started again: once"},
    ),
    (
        view(host("a", process("master/w", 2))),
        view(host("a", process("master/w", 5))),
        {"process-died": "master/w died on a and was started again: 3 times"},
    ),
    (
        view(host("a", process("monitor/q"))),
        view(host("a", process("monitor/q", 9, ProcessState.FAILED, "no port"))),
        {"process-given-up": "monitor/q on a was given up: no port"},
    ),
    (
        view(host("a", process("monitor/q", 9, ProcessState.FAILED))),
        view(host("a", process("monitor/q", 10, ProcessState.FAILED))),
        {},
    ),
    # an HCM that was started anew begins to count at 0; a process that is new has not died
    (view(host("a", process("store", 5))), view(host("a", process("store", 6), life="next")), {}),
    (view(host("a")), view(host("a", process("store", 1))), {}),
    (view(host("a", alive=False)), view(host("a", process("store", 1))), {"host-joined": "host a joined"}),
    (view(), view(queue()), {"queue-created": "queue q was created on a"}),
    (view(queue()), view(), {"queue-removed": "queue q was removed"}),
    (
        view(queue(made="t")),
        view(queue(made="u", serves=False)),  # another one of the same name
        {"queue-removed": "queue q was removed", "queue-created": "queue q was created on a"},
    ),
    (view(queue(running=False, serves=False)), view(queue(serves=False)), {"queue-started": "queue q was started"}),
    (view(queue()), view(queue(running=False, serves=False)), {"queue-stopped": "queue q was stopped"}),
    (
        view(queue()),
        view(queue(serves=False)),
        {"queue-unavailable": "queue q has no Monitor that serves: messages flow on, nobody joins"},
    ),
    (view(queue(serves=False)), view(queue()), {"queue-available": "queue q serves"}),
    (view(queue()), view(queue(policy=POLICY)), {"policy-changed": "queue q has another scaling policy"}),
    (
        view(queue()),
        view(queue(record=Record(1.0), recorded=True)),
        {"recording-changed": "queue q is recorded: days 1.0, max_bytes 0, copies 0, ack 0"},
    ),
    (
        view(queue(record=Record(1.0), recorded=True)),
        view(queue(record=Record(1.0))),
        {"recording-changed": "queue q is recorded no longer"},
    ),
    (view(queue()), view(queue(at="b", term=2)), {"monitor-moved": "the Monitor of queue q is on b now, term 2"}),
    (view(queue()), view(queue(e1="b")), {"exchange-added": "queue q has another Exchange, e1 on b"}),
    (view(queue(e1="b")), view(queue()), {"exchange-removed": "Exchange e1 of queue q on b was removed"}),
    (view(queue(e1="b")), view(queue(e1="c")), {"exchange-moved": "Exchange e1 of queue q is on c now"}),
    (view(), view(work()), {"work-queue-created": "work queue w was created, its master is on a"}),
    (view(work()), view(), {"work-queue-removed": "work queue w was removed"}),
    (view(work()), view(work(ready=False)), {"work-queue-unavailable": "work queue w has no master that serves"}),
    (view(work(ready=False)), view(work()), {"work-queue-available": "work queue w serves"}),
    (view(work()), view(work(at="b", term=2)), {"master-moved": "the master of work queue w is on b now, term 2"}),
    (view(), view(group()), {"group-created": "group g of queue q was made, its master is on a"}),
    (view(group()), view(), {"group-removed": "group g of queue q was removed"}),
    (view(group()), view(group(at="b", term=2)), {"master-moved": "the master of work queue q@g is on b now, term 2"}),
    (view(group()), view(group(ready=False)), {"work-queue-unavailable": "work queue q@g has no master that serves"}),
    (view(host("a"), queue(), work(), group()), view(host("a"), queue(), work(), group(), time=11.0), {}),
]


@pytest.mark.parametrize(("before", "after", "told"), BETWEEN)
def test_what_differs_is_told_in_a_sentence(before: ClusterView, after: ClusterView, told: dict[str, str]) -> None:
    found = events_between(before, after)
    assert {event.kind.value: str(event) for event in found} == told
    assert len(found) == len(told)
    assert {event.time for event in found} <= {after.time}


def test_every_kind_is_told_of_here_and_has_a_sentence() -> None:
    elsewhere = {EventKind.WATCHING, EventKind.MISSED, EventKind.DECISION, EventKind.DECISION_DONE, EventKind.TAPE_CLOSED}
    elsewhere |= {EventKind(shown) for shown in SHOWN.values()} | {EventKind.FLEET_PROBLEM, EventKind.FLEET_WELL}
    assert {EventKind(kind) for _, _, told in BETWEEN for kind in told} == set(EventKind) - elsewhere
    assert SENTENCES.keys() == set(EventKind)
    assert {change.value for change in Change} - {"snapshot"} <= {kind.value for kind in EventKind}


def test_events_say_whose_they_are() -> None:
    [died] = events_between(view(host("a", process("master/q@g"))), view(host("a", process("master/q@g", 1))))
    assert (died.host, died.work_queue, died.queue, died.process) == ("a", "q@g", "", "master/q@g")
    [died] = events_between(view(host("a", process("exchange/q/e"))), view(host("a", process("exchange/q/e", 1))))
    assert (died.queue, died.exchange, died.work_queue) == ("q", "e", "")
    [made] = events_between(view(), view(group()))
    assert (made.queue, made.group, made.work_queue, made.host) == ("q", "g", "q@g", "a")
    assert str(watching(view(host("a"), host("b", alive=False), queue()))) == (
        "watching 1 hosts, 1 queues and 0 work queues; 10.0.0.9:5500 leads"
    )


def test_under_another_leader_what_was_before_is_compared_and_a_pause_is_told() -> None:
    before, after = view(host("a"), queue()), view(host("a"), queue(), queue("r"), epoch=4)
    assert [event.kind.value for event in events_between(before, after, 4.0)] == ["leader-changed", "queue-created"]
    missed, *rest = events_between(before, after, 12.3)
    assert str(missed) == "nothing was heard for 12 s: what came and went meanwhile is not known"
    assert [event.kind.value for event in rest] == ["leader-changed", "queue-created"]


# --- decisions ----------------------------------------------------------------------------------------------------------

LIFE = ("q", "t")


def decision(time: float, outcome: str = "", cause: str = "busy") -> Decision:
    return Decision(time, "scale-out", cause, "e2", "b", outcome=outcome)


def told(found: list[ClusterEvent]) -> list[tuple[str, float, str]]:
    return [(event.kind.value, event.time, event.detail) for event in found]


def test_a_decision_is_told_when_it_is_taken_and_when_it_is_done() -> None:
    known = DecisionLog(100.0)
    assert known.take(LIFE, [], 101.0) == []
    [begun] = known.take(LIFE, [decision(102.0)], 103.0)
    assert (str(begun), begun.time, begun.decision) == ("queue q: scale-out, busy", 102.0, decision(102.0))
    assert (begun.exchange, begun.host) == ("e2", "b")
    assert known.take(LIFE, [decision(102.0)], 104.0) == []
    [done] = known.take(LIFE, [decision(102.0, "done")], 105.0)
    assert (str(done), done.time, done.decision) == ("queue q: scale-out: done", 105.0, decision(102.0, "done"))
    assert known.take(LIFE, [decision(102.0, "done")], 106.0) == []
    # two looks may be far apart
    assert told(known.take(LIFE, [decision(102.0, "done"), decision(107.0, "failed")], 108.0)) == [
        ("decision", 107.0, "scale-out, busy"),
        ("decision-done", 108.0, "scale-out: failed"),
    ]


def test_what_was_decided_before_is_not_told_but_what_becomes_of_it_is() -> None:
    known = DecisionLog(100.0)
    assert known.take(LIFE, [decision(90.0, "done"), decision(95.0)], 100.0) == []
    assert told(known.take(LIFE, [decision(90.0, "done"), decision(95.0, "done")], 102.0)) == [
        ("decision-done", 102.0, "scale-out: done")
    ]
    assert len(DecisionLog(0.0).take(LIFE, [decision(90.0, "done"), decision(95.0)], 100.0)) == 3


def test_a_monitor_that_took_over_knows_no_decisions_and_repeats_none() -> None:
    known = DecisionLog(100.0)
    assert len(known.take(LIFE, [decision(101.0, "done")], 102.0)) == 2
    assert known.take(LIFE, [], 103.0) == []
    assert told(known.take(LIFE, [decision(104.0)], 105.0)) == [("decision", 104.0, "scale-out, busy")]
    known.keep([])
    assert len(known.take(LIFE, [decision(104.0)], 106.0)) == 1  # of a queue of that name that is new


# --- tapes --------------------------------------------------------------------------------------------------------------


def tape(exchange: str, *segments: SegmentMetadata, live: bool = False, trimmed: int = 0) -> TapeView:
    return TapeView(f"log-{exchange}", exchange, live, to_json(LogMeta(trimmed=trimmed, segments=segments)))


def segment(first: int, last: int = -1) -> SegmentMetadata:
    state = SegmentState.OPEN if last < 0 else SegmentState.CLOSED
    return SegmentMetadata(f"s{first}", first, state, (Fragment(first, ("a",)),), last)


def test_a_tape_has_ended_when_its_last_segment_is_closed() -> None:
    views = (
        tape("gone", segment(1, 7), segment(8, 9)),
        tape("open", segment(1, 7), segment(8)),
        tape("empty", trimmed=4),
        tape("live", segment(1, 7), live=True),
        tape("of-before", segment(1, 7)),
        TapeView("log", "odd", False, b"{"),
    )
    found = Tapes("q-t", Record(), True, views, {})
    awaited = dict.fromkeys(("gone", "open", "empty", "live", "odd"), 1.0)
    assert [str(event) for event in closed_tapes("q", awaited, found, 5.0)] == [
        "the tape of Exchange gone of queue q ended: entries 1 to 9",
        "the tape of Exchange empty of queue q ended: it is empty",
    ]


# --- the command --------------------------------------------------------------------------------------------------------


def test_one_queue_s_events_and_what_nobody_shall_miss() -> None:
    about = {"queue": ClusterEvent(EventKind.QUEUE_STOPPED, 1.0, queue="q")}
    about["group"] = ClusterEvent(EventKind.MASTER_MOVED, 1.0, queue="q", work_queue="q@g", group="g")
    about["host"] = ClusterEvent(EventKind.HOST_LEFT, 1.0, host="a")
    about["missed"] = ClusterEvent(EventKind.MISSED, 1.0)

    def told_of(name: str | None, kinds: list[EventKind] | None = None) -> list[str]:
        return [key for key, event in about.items() if wanted(event, name, kinds)]

    assert told_of(None) == ["queue", "group", "host", "missed"]
    assert told_of("q") == ["queue", "group", "missed"]
    assert told_of("q@g") == ["group", "missed"]
    assert told_of("r") == ["missed"]
    assert told_of("q", [EventKind.MASTER_MOVED]) == ["group"]


def test_an_event_as_json_has_its_sentence_and_only_what_applies() -> None:
    event = ClusterEvent(EventKind.DECISION, 1.0, "b", "q", "e2", detail="scale-out, busy", decision=decision(1.0))
    line = msgspec.json.decode(msgspec.json.encode(event_line(event)))
    assert line.pop("decision")["cause"] == "busy"
    assert line == {
        "kind": "decision",
        "time": 1.0,
        "text": "queue q: scale-out, busy",
        "host": "b",
        "queue": "q",
        "exchange": "e2",
        "detail": "scale-out, busy",
    }


# --- the fleet ----------------------------------------------------------------------------------------------------------


def fleet(problem: str = "", **machines: MachineState) -> FleetInfo:
    idle = {MachineState.RETURNING: "idle"}
    views = tuple(MachineView(name, state, 0.0, False, 0, idle.get(state, "")) for name, state in machines.items())
    return FleetInfo("command", "roq-", None, views, (), problem)


@pytest.mark.parametrize(
    ("before", "asked"),
    [
        pytest.param(None, [0, 15, 30], id="nobody answers"),
        pytest.param(msgspec.structs.replace(fleet(), provider=""), [0, 15, 30], id="no fleet"),
        pytest.param(fleet(), [*range(31)], id="a provider"),
        pytest.param(msgspec.structs.replace(fleet(one=MachineState.SERVING), provider=""), [*range(31)], id="machines left"),
    ],
)
def test_who_has_no_fleet_is_asked_for_one_now_and_then(before: FleetInfo | None, asked: list[int]) -> None:
    assert [number for number in range(31) if asks_fleet(number, before)] == asked


def test_what_a_machine_goes_through_is_told_once_each() -> None:
    states = [None, *MachineState, None]
    course = [fleet(**({} if state is None else {"m": state})) for state in states]
    told = [change for before, after in pairwise(course) for change in fleet_changes(before, after)]
    assert told == [
        ("machine-ordered", "m", ""),
        ("machine-serving", "m", ""),
        ("machine-returning", "m", ": idle"),
        ("machine-gone", "m", ""),
    ]


def test_machines_that_are_seen_late_or_no_more() -> None:
    gone = list(fleet_changes(fleet(a=MachineState.SERVING), fleet(b=MachineState.SERVING)))
    assert gone == [("machine-serving", "b", ""), ("machine-gone", "a", "")]
    back = list(fleet_changes(fleet(a=MachineState.RETURNING), fleet(a=MachineState.SERVING)))
    assert back == [("machine-serving", "a", "")], "it is wanted again"


def test_a_problem_of_the_fleet_and_its_end() -> None:
    assert list(fleet_changes(fleet(), fleet("no quota"))) == [("fleet-problem", "", "no quota")]
    assert list(fleet_changes(fleet("no quota"), fleet())) == [("fleet-well", "", "")]
    assert list(fleet_changes(fleet("no quota"), fleet("no quota"))) == []
    assert {EventKind(kind) for kind in ("fleet-problem", "fleet-well", *SHOWN.values())} <= SENTENCES.keys()
    event = ClusterEvent(EventKind.MACHINE_RETURNING, 0.0, "roq-1", detail=": idle")
    assert str(event) == "machine roq-1 is given back: idle"
