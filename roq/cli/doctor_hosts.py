"""`roq doctor`, hosts: each HCM is asked for its clock, its disk and its version; what its store can do is in its report."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import msgspec

from roq.cli.finding import Finding, good, warning, wrong
from roq.client.cluster import Cluster
from roq.coordination.locate import GcmClient
from roq.errors import RoqError
from roq.runtime.installation import SOURCE, installed_version
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.wire import gcm
from roq.wire import hcm as wire
from roq.wire.assignment import ProcessKind, ProcessState

ANSWER_SECONDS = 3.0
ASKED_AT_ONCE = 32
CLOCK_SKEW_SECONDS = 1.0  # latencies between hosts are wrong by this much
CLOCK_WRONG_SECONDS = 30.0  # no NTP client is at work there: nobody's times mean anything any more
DISK_BYTES_GOOD = 200 * 1024 * 1024
DISK_BYTES_MIN = 16 * 1024 * 1024  # below, a store takes little or nothing
NTP = "run an NTP client on every machine"


class HostState(msgspec.Struct, frozen=True):
    """What a live host's HCM told. skew_seconds: its clock minus ours, at least."""

    host: str
    address: str
    capacity: wire.Capacity | None
    skew_seconds: float = 0.0
    error: str = ""
    shuffles: bool = True  # its store takes part in them; True while it has no store


class HostsState(msgspec.Struct, frozen=True):
    """All live hosts, and how many shuffles there are."""

    hosts: Sequence[HostState]
    shuffles: int


def hosts_seconds(hosts: int) -> float:
    """How long `read_hosts` may take if none of so many hosts answers."""
    return ANSWER_SECONDS * (2 + math.ceil(hosts / ASKED_AT_ONCE))  # twice the leader is asked


async def read_hosts(cluster: Cluster, zookeeper: str) -> HostsState:
    """Ask every live host. Raises RoqError if no GCM answers."""
    gate = asyncio.Semaphore(ASKED_AT_ONCE)
    hosts = await asyncio.gather(*(_ask(info, gate) for info in await cluster.hosts() if info.alive))
    leader = GcmClient(zookeeper)
    try:
        return HostsState(hosts, len((await leader.request(gcm.ListShuffles(), gcm.ShuffleList, ANSWER_SECONDS)).shuffles))
    finally:
        leader.close()


async def _ask(info: gcm.HostInfo, gate: asyncio.Semaphore) -> HostState:
    running = info.report.processes if info.report else ()
    stores = [one for one in running if one.kind is ProcessKind.STORE and one.state is ProcessState.RUNNING]
    shuffles = all("shuffle" in store.ports for store in stores)
    async with gate:
        client = RpcClient(f"tcp://{info.address}:{info.port}", wire.Reply, on_disconnect=OnDisconnect.FAIL)
        try:
            begun = time.time()
            capacity = await client.request(wire.GetCapacity(), wire.Capacity, ANSWER_SECONDS)
            skew = clock_skew_seconds(capacity.time, begun, time.time()) if capacity.time else 0.0
            return HostState(info.host, info.address, capacity, skew, "", shuffles)
        except RoqError as error:
            return HostState(info.host, info.address, None, 0.0, str(error), shuffles)
        finally:
            client.close()


def check_hosts(found: HostsState, leader_skew_seconds: float) -> list[Finding]:
    """What is wrong with single hosts. Pure. leader_skew_seconds: the leader's clock minus ours; hosts are compared with it."""
    findings = []
    for host in found.hosts:
        subject = f"Host {host.host}"
        if host.capacity is None:
            advice = f"is its port reachable from here, at {host.address}? Read its roq-hcm's log"
            findings.append(wrong(subject, f"its roq-hcm does not answer here: {host.error}", advice))
            continue
        findings += [*_clock(subject, host.skew_seconds - leader_skew_seconds), *_disk(subject, host.capacity.disk_free_bytes)]
        findings += _version(subject, host.capacity.version)
        if found.shuffles and not host.shuffles:
            there = f"and there are shuffles: {found.shuffles}"
            told = f"takes no part in shuffles, pyarrow or numpy is missing there, {there}"
            advice = "pip install 'roq-messaging[shuffle]' there, then `roq host stop` it and start its roq-hcm again"
            findings.append(wrong(subject, told, advice))
    answered = sum(host.capacity is not None for host in found.hosts)
    return findings or ([good("Clocks, disks, versions", f"of {answered} hosts")] if answered else [])


def clock_skew_seconds(told: float, asked: float, answered: float) -> float:
    """By how much a clock must be ahead of ours (behind: negative) to tell this between question and answer."""
    return min(0.0, told - asked) + max(0.0, told - answered)


def check_clock(skew_seconds: float) -> list[Finding]:
    """This machine's, against the leader's, which is ahead by so much."""
    found = f"{_apart(-skew_seconds)} the leader's"
    if abs(skew_seconds) > CLOCK_WRONG_SECONDS:
        return [wrong("Clock", found, NTP)]
    return [warning("Clock", found, NTP)] if abs(skew_seconds) > CLOCK_SKEW_SECONDS else []


def _clock(subject: str, skew_seconds: float) -> list[Finding]:
    found = f"its clock {_apart(skew_seconds)} the leader's"
    if abs(skew_seconds) > CLOCK_WRONG_SECONDS:
        return [wrong(subject, found, NTP)]
    return [warning(subject, found, NTP)] if abs(skew_seconds) > CLOCK_SKEW_SECONDS else []


def _apart(seconds: float) -> str:
    return f"is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"


def _disk(subject: str, free_bytes: int) -> list[Finding]:
    found = f"{free_bytes // (1024 * 1024)} MiB are free where it keeps its state"
    if 0 <= free_bytes < DISK_BYTES_MIN:
        return [wrong(subject, f"the disk is full: {found}", "make room there: until then its store refuses what is new")]
    if 0 <= free_bytes < DISK_BYTES_GOOD:
        return [warning(subject, found, "make room there before its store refuses what is new")]
    return []


def _version(subject: str, version: str) -> list[Finding]:
    ours = installed_version()
    if version == ours or SOURCE in (version, ours):
        return []
    found = f"runs RoQ {version or 'of a version that does not tell it'}, this is {ours}"
    return [wrong(subject, found, "install one version everywhere, then restart the daemons, one host after the other")]
