"""Has machines made and taken back, as fleet.py decides: writes that down, calls the provider, tells what came of it.

Made once per term. What is under way when it ends, the next leader finds in the records. Requests about the fleet are answered
here, and whoever finds no Exchange slot asks here whether one will come.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import reduce

from gcm import fleet
from gcm.cluster import ClusterState
from gcm.crash import crash_point
from gcm.fleet import FleetCall, FleetMemory, FleetReport, FleetVerb, FleetWrite
from gcm.placement import has_room
from gcm.providers.means import FleetMeans
from gcm.providers.provider import ProviderExhausted
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import NotLeader, RoqError
from roq.ids import check_name
from roq.runtime.observe import logger
from roq.wire.fleet import FleetInfo, FleetLimits, GetFleet, MachineView, SetFleet

log = logger(__name__)
TICK_SECONDS = 1.0  # between two looks, when nothing happens: everything timed is longer
ROOM_SECONDS = 10.0  # a request waits so long for a slot that a new machine brings; a ScalingProcess waits 15
FORGET_SECONDS = 60.0  # how long a request has waited; it comes again sooner
ID_BYTES = 3
FleetRequest = SetFleet | GetFleet


class FleetKeeper:
    """means: None: this GCM has no provider. inspect(host): why it is not empty, "" if it is."""

    def __init__(
        self, session: Session, term: LeaderTerm, means: FleetMeans | None, inspect: Callable[[str], Awaitable[str]]
    ) -> None:
        self._session, self._term, self._means, self._inspect = session, term, means, inspect
        self._memory = FleetMemory()
        self._work = asyncio.Event()
        self._told = ""  # what has been said of a provider that is not there
        self._waited: dict[str, float] = {}  # until when, by transaction
        self._looking = set[asyncio.Event]()  # set after each turn
        term.view.on_change.append(self._changed)

    def start(self) -> None:
        """Look now, and from now on."""
        self._term.tasks.start(self._run(), "fleet")

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def handle(self, request: FleetRequest, now: float) -> FleetInfo:
        """The fleet as it is, after what was asked for. now: seconds since 1970. Raises InvalidConfiguration, NotLeader."""
        if isinstance(request, SetFleet):
            check_name(request.transaction, "transaction")
            fresh = secrets.token_hex(ID_BYTES)
            await self._term.change(lambda cluster: fleet.set_limits(cluster, request.limits, fresh))
            log.info("fleet limits set", extra={"fields": _limits_fields(request.limits)})
        return self._info(self._term.view.cluster)

    def _info(self, cluster: ClusterState) -> FleetInfo:
        def view(name: str) -> MachineView:
            machine, host = cluster.machines[name], cluster.host(name)
            return MachineView(name, machine.state, machine.created, host.alive, len(host.assigned), machine.reason)

        record = cluster.fleet
        return FleetInfo(
            self._means.provider if self._means is not None else "",
            fleet.prefix(record) if record is not None else "",
            record.limits if record is not None else None,
            tuple(view(name) for name in sorted(cluster.machines, key=fleet.number_of)),
            fleet.unmet(cluster, self._memory, time.monotonic()),
            self._told or "; ".join(self._memory.reported.values()),
        )

    async def room(self, queue: str, transaction: str) -> bool:
        """Somebody found no slot for this queue: whether there is one now. Waits for a machine that may come soon, and no
        longer if the same request comes again."""
        cluster, now = self._term.view.cluster, time.monotonic()
        if self._means is None or cluster.fleet is None or not cluster.fleet.limits.most:
            return False
        self._waited = {id: until for id, until in self._waited.items() if until > now - FORGET_SECONDS}
        until = self._waited.setdefault(transaction, now + ROOM_SECONDS)
        self._memory = fleet.demanded(self._memory, queue, now)
        self._work.set()
        looked = asyncio.Event()
        self._looking.add(looked)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(until - now):
                    while not self._has_room() and not fleet.hopeless(self._memory):
                        looked.clear()
                        await looked.wait()
        finally:
            self._looking.discard(looked)
        return self._has_room()

    def _has_room(self) -> bool:
        return any(map(has_room, self._term.view.cluster.hosts.values()))

    def met(self, queue: str) -> None:
        """It got what it found no slot for."""
        self._memory = fleet.met(self._memory, queue)

    # --- the loop ---------------------------------------------------------------------------------------------------------

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        if before.fleet is not after.fleet or any(before.host(name).alive != after.host(name).alive for name in after.machines):
            self._work.set()

    async def _run(self) -> None:
        with suppress(NotLeader):  # the next leader goes on
            while True:
                self._work.clear()
                again = await self._turn()
                for looked in self._looking:
                    looked.set()
                if not again:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(TICK_SECONDS if self._term.view.cluster.fleet is not None else None):
                            await self._work.wait()

    async def _turn(self) -> bool:
        """Whether there may be more to do at once."""
        cluster, means = self._term.view.cluster, self._means
        if cluster.fleet is None:
            return False
        if means is None:
            self._tell_of_no_provider(cluster)
            return False
        steps, self._memory = fleet.decide(cluster, self._memory, time.monotonic(), means.slots)
        writes = [step for step in steps if isinstance(step, FleetWrite)]
        for step in steps:
            match step:
                case FleetReport(what):
                    log.warning("fleet: %s", what, extra={"fields": {"provider": means.provider}})
                case FleetCall():
                    self._term.tasks.start(self._perform(means, step, cluster.fleet.id), f"{step.verb} {step.name}")
        if writes:
            await self._write(writes)
        return bool(writes)

    def _tell_of_no_provider(self, cluster: ClusterState) -> None:
        assert cluster.fleet is not None
        wanted = cluster.fleet.limits.most or cluster.machines
        told = "the leading GCM has no provider: start it with --fleet FILE, as the others" if wanted else ""
        if told and told != self._told:
            log.warning("fleet: %s", told)
        self._told = told

    async def _write(self, writes: list[FleetWrite]) -> None:
        before = self._term.view.cluster
        now = time.time()

        def decide(cluster: ClusterState) -> ClusterState:
            return reduce(lambda known, write: fleet.after(known, write, now), writes, cluster)

        after = await self._term.change(decide)
        reasons = {write.name: write.reason for write in writes}
        for name in before.machines.keys() | after.machines.keys():
            old, new = before.machines.get(name), after.machines.get(name)
            if new is not None and (old is None or old.state is not new.state):
                reason = new.reason or reasons.get(name if old is not None else "", "")
                fields = {"host": name, "state": str(new.state), "reason": reason}
                log.info("fleet machine is %s", new.state, extra={"fields": fields})
                crash_point(f"fleet.{new.state}")
            elif new is None:
                self._term.tasks.start(self._clear(name), f"forget {name}")

    async def _clear(self, name: str) -> None:
        """What its host left in ZooKeeper. If that fails it stays, and harms nobody."""
        folder = paths.host_state(name)
        try:
            for child in await self._session.children(folder):
                await self._session.delete(f"{folder}/{child}")
            await self._session.delete(folder)
        except RoqError as error:
            log.info("the state of a host that is gone stays", extra={"fields": {"host": name, "reason": str(error)}})

    # --- calls ------------------------------------------------------------------------------------------------------------

    async def _perform(self, means: FleetMeans, call: FleetCall, id: str) -> None:
        problem, exhausted = "", False
        try:
            match call.verb:
                case FleetVerb.LIST:
                    await self._list(means, id)
                    return
                case FleetVerb.CREATE:
                    await means.calls.create(await asyncio.to_thread(means.spec, call.name, id))
                    crash_point("fleet.created")
                case FleetVerb.DESTROY:
                    await means.calls.destroy(call.name, id)
                    crash_point("fleet.destroyed")
                case FleetVerb.INSPECT:
                    problem = await self._inspect(call.name)
        except RoqError as error:
            problem, exhausted = str(error), isinstance(error, ProviderExhausted)
            level = log.info if call.verb is FleetVerb.INSPECT else log.warning
            level("fleet call failed", extra={"fields": {"call": str(call.verb), "host": call.name, "reason": problem}})
        except Exception as error:  # it must not end the term: the next leader would make the same call
            problem = f"{type(error).__name__}: {error}"
            log.exception("fleet call failed", extra={"fields": {"call": str(call.verb), "host": call.name}})
        self._memory = fleet.answered(self._memory, call, problem, time.monotonic(), exhausted=exhausted)
        self._work.set()

    async def _list(self, means: FleetMeans, id: str) -> None:
        names, problem = None, ""
        try:
            names = await means.calls.names(id)
        except RoqError as error:
            problem = str(error)
        self._memory = fleet.listed(self._memory, names, time.monotonic(), problem)  # of now: others were answered meanwhile
        self._work.set()


def _limits_fields(limits: FleetLimits) -> dict[str, float]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}
