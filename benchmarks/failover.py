"""How long until it serves again: processes, the leading GCM, a whole host, an HCM and ZooKeeper killed under a light load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from statistics import median

import msgspec

from benchmarks.failover_rig import ANSWER_SECONDS, LOOK_SECONDS, QUEUE, SESSION_SECONDS, Rig, rig, until
from roq.coordination.locate import read_leader
from roq.errors import RoqError
from roq.runtime.rpc import RpcClient
from roq.wire import monitor as wire
from roq.wire.assignment import ProcessState

AGE_SECONDS = 2.3  # a process that dies younger than 2 s is waited for before it is started again; here none does
TRY_SECONDS = 0.03  # one question to a Monitor that may be away
RESTART_SECONDS = 0.2  # RestartSec of the units
NORMAL_SECONDS = 2.0  # of undisturbed flow, for the normal gap
REFUSAL_SECONDS, REFUSAL_SLACK_SECONDS = (
    3.0,
    0.5,
)  # deadline of a request while ZooKeeper is down; what the refusal may take more
REFUSED_EVERY_SECONDS = 5.0
PARTS = ("process", "gcm", "host", "hcm", "zookeeper")
Tell = Callable[[str], None]


class Times(msgspec.Struct, frozen=True):
    """One row: seconds of each run."""

    what: str
    target_seconds: float
    seconds: tuple[float, ...]
    silence_seconds: float  # longest silence of a subscriber meanwhile
    problems: tuple[str, ...]  # of the load: lost, repeated, reordered, failed


class Outage(msgspec.Struct, frozen=True):
    """ZooKeeper away. refusal_seconds: how long each refusal took."""

    seconds: float
    silence_seconds: float
    normal_silence_seconds: float
    refusals: tuple[str, ...]
    refusal_seconds: tuple[float, ...]
    accepted: int  # requests that were not refused
    back_seconds: float  # until a queue could be created again
    problems: tuple[str, ...]


class Failover(msgspec.Struct, frozen=True):
    """The findings. load_average: of the machine, before and after."""

    runs: int
    session_seconds: float
    load_average: tuple[float, float]
    times: tuple[Times, ...]
    adoption_silence_seconds: float  # longest with HCMs killed
    normal_silence_seconds: float  # longest undisturbed
    outage: Outage | None


# --- one process -------------------------------------------------------------------------------------------------------


async def _kill_process(it: Rig, kind: str) -> float:
    """Kill the queue's process of this kind on host-1; seconds until it serves again."""
    name, pid = next((one.name, one.pid) for one in (await it.processes("host-1")).values() if one.name.startswith(kind))
    endpoint = (await it.client.queue(QUEUE)).monitors[0].clients_endpoint()

    async def monitor_answers() -> bool:
        rpc = RpcClient(endpoint, wire.Reply)
        try:
            return bool(await rpc.request(wire.Describe(), wire.QueueView, TRY_SECONDS))
        finally:
            rpc.close()

    async def runs() -> bool:
        found = (await it.processes("host-1")).get(name)
        return found is not None and found.state is ProcessState.RUNNING and found.pid != pid

    mark, begun = it.published(), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    match kind:
        case "exchange":
            return await it.flowing(begun, mark)
        case "monitor":
            await asyncio.sleep(LOOK_SECONDS)  # its death
            return await until(monitor_answers, begun)
        case _:
            return await until(runs, begun)


async def process_deaths(runs: int, tell: Tell) -> list[Times]:
    """Exchange, Monitor and ScalingProcess of a queue, in turn."""
    taken: dict[str, list[float]] = {"exchange": [], "monitor": [], "scaling": []}
    silences = dict.fromkeys(taken, 0.0)
    async with rig(1, 1, 1) as it:
        for number in range(runs):
            for kind, found in taken.items():
                await it.settled()
                await asyncio.sleep(AGE_SECONDS / len(taken))
                it.silence()
                found.append(await _kill_process(it, kind))
                await it.flowing(time.monotonic(), it.published())
                silences[kind] = max(silences[kind], it.silence())
            tell(
                f"processes, run {number + 1}: "
                + ", ".join(f"{kind} {found[-1] * 1e3:.0f} ms" for kind, found in taken.items())
            )
        problems = tuple(await it.verdict())
    said = {
        "exchange": "Exchange killed → next message delivered",
        "monitor": "Monitor killed → it answers",
        "scaling": "ScalingProcess killed → it runs",
    }
    return [Times(said[kind], 0.1, tuple(found), silences[kind], problems) for kind, found in taken.items()]


