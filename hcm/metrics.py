"""Metrics of one host for Prometheus: `roq-hcm --metrics` (extra `metrics`).

    roq_process*        its processes by kind and queue: states, restarts, memory, processor time
    roq_exchange_*_total, roq_tape_*    what its Exchanges forwarded and recorded, by queue
    roq_store_*         its store: bytes, entries, how long syncs took
    roq_zookeeper_session, roq_gcm_leads    what the HCM sees of the rest

Nothing is read but when somebody asks, and once for all who ask within a second: what processes use from the kernel, the totals
of Exchanges and of the store by one request each, at the endpoints they have anyway. Who does not answer in time is counted as
silent, and is taken in by the next look. No label names a process, publisher or subscriber: series depend on queues alone.

Counters begin at 0 with the HCM. Totals of a queue grow over the lives of its processes (GrowingTotals).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from hcm.machine import ProcessUsage, process_usage
from roq.config import HcmConfig, listen_place
from roq.coordination import paths
from roq.coordination.session import Session, SessionState
from roq.errors import RoqError
from roq.runtime.installation import brought_by, installed_version
from roq.runtime.rpc import RpcPool, answered_within
from roq.runtime.scraping import Answer, ReadOnce, json_answer, metrics_answer, serving
from roq.wire import process as process_wire
from roq.wire import store as store_wire
from roq.wire.assignment import ProcessKind, ProcessState, RunningProcess

with brought_by("metrics", "roq-hcm --metrics"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

ASK_SECONDS = 2.0  # for the answer of one process, or of ZooKeeper
LOOK_SECONDS = 5.0  # for those of all: Prometheus waits for 10 s
ASKED_AT_ONCE = 32
KEPT_SECONDS = 1.0  # what was read is given to all who ask within this time
OWN_KIND = "hcm"
CONNECTING = "connecting"  # the HCM has had no session yet
SESSION_STATES = (CONNECTING, *map(str, SessionState))
Group = tuple[str, str]  # kind, queue
ToldTotals = process_wire.Pong | store_wire.StoreView
Rows = Iterable[tuple[tuple[str, ...], float]]  # labels behind the host, and value


class GrowingTotals:
    """Totals by group over processes that end and begin anew: what a process has counted in this life is added to what those
    before it had. Pure; take() and keep() once in every look."""

    def __init__(self) -> None:
        self.totals: dict[Group, dict[str, float]] = {}
        self._seen: dict[str, tuple[Group, Hashable, Mapping[str, float]]] = {}

    def take(self, process: str, group: Group, life: Hashable, values: Mapping[str, float], *, from_birth: bool) -> None:
        """What it has counted by now. from_birth: all of it counts when it is seen for the first time; else it had counted
        before anybody here looked, and counts from now on."""
        known = self._seen.get(process)
        before: Mapping[str, float] = {}
        if known is None and not from_birth:
            before = values
        elif known is not None and known[1] == life:
            before = known[2]
        total = self.totals.setdefault(group, {})
        for name, value in values.items():
            last = before.get(name, 0)
            total[name] = total.get(name, 0) + (value - last if value >= last else value)
        self._seen[process] = group, life, values

    def keep(self, present: Mapping[str, Group]) -> None:
        """These are here, whether they told anything or not; what is gone is forgotten, and groups without anybody left."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}
        groups = set(present.values())
        self.totals = {group: total for group, total in self.totals.items() if group in groups}


class ProcessAnswer(NamedTuple):
    """One process at one moment. usage: None if it has just ended. told: by an Exchange, None: it did not tell."""

    process: RunningProcess
    usage: ProcessUsage | None = None
    told: process_wire.Pong | None = None


@dataclass(frozen=True, slots=True)
class HostLook:
    """What was read at one moment. own: of the HCM itself. silent: how many did not answer. leads: whether a GCM does, None if
    ZooKeeper does not tell. session: one of SESSION_STATES. store: None if there is none, or it is silent."""

    answers: tuple[ProcessAnswer, ...]
    own: ProcessUsage
    silent: int
    store: store_wire.StoreView | None
    session: str
    leads: bool | None


class _Total(NamedTuple):
    """One counter or gauge: name without `_total`, what it says, and of which counter of the process."""

    name: str
    text: str
    counter: str


FORWARDED = (
    _Total("roq_exchange_received_frames", "Frames (batches of messages) that came from publishers.", "frames_in"),
    _Total("roq_exchange_received_bytes", "Bytes that came from publishers.", "bytes_in"),
    _Total("roq_exchange_sent_frames", "Frames to subscribers, each counts.", "frames_out"),
    _Total("roq_exchange_sent_bytes", "Bytes to subscribers, each counts.", "bytes_out"),
    _Total("roq_exchange_dropped_frames", "Frames dropped because a subscriber was full.", "frames_dropped"),
)
RECORDED = (
    _Total("roq_tape_entries", "Entries of tapes that are stored.", "tape_entries"),
    _Total("roq_tape_bytes", "Bytes of tapes that are stored.", "tape_bytes"),
    _Total("roq_tape_full", "How often publishers had to wait for stores.", "tape_full"),
)
COUNTED = tuple(total.counter for total in (*FORWARDED, *RECORDED))
WAITING = "tape_waiting_bytes"
STORE_TOTALS = (
    _Total("roq_store_written_bytes", "Bytes written to the journal, and synced.", "written_bytes"),
    _Total("roq_store_entries", "Entries of logs that were stored.", "entries_stored"),
)


