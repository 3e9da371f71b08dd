"""All children of this host: takes assignments in, feeds the state machines, performs their instructions, remembers.

Decides nothing itself: what to do comes from `hcm.assignment` (the host) and `hcm.supervisor` (one child). Not covered:
ZooKeeper and the HCM's own interface (`hcm.process`), forks and deaths (`hcm.children`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hcm import machine, supervisor
from hcm.assignment import Keep, Reconfigure, Replace, StartProcess, Stop, admit, plan
from hcm.children import Children
from hcm.local_state import ChildRecord, LocalState, StateDirectory
from hcm.supervisor import Child, Phase
from roq.config import HcmConfig
from roq.errors import PortTaken, RoqError
from roq.runtime.files import DISK
from roq.runtime.liveness import HeartbeatBoard, start_time
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.runtime.security import process_security, take_kept
from roq.runtime.shutdown import ask
from roq.wire import process as process_wire
from roq.wire.assignment import Assignment, MonitorAddress, ProcessKind, ProcessSpec, ProcessState, RunningProcess
from roq.wire.process import ChildSpec

log = logger(__name__)

PING_SECONDS = 5.0  # a process that is not written down answers within this, on a busy machine too, or it hangs
ACCESS_SECONDS = 10.0  # a process that is starting serves by then
ASK_SECONDS = 2.0
STOP_SECONDS = 15.0  # for all children, SIGKILL included; what survives that hangs in the kernel
TICK_GAP_SECONDS = 2.0  # if we ourselves stood still for longer (a paused machine), nobody is called late at once
PRUNE_SECONDS = 60.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
NOWHERE = MonitorAddress("", "", 0, 0)  # of what belongs to no queue
STATES = {
    Phase.WAITING: ProcessState.STARTING,
    Phase.STARTING: ProcessState.STARTING,
    Phase.RUNNING: ProcessState.RUNNING,
    Phase.KILLING: ProcessState.STARTING,
    Phase.STOPPING: ProcessState.STOPPING,
    Phase.FAILED: ProcessState.FAILED,
    Phase.GONE: ProcessState.STOPPING,
}


@dataclass(slots=True)
class _Managed:
    """One child: its machine and what is remembered of it."""

    child: Child
    record: ChildRecord
    configuring: bool = False  # it is being told its newest specification


class HostProcesses:
    """`changed` is called whenever `processes()` would tell something new. `zookeeper`: full address, for the children."""

    def __init__(
        self,
        config: HcmConfig,
        zookeeper: str,
        directory: StateDirectory,
        counters: Counters,
        tasks: Tasks,
        changed: Callable[[], None],
    ) -> None:
        self._config, self._zookeeper, self._directory = config, zookeeper, directory
        self._counters, self._tasks, self._changed = counters, tasks, changed
        self.state: LocalState = directory.load(config.host)
        self.board = HeartbeatBoard(directory.board)
        self._access_unkept = b""  # could not be written yet
        if (security := process_security()) is not None:
            take_kept(security, directory.access)
        self._children = Children(directory.path, config.process_module, counters, self._event)
        self._managed: dict[str, _Managed] = {}
        self._dirty = asyncio.Event()
        self._empty = asyncio.Event()
        self._gone = asyncio.Event()  # one more is
        self._stopping = False
        self._search: asyncio.Task[None] | None = None
        self._fork_server: asyncio.Task[None] | None = None
        self._last_tick = time.monotonic()
        self._last_prune = 0.0

    # --- begin and end --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what an earlier HCM left running, and begin to get ready to fork. What an HCM wrote down is adopted on return,
        within milliseconds, however many and however busy they are; see `adopted` and `able_to_fork`."""
        unknown: list[_Managed] = []
        for name, record in self.state.children.items():
            record.served = True  # its ports may have been told to others just before the earlier HCM ended
            managed = self._managed[name] = _Managed(Child(name), record)
            if record.pid and self._adopt(managed, record.pid, record.started):
                continue
            record.pid = 0
            unknown.append(managed)
        log.info(
            "adopted processes of an earlier HCM",
            extra={"fields": {"adopted": len(self._managed) - len(unknown), "of": len(self._managed)}},
        )
        self._search = self._tasks.start(self._find(unknown), "adopt what is not written down")
        self._fork_server = self._tasks.start(self._children.start(), "start the fork server")
        self._tasks.start(self._save_when_dirty(), "save state")
        self._dirty.set()

    async def adopted(self) -> None:
        """Returns when all that an earlier HCM left is adopted, PING_SECONDS after `start` at most. Until then nothing may be
        reported or started, and no assignment be obeyed."""
        assert self._search is not None
        await asyncio.shield(self._search)

    async def able_to_fork(self) -> None:
        """Returns when processes can be started. Raises ProcessFailed."""
        assert self._fork_server is not None
        await asyncio.shield(self._fork_server)

    async def _find(self, unknown: list[_Managed]) -> None:
        await asyncio.gather(*(self._find_one(managed) for managed in unknown))
        self._changed()

    async def _find_one(self, managed: _Managed) -> None:
        """One that was forked but not written down yet answers at its control port, with its name. What is dead stays so
        until it is wanted."""
        name, control = managed.child.name, managed.record.ports.get("control")
        if control is None or machine.is_free(self._config.address, control):
            return
        try:
            pong = await ask(self._config.address, control, process_wire.Ping(), PING_SECONDS)
        except RoqError as error:
            by = str(error)
        else:
            by = pong.name if isinstance(pong, process_wire.Pong) else ""
            if isinstance(pong, process_wire.Pong) and by == name:
                started = start_time(pong.pid)
                if started is not None and self._adopt(managed, pong.pid, started):
                    log.info(
                        "adopted a process that was not written down", extra={"fields": {"process": name, "child": pong.pid}}
                    )
                return
        log.warning("port is taken by another process", extra={"fields": {"process": name, "port": control, "by": by}})

    def _adopt(self, managed: _Managed, pid: int, started: int) -> bool:
        """Watch a living process, which pid and start time name; False if it lives no more. How it is, its heartbeat tells."""
        record, name = managed.record, managed.child.name
        if not self._children.adopt(name, pid, started, self._directory.log_of(name)):
            return False
        record.pid, record.started = pid, started
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / CLOCK_TICKS
        self._counters["adopted"] += 1
        self._event(name, supervisor.Adopted(pid, time.monotonic() - age))
        self._event(name, supervisor.Beat(self.board.last(record.slot) / 1e9))
        return True

    def start_remembered(self) -> None:
        """Start what the last assignment wanted: ZooKeeper can't be asked, and this host's part shall be up."""
        for name in list(self._managed):
            self._event(name, supervisor.ProcessWanted())

    async def stop_children(self) -> None:
        """Stop every child and wait for all exits; their ports stay remembered."""
        self._stopping = True
        for name in list(self._managed):
            self._event(name, supervisor.Unwanted())
        try:
            async with asyncio.timeout(STOP_SECONDS if self._managed else None):
                while self._managed:
                    self._empty.clear()  # it was empty before, perhaps
                    await self._empty.wait()
        except TimeoutError:
            log.error("processes could not be stopped and are left running", extra={"fields": {"names": sorted(self._managed)}})
        await self._directory.save_at_last(self.state)

    async def close(self) -> None:
        """Remember everything and let go; living children live on."""
        await self._directory.save_at_last(self.state)
        await self._children.close()
        self.board.close()

    async def _save_when_dirty(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._directory.save(self.state)

    # --- assignments ----------------------------------------------------------------------------------------------------

    async def rid(self) -> None:
        """Returns when nothing that was told to stop is left, or after STOP_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while any(one.child.phase is Phase.STOPPING and not one.child.again for one in self._managed.values()):
                    self._gone.clear()
                    await self._gone.wait()

    async def take(self, assignment: Assignment) -> None:
        """Make the host match; one at a time. Raises StaleEpoch or CallError if the assignment is refused."""
        admit(assignment, self._config.host, self.state.epoch)
        if self._stopping:
            return
        starts: list[str] = []
        same_epoch = self.state.epoch == assignment.epoch
        self.state.take(assignment)
        for action in plan(assignment.processes, {name: managed.record.spec for name, managed in self._managed.items()}):
            match action:
                case Stop(name):
                    self._event(name, supervisor.Unwanted())
                case Keep(spec):
                    self._event(spec.name, supervisor.ProcessWanted())
                case Replace(spec):
                    self._managed[spec.name].record.spec = spec
                    self._event(spec.name, supervisor.SpecificationReplaced())
                case Reconfigure(spec):
                    record = self._managed[spec.name].record
                    record.spec, record.stale = spec, True
                    self._event(spec.name, supervisor.ProcessWanted())
                case StartProcess(spec):
                    self._add(spec)
                    starts.append(spec.name)
        if starts or not same_epoch:
            await self._directory.save(self.state)  # before the fork: a successor must find what was forked
        for name in starts:
            self._event(name, supervisor.ProcessWanted())
        self._dirty.set()
        self._changed()

    def _add(self, spec: ProcessSpec) -> None:
        record = self.state.children.get(spec.name)
        if record is None:
            record = self.state.children[spec.name] = ChildRecord(spec, {}, self.state.free_slot())
        record.spec = spec
        managed = self._managed[spec.name] = _Managed(Child(spec.name), record)
        try:
            self._ensure_ports(managed)
        except PortTaken as error:
            log.error(
                "process is not started: no ports are free", extra={"fields": {"process": spec.name, "reason": str(error)}}
            )

    def _ensure_ports(self, managed: _Managed) -> None:
        """Ports that served once are fixed. Before that, taken ones are given up for others. Raises PortTaken."""
        record, config = managed.record, self._config
        kept = record.ports if record.served or machine.all_free(config.address, record.ports.values()) else {}
        lacking = machine.lacking(record.spec.kind, kept)
        if not lacking:
            return
        used = self.state.ports_in_use() | {config.port, config.control_port}
        more, self.state.next_port = machine.choose_ports(
            record.spec.kind, config.address, config.port_base, config.port_count, self.state.next_port, used, lacking
        )
        record.ports = {**kept, **more}
        self._dirty.set()
        if record.spec.kind is ProcessKind.MONITOR:
            told = (Phase.STARTING, Phase.RUNNING)  # the Monitor's old address
            for name, other in self._managed.items():
                if other.record.spec.subject == record.spec.subject and other is not managed and other.child.phase in told:
                    self._event(name, supervisor.SpecificationReplaced())

    def _refresh(self, managed: _Managed) -> None:
        if managed.record.stale and not managed.configuring and managed.child.phase is Phase.RUNNING:
            managed.configuring = True
            self._tasks.start(self._configure(managed), f"configure {managed.child.name}")

    async def _configure(self, managed: _Managed) -> None:
        """Tell the newest specification, one at a time: an older one never comes last."""
        record = managed.record
        try:
            while record.stale and managed.child.phase is Phase.RUNNING:
                record.stale = False
                spec = self._child_spec(record).process
                await ask(self._config.address, record.ports["control"], process_wire.ConfigureProcess(spec), ASK_SECONDS)
                self._counters["reconfigured"] += 1
        except RoqError as error:
            log.warning(
                "process is restarted: it could not take its new specification", extra={"fields": {"reason": str(error)}}
            )
            self._event(managed.child.name, supervisor.SpecificationReplaced())
        finally:
            managed.configuring = False
            self._dirty.set()

    # --- events and instructions ------------------------------------------------------------------------------------------

    def _event(self, name: str, event: supervisor.Event) -> None:
        managed = self._managed.get(name)
        if managed is None:
            return
        match event:
            case supervisor.Forked(pid):
                managed.record.pid, managed.record.started = pid, start_time(pid) or 0
                self._dirty.set()
            case supervisor.Exited():
                managed.record.pid = 0
                self._dirty.set()
        for instruction in managed.child.handle(event, time.monotonic()):
            self._perform(managed, instruction)
        if managed.child.phase is Phase.RUNNING:
            if not managed.record.served:
                managed.record.served = True
                self._dirty.set()
            self._refresh(managed)

    def _perform(self, managed: _Managed, instruction: supervisor.Instruction) -> None:
        name = managed.child.name
        match instruction:
            case supervisor.Fork():
                self._fork(managed)
            case supervisor.AskShutdown():
                self._tasks.start(self._ask_shutdown(managed), f"stop {name}")
            case supervisor.Signal(pid, number):
                self._children.signal(pid, number)
            case supervisor.WakeAt(when):
                wait = max(0.0, when - time.monotonic())
                asyncio.get_running_loop().call_later(wait, self._event, name, supervisor.Due(when))
            case supervisor.Changed():
                self._changed()
            case supervisor.Forget():
                self._forget(name)

    def _fork(self, managed: _Managed) -> None:
        name, record = managed.child.name, managed.record
        try:
            self._ensure_ports(managed)
            spec = self._child_spec(record)
        except RoqError as error:
            asyncio.get_running_loop().call_soon(self._event, name, supervisor.ForkFailed(str(error)))
            return
        record.stale = False
        self.board.clear(record.slot)
        self._children.fork(spec)

    def _child_spec(self, record: ChildRecord) -> ChildSpec:
        spec, config = record.spec, self._config
        monitor = spec.monitor
        if monitor is None and spec.kind in (ProcessKind.STORE, ProcessKind.MASTER):
            monitor = NOWHERE
        elif monitor is None:
            local = self.state.children.get(f"{ProcessKind.MONITOR}/{spec.queue}")
            if local is None or not local.ports:
                raise RoqError(f"{spec.name}: no address of a Monitor is given, and none runs on this host")
            address = config.address
            at = local.ports
            monitor = MonitorAddress(config.host, address, at["clients"], at["kpis"], local.spec.term, local.spec.role)
        return ChildSpec(
            process=msgspec.structs.replace(spec, monitor=monitor),
            host=config.host,
            address=config.address,
            ports=record.ports,
            monitor=monitor,
            board=str(self._directory.board.absolute()),
            slot=record.slot,
            ready_socket=self._children.ready_path,
            zookeeper=self._zookeeper,
            log_path=str(self._directory.log_of(spec.name).absolute()),
            log_level=config.log_level,
            data_dir=str(self._directory.store.absolute()),
            card=str(config.card.absolute()) if config.card is not None else "",
            access=str(self._directory.access.absolute()),
            mixed=config.security == "mixed",
            restarted=record.served,
        )

    def take_access(self, signed: bytes) -> None:
        """The cluster's access list: for all that run here, and for those who will."""
        security = process_security()
        if security is None or not security.take(signed):
            return
        self._counters["access_lists"] += 1
        self._access_unkept = signed
        self._keep_access()
        self._tell_all_access(signed)

    def _keep_access(self) -> None:
        """For those who start from now on; again with each tick if it does not work, and then for who has started meanwhile."""
        try:
            DISK.write_file(self._directory.access, self._access_unkept, mode=0o600)
        except OSError as error:
            log.error("the access list can't be kept yet", extra={"fields": {"reason": str(error)}})
        else:
            self._access_unkept = b""

    def _tell_all_access(self, signed: bytes) -> None:
        for managed in self._managed.values():
            if managed.child.phase in (Phase.STARTING, Phase.RUNNING):
                self._tasks.start(self._tell_access(managed, signed), f"access list of {managed.child.name}")

    def renew_cards(self) -> None:
        """What an earlier HCM started goes on with the card of that time, and with the servers' key in it: it is restarted if
        ours is another. Once everything is adopted."""
        security = process_security()
        card = f"{security.card.id}{'+' * security.mixed}" if security is not None else ""
        if card == self.state.card:
            return
        self.state.card = card
        self._dirty.set()
        for name, managed in self._managed.items():
            if managed.child.phase in (Phase.STARTING, Phase.RUNNING):  # adopted ones are RUNNING from their next beat on
                self._event(name, supervisor.SpecificationReplaced())

    async def _tell_access(self, managed: _Managed, signed: bytes) -> None:
        """One that is only starting may have read the list before: it answers once it serves."""
        control = managed.record.ports.get("control")
        if control is None:
            return
        try:
            await ask(self._config.address, control, process_wire.TakeAccess(signed), ACCESS_SECONDS)
        except RoqError as error:
            fields = {"process": managed.child.name, "reason": str(error)}
            log.warning("process did not take the access list: it is restarted with it", extra={"fields": fields})
            self._event(managed.child.name, supervisor.SpecificationReplaced())

    async def _ask_shutdown(self, managed: _Managed) -> None:
        request = process_wire.Shutdown("not wanted on this host any more")
        try:
            await ask(self._config.address, managed.record.ports["control"], request, ASK_SECONDS)
        except RoqError as error:  # it is stopped by signal then
            log.info(
                "process did not take its shutdown request: stopping it by signal",
                extra={"fields": {"process": managed.child.name, "reason": str(error)}},
            )

    def _forget(self, name: str) -> None:
        del self._managed[name]
        self._gone.set()
        if self._stopping:
            self.state.children[name].pid = 0
        else:
            del self.state.children[name]
        self._dirty.set()
        if not self._managed:
            self._empty.set()

    # --- once a second, and what is told ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """One pass over all heartbeats."""
        now = time.monotonic()
        stood_still = now - self._last_tick > TICK_GAP_SECONDS
        self._last_tick = now
        self._children.tick(now)
        if unkept := self._access_unkept:
            self._keep_access()
            if not self._access_unkept:
                self._tell_all_access(unkept)
        if now - self._last_prune > PRUNE_SECONDS:
            self._last_prune = now
            self._directory.prune_logs(self._managed)
        if stood_still:
            self._counters["stood_still"] += 1
            return
        oldest = now - supervisor.LATE_SECONDS
        for name, managed in list(self._managed.items()):
            beat = self.board.last(managed.record.slot) / 1e9
            if beat < oldest or managed.child.phase is not Phase.RUNNING:  # the rest is well
                self._event(name, supervisor.Beat(beat))

    def set_draining(self, draining: bool) -> None:
        """Remember whether this host wants nothing new."""
        self.state.draining = draining
        self._dirty.set()

    def remember_sessions(self, sessions: list[int]) -> None:
        """Remember this host's newest ZooKeeper sessions."""
        self.state.sessions = sessions
        self._dirty.set()

    def exchanges(self) -> int:
        """Exchanges here, in whatever state."""
        return sum(managed.record.spec.kind is ProcessKind.EXCHANGE for managed in self._managed.values())

    def starting(self) -> bool:
        """Is any process on its way up?"""
        return any(managed.child.phase is Phase.STARTING for managed in self._managed.values())

    def processes(self) -> tuple[RunningProcess, ...]:
        """What runs here."""
        return tuple(
            RunningProcess(
                name=name,
                kind=managed.record.spec.kind,
                queue=managed.record.spec.queue,
                exchange=managed.record.spec.exchange,
                state=STATES[managed.child.phase],
                pid=managed.child.pid,
                ports=dict(managed.record.ports),
                restarts=managed.child.restarts,
                error=managed.child.error,
            )
            for name, managed in self._managed.items()
        )