# --- the leading GCM ---------------------------------------------------------------------------------------------------


async def leader_deaths(runs: int, tell: Tell) -> Times:
    """Asked for the list of queues, or to create one, in turn."""
    taken: list[float] = []
    chance = random.Random(1)
    async with rig(1, 2, 1) as it:
        it.silence()
        for number in range(runs):
            leader = (await read_leader(it.local.zookeeper)).host
            name = next(name for name, daemon in it.local.gcms.items() if daemon.option("--address") == leader)
            await asyncio.sleep(chance.uniform(0.0, SESSION_SECONDS / 3))  # any moment between two heartbeats of its session
            begun = time.monotonic()
            os.kill(it.local.gcms[name].pid, signal.SIGKILL)
            if number % 2:
                await it.client.create_queue(f"made-{number}")
            else:
                await it.client.queues()
            taken.append(time.monotonic() - begun)
            tell(f"leader, run {number + 1}: {taken[-1]:.2f} s")
            if number % 2:
                await it.client.remove_queue(f"made-{number}")
            await it.local.kill_gcm(name)  # reaps it
            await it.local.start_gcm(name)
            await it.settled()
            await asyncio.sleep(1.0)  # the new standby is in the election
        silence = it.silence()
        problems = tuple(await it.verdict())
    what = "GCM leader killed → next request answered"
    return Times(what, SESSION_SECONDS + 0.5, tuple(taken), silence, problems)


# --- a host ------------------------------------------------------------------------------------------------------------


async def _gather_on_one_host(it: Rig) -> str:
    """The host of the active Monitor gets an Exchange and all publishers; its name."""
    record = (await it.client.queue(QUEUE)).record
    if record.monitor_host not in record.exchanges.values():
        made = await it.client.create_exchange(QUEUE, host=record.monitor_host)
        await it.client.exchange_active(QUEUE, made.exchange)
    for exchange, host in record.exchanges.items():
        if host != record.monitor_host:
            await it.client.remove_exchange(QUEUE, exchange)
    return record.monitor_host


async def host_deaths(runs: int, tell: Tell) -> Times:
    """The host of the active Monitor and of the Exchange that all publishers use, one of three."""
    taken: list[float] = []
    chance = random.Random(2)
    async with rig(3, 1, 2) as it:
        it.silence()
        for number in range(runs):
            host = await _gather_on_one_host(it)
            await it.settled()
            await asyncio.sleep(chance.uniform(0.0, SESSION_SECONDS / 3))
            mark, begun = it.published(), time.monotonic()
            await it.kill_host(host)
            taken.append(await it.flowing(begun, mark))
            tell(f"host, run {number + 1}: {taken[-1]:.2f} s")
            await it.local.start_hcm(host)
            await it.settled()
        silence = it.silence()
        problems = tuple(await it.verdict())
    what = "host of Monitor and Exchange killed → all publishers and subscribers flow"
    return Times(what, SESSION_SECONDS + 1.0, tuple(taken), silence, problems)


# --- an HCM ------------------------------------------------------------------------------------------------------------


async def hcm_deaths(runs: int, tell: Tell) -> tuple[Times, float]:
    """Killed, started again after what the unit waits; times until it has adopted all, and the longest normal silence."""
    taken: list[float] = []
    normal = silence = 0.0
    async with rig(1, 1, 1) as it:
        for number in range(runs):
            it.silence()
            await asyncio.sleep(NORMAL_SECONDS)
            normal = max(normal, it.silence())
            before = {one.name: one.pid for one in (await it.processes("host-1")).values()}

            async def adopted(before: dict[str, int] = before) -> bool:
                found = (await it.processes("host-1")).values()
                return {one.name: one.pid for one in found if one.state is ProcessState.RUNNING} == before

            begun = time.monotonic()
            await it.local.kill_hcm("host-1")
            await asyncio.sleep(RESTART_SECONDS)
            starting = asyncio.create_task(it.local.start_hcm("host-1"))
            taken.append(await until(adopted, begun))
            await starting
            await it.settled()
            silence = max(silence, it.silence())
            tell(f"HCM, run {number + 1}: {taken[-1]:.2f} s")
        problems = tuple(await it.verdict())
    return Times("HCM killed → all its processes adopted", 2.0, tuple(taken), silence, problems), normal


# --- ZooKeeper ---------------------------------------------------------------------------------------------------------