class HostMetrics:
    """The families of one host. Pure: looks in, samples out."""

    def __init__(self, host: str, began: float) -> None:
        """began: when the HCM did, seconds since 1970; what began before was adopted."""
        self._host, self._began = host, began
        self._restarts, self._cpu, self._forwarded = GrowingTotals(), GrowingTotals(), GrowingTotals()

    def families(self, look: HostLook) -> Iterator[Metric]:
        """All of it. Once for each look."""
        self._take(look)
        yield from self._of_host(look)
        yield from self._of_processes(look)
        yield from self._of_exchanges(look)
        if look.store is not None:
            yield from self._of_store(look.store)

    def _take(self, look: HostLook) -> None:
        present = {process.name: _group(process) for process, *_ in look.answers}
        for process, usage, told in look.answers:
            group, from_birth = _group(process), usage is not None and usage.started >= self._began
            self._restarts.take(process.name, group, OWN_KIND, {"restarts": process.restarts}, from_birth=True)
            if usage is not None:
                self._cpu.take(process.name, group, process.pid, {"seconds": usage.cpu_seconds}, from_birth=from_birth)
            if told is not None:
                counted = {name: told.counters.get(name, 0) for name in COUNTED}
                self._forwarded.take(process.name, group, told.pid, counted, from_birth=from_birth)
        for totals in (self._restarts, self._cpu, self._forwarded):
            totals.keep(present)

    def _gauge(self, name: str, text: str, rows: Rows, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=("host", *labels)), rows)

    def _counter(self, name: str, text: str, rows: Rows, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=("host", *labels)), rows)

    def _filled(self, made: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
        for labels, value in sorted(rows):
            made.add_metric((self._host, *labels), float(value))
        return made

    def _of_host(self, look: HostLook) -> Iterator[Metric]:
        yield self._gauge("roq_hcm_info", "Which RoQ the HCM runs.", [((installed_version(),), 1)], "version")
        sessions = [((state,), state == look.session) for state in SESSION_STATES]
        yield self._gauge("roq_zookeeper_session", "State of the HCM's ZooKeeper session.", sessions, "state")
        if look.leads is not None:
            yield self._gauge("roq_gcm_leads", "Whether a GCM leads, as this host sees it.", [((), look.leads)])
        yield self._gauge("roq_processes_silent", "Processes that run and did not report their totals.", [((), look.silent)])

    def _of_processes(self, look: HostLook) -> Iterator[Metric]:
        kinds = {str(process.kind) for process, *_ in look.answers}
        states: Counter[tuple[str, ...]] = Counter({(kind, str(state)): 0 for kind in kinds for state in ProcessState})
        memory: Counter[tuple[str, ...]] = Counter({(OWN_KIND, ""): look.own.resident_bytes})
        for process, usage, _ in look.answers:
            states[str(process.kind), str(process.state)] += 1
            if usage is not None:
                memory[_group(process)] += usage.resident_bytes
        cpu = {group: total["seconds"] for group, total in self._cpu.totals.items()} | {(OWN_KIND, ""): look.own.cpu_seconds}
        restarts = {group: total["restarts"] for group, total in self._restarts.totals.items()}
        of_queue = ("kind", "queue")
        yield self._gauge("roq_processes", "Processes of the host.", states.items(), "kind", "state")
        yield self._counter("roq_process_restarts", "Processes that died and were started again.", restarts.items(), *of_queue)
        yield self._counter("roq_process_cpu_seconds", "Processor time, of user and system.", cpu.items(), *of_queue)
        yield self._gauge("roq_process_resident_memory_bytes", "Resident memory, of all together.", memory.items(), *of_queue)

    def _of_exchanges(self, look: HostLook) -> Iterator[Metric]:
        totals = {(queue,): total for (_, queue), total in self._forwarded.totals.items()}
        waiting: Counter[tuple[str, ...]] = Counter()
        for process, _, told in look.answers:
            if told is not None and WAITING in told.counters:
                waiting[(process.queue,)] += told.counters[WAITING]
        recorded = {group: total for group, total in totals.items() if group in waiting or total["tape_entries"]}
        for some, kinds in ((totals, FORWARDED), (recorded, RECORDED)):
            for name, text, counter in kinds:
                yield self._counter(name, text, [(group, total[counter]) for group, total in some.items()], "queue")
        yield self._gauge("roq_tape_waiting_bytes", "Bytes of tapes that are not known to be stored.", waiting.items(), "queue")

    def _of_store(self, store: store_wire.StoreView) -> Iterator[Metric]:
        for name, text, counter in STORE_TOTALS:
            yield self._counter(name, text, [((), store.counters.get(counter, 0))])
        for name, text, value in (
            ("roq_store_free_bytes", "Room on the store's file system.", store.bytes_free),
            ("roq_store_journal_bytes", "Bytes of the journal's files.", store.journal_bytes),
            ("roq_store_live_bytes", "Bytes of the journal that are still needed.", store.live_bytes),
            ("roq_store_blob_bytes", "Bytes of big payloads.", store.blob_bytes),
            ("roq_store_blobs", "Big payloads.", store.blobs),
            ("roq_store_segments", "Segments of logs.", store.segments),
            ("roq_store_damages", "Damages of the journal that are known.", store.counters.get("damages", 0)),
        ):
            yield self._gauge(name, text, [((), value)])
        if (syncs := store.syncs) is not None:
            made = HistogramMetricFamily("roq_store_sync_seconds", "Time to write and sync to the journal.", labels=("host",))
            ends = (*(repr(bound) for bound in syncs.bounds), "+Inf")
            made.add_metric((self._host,), list(zip(ends, accumulate(syncs.counts), strict=True)), syncs.seconds)
            yield made


def _group(process: RunningProcess) -> Group:
    return str(process.kind), process.queue


# --- reading ----------------------------------------------------------------------------------------------------------


class HostReader:
    """Looks at the processes that `processes()` lists at this moment. session(): the HCM's, None while there is none."""

    def __init__(
        self, address: str, processes: Callable[[], tuple[RunningProcess, ...]], session: Callable[[], Session | None]
    ) -> None:
        self._address, self._processes, self._session = address, processes, session
        self._controls = RpcPool(process_wire.Reply, ASK_SECONDS)
        self._stores = RpcPool(store_wire.Reply, ASK_SECONDS)
        self._gate = asyncio.Semaphore(ASKED_AT_ONCE)

    async def look(self) -> HostLook:
        """Within LOOK_SECONDS, however many hang."""
        processes = self._processes()
        running = {process.name: process for process in processes if process.state is ProcessState.RUNNING}
        asked = {
            name: asyncio.create_task(self._ask(process))
            for name, process in running.items()
            if process.kind in (ProcessKind.EXCHANGE, ProcessKind.STORE)
        }
        using = asyncio.to_thread(lambda: [process_usage(pid) for pid in (os.getpid(), *(one.pid for one in processes))])
        (own, *usages), leads, _ = await asyncio.gather(using, self._leads(), answered_within(LOOK_SECONDS, asked.values()))
        found = {name: one.result() for name, one in asked.items() if not one.cancelled()}
        told = {name: one for name, one in found.items() if isinstance(one, process_wire.Pong) and one.name == name}
        stores = [one for one in found.values() if isinstance(one, store_wire.StoreView)]
        assert own is not None  # we live
        session = self._session()
        return HostLook(
            answers=tuple(
                ProcessAnswer(process, usage if process.pid else None, told.get(process.name))
                for process, usage in zip(processes, usages, strict=True)
            ),
            own=own,
            silent=len(asked) - len(told) - len(stores),
            store=stores[0] if stores else None,
            session=CONNECTING if session is None else str(session.state),
            leads=leads,
        )

    async def _ask(self, process: RunningProcess) -> ToldTotals | None:
        async with self._gate:
            try:
                if process.kind is ProcessKind.STORE:
                    place = f"tcp://{self._address}:{process.ports['clients']}"
                    return await self._stores.request(place, store_wire.DescribeStore(), store_wire.StoreView)
                place = f"tcp://{self._address}:{process.ports['control']}"
                return await self._controls.request(place, process_wire.Ping(), process_wire.Pong)
            except RoqError:
                return None

    async def _leads(self) -> bool | None:
        session = self._session()
        if session is None or session.state is not SessionState.CONNECTED:
            return None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await session.get(paths.LEADER) is not None
        except (RoqError, TimeoutError):
            return None

    def close(self) -> None:
        """Let go of the connections."""
        self._controls.close()
        self._stores.close()


@contextlib.asynccontextmanager
async def serving_host(
    config: HcmConfig, processes: Callable[[], tuple[RunningProcess, ...]], session: Callable[[], Session | None]
) -> AsyncIterator[int]:
    """Metrics at `config.metrics` until left; the port. Raises PortTaken."""
    assert config.metrics is not None
    began = process_usage(os.getpid())
    assert began is not None
    reader, metrics = HostReader(config.address, processes, session), HostMetrics(config.host, began.started)
    once: ReadOnce[list[Metric]] = ReadOnce(lambda: _families(reader, metrics), KEPT_SECONDS)

    async def answer(path: str, accept: str) -> Answer:
        match path.strip("/").split("/"):
            case ["metrics"]:
                return await asyncio.to_thread(metrics_answer, await once.get(), accept)
            case ["health"]:
                return json_answer({"status": "ok"})
            case _:
                return json_answer(None)

    try:
        async with serving(answer, *listen_place(config.metrics, "metrics")) as port:
            yield port
    finally:
        reader.close()


async def _families(reader: HostReader, metrics: HostMetrics) -> list[Metric]:
    return list(metrics.families(await reader.look()))
