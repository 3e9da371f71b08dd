"""The Host Configuration Manager's sockets and loops: ZooKeeper, its own interface, reports. Nothing is decided here.

Children are supervised from the first moment on, with or without ZooKeeper. An HCM that is back within its session takes its
registration over at once, before it can fork and even while it still looks for a child: the host was never away, and its last
report stays until a new one can be written. Reports are written and assignments obeyed once all children are adopted.
Stopping the HCM alone leaves children *and* its registration: a successor within the session time-out takes both over
without anybody noticing. ShutdownHost (and keep_children = false) stops the children first, then unregisters; if so many
drain_seconds are given, they may move to other hosts before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from hcm.assignment import may_go_on
from hcm.host import HostProcesses
from hcm.local_state import StateDirectory
from hcm.logs import read_end
from hcm.machine import HostStats, disk_free_bytes, memory_bytes, noticeably_different
from roq.config import DRAIN_SECONDS_MAX, HcmConfig
from roq.coordination import paths
from roq.coordination.link import ANY_VERSION, Node, NodeExists, NoNode, parse_address
from roq.coordination.registration import SERVICE_NAME, Registration, ServiceInstance, parse_instance, register_store
from roq.coordination.session import Session, SessionState
from roq.errors import AccessDenied, CallError, FrameError, HostConflict, RoqError, StaleEpoch, ZooKeeperUnavailable
from roq.ids import new_token
from roq.runtime.backoff import delays
from roq.runtime.installation import installed_version
from roq.runtime.liveness import BEAT_SECONDS, HostLoad, lease_left_seconds, lease_seconds
from roq.runtime.observe import Counters, logger
from roq.runtime.rpc import RpcServer
from roq.runtime.run import READY, STOPPING, WATCHDOG, Tasks, notify, watchdog_seconds
from roq.runtime.security import process_security
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import hcm as wire
from roq.wire.assignment import Assignment, HostReport, ProcessKind, RunningProcess, from_json, to_json
from roq.wire.rights import ADMINISTRATIVE, HCM, for_names
from roq.wire.stores import StoreRegistration, store_of

log = logger(__name__)

PAYLOAD_SECONDS = 5.0  # the registration's load figures are renewed at most this often
REPORT_WAIT_SECONDS = 0.03  # a report is held back this long while a process is just starting, to save a write
SESSIONS_KEPT = 5
OTHERS_SECONDS = 1.0  # between two looks whether any other host stays

# Of (configuration, what runs here, the ZooKeeper session): metrics are served while it is entered. See hcm/metrics.py.
ServeMetrics = Callable[
    [HcmConfig, Callable[[], tuple[RunningProcess, ...]], Callable[[], Session | None]], AbstractAsyncContextManager[int]
]


async def serve(config: HcmConfig, stop: asyncio.Event, serve_metrics: ServeMetrics | None = None) -> bool:
    """Run until `stop`. True if ShutdownHost has stopped the host for good. Raises RoqError when the HCM can't go on, e.g.
    HostConflict."""
    _raise_descriptor_limit()
    manager = HostManager(config, stop)
    try:
        async with contextlib.AsyncExitStack() as beside:
            if serve_metrics is not None:
                await beside.enter_async_context(manager.metrics(serve_metrics))
            await manager.run()
    finally:
        manager.release()
    return manager.shut_down


class HostManager:
    """One HCM. run() once, then release()."""

    def __init__(self, config: HcmConfig, stop: asyncio.Event) -> None:
        self._config, self._stop = config, stop
        self._zookeeper = str(parse_address(config.zookeeper))
        self._counters = Counters()
        self._failure: BaseException | None = None
        self._tasks = Tasks(self._failed)
        self._incarnation = new_token()
        self._version = installed_version()
        self.shut_down = False  # by ShutdownHost
        self._stop_children = not config.keep_children
        self._drain_seconds = config.drain_seconds
        self._stopping = False  # what runs here is on its way to other hosts
        self._processes_changed = asyncio.Event()
        self._report_due, self._assignment_due = asyncio.Event(), asyncio.Event()
        self._store_told: tuple[int, StoreRegistration | None] = (0, None)  # in which session
        self._assigned: Node | None = None
        self._taking = asyncio.Lock()
        self._load = (0.0, 0.0)
        self._without_zookeeper = False  # it did not answer when we started
        self._name_held_by = 0  # session in which we are registered
        self._session: Session | None = None
        self._registration: Registration | None = None
        self._directory = StateDirectory(config.state_dir)
        try:
            self._host = HostProcesses(
                config, self._zookeeper, self._directory, self._counters, self._tasks, self._on_processes
            )
        except RoqError:
            self._directory.close()
            raise
        self._server: RpcServer | None = None
        self._control: ShutdownMonitor | None = None

    def metrics(self, serve_metrics: ServeMetrics) -> AbstractAsyncContextManager[int]:
        """Of this host, while it is entered."""
        return serve_metrics(self._config, self._host.processes, lambda: self._session)

    def release(self) -> None:
        """Close the endpoints and give the state directory free."""
        if self._server is not None:
            self._server.close()
        if self._control is not None:
            self._control.close()
        self._directory.close()

    async def run(self) -> None:
        """Serve until stopped, then stop in order. Raises the RoqError that ended it."""
        config = self._config
        self._server = RpcServer(
            config.address,
            config.port,
            wire.Request,
            self._handle,
            counters=self._counters,
            allow=for_names(HCM),
            audited=ADMINISTRATIVE,
        )
        name = f"hcm/{config.host}"
        self._control = ShutdownMonitor(name, config.address, config.control_port, self._stop, self._counters)
        try:
            self._host.start()
            self._tasks.start(self._tick(), "tick")
            cluster = self._tasks.start(self._join_cluster(), "cluster")
            self._tasks.start(self._tell_service_manager(), "service manager")
            await self._stop.wait()
            notify(STOPPING)
            cluster.cancel()
            await self._leave()
        finally:
            await self._tasks.stop()
            await self._host.close()
        if self._failure is not None:
            raise self._failure if isinstance(self._failure, RoqError) else RoqError(f"defect: {self._failure!r}")

    async def _tell_service_manager(self) -> None:
        await self._host.able_to_fork()
        notify(READY)

    def _failed(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _on_processes(self) -> None:
        self._report_due.set()
        self._processes_changed.set()

    # --- ZooKeeper ------------------------------------------------------------------------------------------------------

    async def _join_cluster(self) -> None:
        session = self._session = await self._connect()
        self._remember(session)
        session.on_state(self._session_changed)
        payload = self._payload()
        instance = ServiceInstance(
            SERVICE_NAME,
            self._config.host,
            self._config.address,
            self._port,
            payload=payload,
            registered=time.time_ns() // 1_000_000,
        )
        self._registration = Registration(
            session,
            paths.host(self._config.host),
            instance,
            on_registered=self._registered,
            on_conflict=self._name_lost,
            former_sessions=tuple(self._host.state.sessions),
            before_joining=self._before_joining,
        )
        await self._register(session, self._registration)
        await self._host.adopted()
        self._host.renew_cards()
        self._tasks.start(self._write_reports(session), "reports")
        self._tasks.start(self._take_assignments(), "assignments")
        self._tasks.start(self._renew_payload(self._registration, payload), "payload")
        session.watch_data(paths.assignment(self._config.host), self._assignment_seen)
        if process_security() is not None:
            session.watch_data(paths.ACCESS, self._access_seen)
        await self._host.able_to_fork()
        self._say_ready()

    async def _connect(self) -> Session:
        for attempt, delay in enumerate(delays()):
            try:
                return await Session.connect(self._zookeeper, self._config.session_seconds)
            except ZooKeeperUnavailable as error:
                log.warning("ZooKeeper does not answer: trying again", extra={"fields": {"reason": str(error)}})
                if attempt == 0:
                    self._without_zookeeper = True
                    self._renew_lease()  # before anything that takes time: what runs here goes on
                    await self._host.adopted()
                    self._host.start_remembered()
            await asyncio.sleep(delay)
        raise AssertionError("delays() never ends")

    @staticmethod
    async def _register(session: Session, registration: Registration) -> None:
        while True:
            await session.wait_connected()
            try:
                await registration.start()
                return
            except ZooKeeperUnavailable as error:
                log.warning(
                    "host is not registered: ZooKeeper does not answer, trying again", extra={"fields": {"reason": str(error)}}
                )

    def _registered(self, generation: int) -> None:
        session = self._session
        if session is not None:
            self._name_held_by = session.session_id
            self._remember(session)
            self._renew_lease()
            self._report_due.set()

    def _remember(self, session: Session) -> None:
        sessions = self._host.state.sessions
        if session.session_id not in sessions:
            self._host.remember_sessions([*sessions, session.session_id][-SESSIONS_KEPT:])

    def _name_lost(self, conflict: HostConflict) -> None:
        self._name_held_by = 0
        self._stop_children = True  # what was assigned to this name now runs on the other host
        self._failed(conflict)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._report_due.set()

    async def _before_joining(self) -> None:
        """We are not registered: our processes may have been replaced elsewhere. What is not wanted here any more is gone
        before the cluster sees us again, and by then what it places here can be started."""
        await self._host.adopted()
        session = self._session
        node = await session.get(paths.assignment(self._config.host)) if session is not None else None
        if node is not None:
            self._assigned = node
            await self._take_assignment(node)
            await self._host.rid()
        await self._host.able_to_fork()

    def _assignment_seen(self, node: Node | None) -> None:
        if node is None:  # nothing was ever assigned, or somebody wiped ZooKeeper: no reason to stop what runs
            return
        known = self._assigned
        if known is None or node.czxid != known.czxid or node.mzxid > known.mzxid:
            self._assigned = node
            self._assignment_due.set()

    def _access_seen(self, node: Node | None) -> None:
        if node is None or not node.data:
            return
        try:
            self._host.take_access(node.data)
        except AccessDenied as error:  # whoever writes to ZooKeeper is no authority for that
            log.error("access list refused", extra={"fields": {"reason": str(error)}})

    async def _take_assignments(self) -> None:
        while True:
            await self._assignment_due.wait()
            self._assignment_due.clear()
            if self._assigned is not None:
                await self._take_assignment(self._assigned)

    async def _take_assignment(self, node: Node) -> None:
        try:
            async with self._taking:
                await self._host.take(from_json(node.data, Assignment))
            self._counters["assignments"] += 1
        except (StaleEpoch, CallError, FrameError) as error:
            self._counters["assignments_refused"] += 1
            fields = {"error": type(error).__name__, "reason": str(error)}
            log.error("assignment refused", extra={"fields": fields})

    # --- reports --------------------------------------------------------------------------------------------------------

    async def _write_reports(self, session: Session) -> None:
        while True:
            await self._report_due.wait()
            await self._let_starts_finish()
            self._report_due.clear()
            try:
                await self._write_report(session)
            except ZooKeeperUnavailable:
                await session.wait_connected()
                self._report_due.set()

    async def _let_starts_finish(self) -> None:
        """A creation is told when the last of its processes serves, and not three times before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_WAIT_SECONDS):
                while self._host.starting():
                    self._report_due.clear()
                    await self._report_due.wait()

    def _report(self) -> HostReport:
        state, config = self._host.state, self._config
        here = (config.host, config.address, self._incarnation, state.epoch, state.revision, self._host.processes())
        security = process_security()
        expires = security.card.expires if security is not None else 0.0
        return HostReport(*here, lease_left_seconds(self._session_seconds()), expires, state.leaving)

    async def _write_report(self, session: Session) -> None:
        if self._name_held_by != session.session_id:
            return  # the name may be another host's by now; registering again calls for a report
        report = self._report()
        path, data = paths.running(self._config.host), to_json(report)
        try:
            await session.set(path, data, ANY_VERSION)
        except NoNode:
            await session.ensure_path(paths.host_state(self._config.host))
            with contextlib.suppress(NodeExists):
                await session.create(path, data)
        self._counters["reports"] += 1
        if self._store_told != (told := (session.session_id, store_of(report))):
            await register_store(session, self._config.host, told[1])
            self._store_told = told

    # --- load -----------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Once a second: heartbeats, load, watchdog."""
        stats = HostStats()
        watched = watchdog_seconds() is not None
        while True:
            self._renew_lease()
            self._host.tick()
            self._load = stats.sample()
            self._host.board.set_host_load(HostLoad(*self._load, self._host.exchanges(), self._config.exchanges_max))
            if watched:
                notify(WATCHDOG)
            await asyncio.sleep(BEAT_SECONDS)

    def _renew_lease(self) -> None:
        session, board, now = self._session, self._host.board, time.monotonic()
        if may_go_on(
            session.state if session is not None else None,
            registered=session is not None and self._name_held_by == session.session_id,
            lease_over=board.lease_is_over(now),
            unanswered=self._without_zookeeper,
        ):
            board.renew_lease(now + lease_seconds(self._session_seconds()))

    def _session_seconds(self) -> float:
        """As negotiated, which may be less than what is configured: a host is found lost that much earlier."""
        return self._session.session_seconds if self._session is not None else self._config.session_seconds

    def _payload(self) -> wire.HostPayload:
        cpu, memory = self._load
        here = self._incarnation, self._config.exchanges_max, self._host.state.draining
        return wire.HostPayload(*here, round(cpu, 3), round(memory, 3), self._stopping)

    async def _renew_payload(self, registration: Registration, told: wire.HostPayload) -> None:
        while True:
            await asyncio.sleep(PAYLOAD_SECONDS)
            payload = self._payload()
            before = (told.cpu_fraction, told.memory_fraction)
            if noticeably_different(before, (payload.cpu_fraction, payload.memory_fraction)):
                told = payload
                with contextlib.suppress(ZooKeeperUnavailable):  # written after the reconnection
                    await registration.update(payload)

    # --- the HCM's own interface ------------------------------------------------------------------------------------------

    @property
    def _port(self) -> int:
        return self._server.port if self._server is not None else 0

    def _say_ready(self) -> None:
        control = self._control.port if self._control is not None else 0
        line = {"ready": True, "host": self._config.host, "port": self._port, "control": control, "pid": os.getpid()}
        with contextlib.suppress(BrokenPipeError):  # whoever wanted to know is gone; the host is still needed
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    async def _handle(self, peer: bytes, request: wire.Request) -> msgspec.Struct:
        match request:
            case wire.GetProcesses():
                await self._host.adopted()
                return wire.Processes(self._report(), self._host.state.draining)
            case wire.GetCapacity():
                room = self._host.exchanges(), self._config.exchanges_max
                free = disk_free_bytes(self._directory.path)
                return wire.Capacity(*room, *self._load, memory_bytes(), time.time(), self._version, free)
            case wire.GetLog(name, bytes_max):
                return await asyncio.to_thread(read_end, self._log_of(name), bytes_max)
            case wire.SetDraining(draining):
                self._host.set_draining(draining)
                if self._registration is not None:
                    with contextlib.suppress(ZooKeeperUnavailable):
                        await self._registration.update(self._payload())
                return wire.OrderTaken()
            case wire.ShutdownHost(reason, drain_seconds):
                log.info("host shutdown requested", extra={"fields": {"reason": reason, "drain_seconds": drain_seconds}})
                self._stop_children = self.shut_down = True
                self._drain_seconds = min(max(0.0, drain_seconds), DRAIN_SECONDS_MAX)
                asyncio.get_running_loop().call_soon(self._stop.set)
                return wire.OrderTaken()

    def _log_of(self, name: str) -> Path:
        """Of a process, "" for ourselves. Raises CallError."""
        if name:
            return self._directory.log_of(name)
        if self._config.log_path is None:
            raise CallError(f"the HCM of {self._config.host} logs to its standard error: `journalctl -u roq-hcm` there")
        return self._config.log_path

    async def _leave(self) -> None:
        if not self._stop_children:
            fields = {"processes": len(self._host.processes())}
            log.info("leaving the processes to the next HCM; `roq host stop` ends a host with them", extra={"fields": fields})
            return  # the session is left to its time-out: a successor takes the registration over
        await self._host.adopted()
        if self._drain_seconds and self._failure is None:
            await self._drain()
        await self._host.stop_children()
        session, registration = self._session, self._registration
        if session is None:
            return
        if registration is not None and registration.generation:
            with contextlib.suppress(RoqError):
                await self._write_report(session)
            await registration.stop()
        await session.close()

    async def _drain(self) -> None:
        """Say that this host stops, and wait for what it runs of queues to move to others; not if no other host stays."""
        registration, session = self._registration, self._session
        if session is None or registration is None or not registration.generation:
            return
        self._stopping = True
        try:
            async with asyncio.timeout(self._drain_seconds):
                await registration.update(self._payload())
                while self._of_queues() and await self._another_host_stays(session):
                    self._processes_changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._processes_changed.wait(), OTHERS_SECONDS)
        except (TimeoutError, RoqError) as error:
            log.warning("host was not drained before it stops", extra={"fields": {"reason": str(error) or "it took too long"}})
        if left := self._of_queues():
            log.info("processes end that no other host has taken over", extra={"fields": {"names": left}})

    def _of_queues(self) -> list[str]:
        """Names of the processes here that can move; a store stays with its disk."""
        return [process.name for process in self._host.processes() if process.kind is not ProcessKind.STORE]

    async def _another_host_stays(self, session: Session) -> bool:
        """Whether there is one that takes processes."""
        for name in await session.children(paths.HOSTS):
            node = await session.get(paths.host(name)) if name != self._config.host else None
            if node is None:
                continue
            with contextlib.suppress(FrameError):  # the GCM says so
                payload = parse_instance(node.data).payload_as(wire.HostPayload)
                if not (payload.stopping or payload.draining):
                    return True
        return False


def _raise_descriptor_limit() -> None:
    """One pidfd per child, and ZeroMQ's own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