async def outage(seconds: float, tell: Tell) -> Outage:
    """ZooKeeper killed, started again after so long."""
    said: list[str] = []
    refused: list[float] = []
    accepted = 0
    async with rig(2, 2, 2) as it:
        it.silence()
        await asyncio.sleep(NORMAL_SECONDS)
        normal = it.silence()
        begun = time.monotonic()
        await it.kill_zookeeper()
        while (left := seconds - (time.monotonic() - begun)) > REFUSAL_SECONDS + REFUSAL_SLACK_SECONDS:
            await asyncio.sleep(min(REFUSED_EVERY_SECONDS, left - REFUSAL_SECONDS))
            asked = time.monotonic()
            try:
                await it.client.create_queue("refused", timeout_seconds=REFUSAL_SECONDS)
                accepted += 1
            except RoqError as error:
                refused.append(time.monotonic() - asked)
                said.append(f"{type(error).__name__}: {error}")
                tell(f"ZooKeeper away for {time.monotonic() - begun:.0f} s: {said[-1]}")
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - begun)))
        away_silence = it.silence()
        await it.start_zookeeper()
        back = time.monotonic()

        async def created() -> bool:
            return bool(await it.client.create_queue("made-after"))

        back_seconds = await until(created, back)
        tell(f"ZooKeeper is back: a queue created after {back_seconds:.2f} s")
        await it.settled()
        away_silence = max(away_silence, it.silence())
        problems = tuple(await it.verdict())
    unique = tuple(dict.fromkeys(said))
    return Outage(seconds, away_silence, normal, unique, tuple(refused), accepted, back_seconds, problems)


# --- all of it ---------------------------------------------------------------------------------------------------------


async def failover(runs: int, outage_seconds: float, wanted: list[str], tell: Tell) -> Failover:
    """The wanted PARTS. Raises what the cluster's administration met with."""
    before = os.getloadavg()[0]
    times: list[Times] = []
    normal = silence = 0.0
    if "process" in wanted:
        times += await process_deaths(runs, tell)
    if "gcm" in wanted:
        times.append(await leader_deaths(runs, tell))
    if "host" in wanted:
        times.append(await host_deaths(runs, tell))
    if "hcm" in wanted:
        found, normal = await hcm_deaths(runs, tell)
        silence = found.silence_seconds
        times.append(found)
    away = await outage(outage_seconds, tell) if "zookeeper" in wanted else None
    return Failover(runs, SESSION_SECONDS, (before, os.getloadavg()[0]), tuple(times), silence, normal, away)


def failover_rows(found: Failover) -> list[tuple[str, ...]]:
    """Rows of the report: what, median, slowest, target, verdict (of the median, and of the load)."""
    rows: list[tuple[str, ...]] = []
    for one in found.times:
        middle, wrong = median(one.seconds), "; ".join(one.problems)
        met = middle <= one.target_seconds and not wrong
        told = (_told(middle), _told(max(one.seconds)), f"at most {_told(one.target_seconds)}", "met" if met else "MISSED")
        rows.append((one.what, *told, wrong or "0 lost, repeated, reordered"))
    if found.adoption_silence_seconds:
        normal, quiet = found.normal_silence_seconds, found.adoption_silence_seconds
        rows.append(("longest silence while HCMs are killed", "-", _told(quiet), f"as undisturbed: {_told(normal)}", "-", ""))
    if (away := found.outage) is not None:
        bound = REFUSAL_SECONDS + REFUSAL_SLACK_SECONDS
        refused = max(away.refusal_seconds, default=0.0)
        clear = not away.accepted and away.refusal_seconds and refused <= bound
        wrong = "; ".join(away.problems)
        usual = f"as undisturbed: {_told(away.normal_silence_seconds)}"
        name = f"ZooKeeper away for {away.seconds:.0f} s"
        rows += [
            (f"{name}: longest silence", "-", _told(away.silence_seconds), usual,
             "MISSED" if wrong else "met", wrong or "0 lost, repeated, reordered"),
            (f"{name}: administration refused", _told(median(away.refusal_seconds or (0.0,))), _told(refused),
             f"its deadline {_told(REFUSAL_SECONDS)}", "met" if clear else "MISSED", away.refusals[0] if away.refusals else ""),
            (f"{name}: back → a queue is created", "-", _told(away.back_seconds), "-", "-", ""),
        ]  # fmt: skip
    return rows


def _told(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < ANSWER_SECONDS else f"{seconds:.2f} s"
