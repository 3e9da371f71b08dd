"""`roq doctor`, the cluster: ZooKeeper, leader, hosts, processes, queues, copies."""

from __future__ import annotations

import asyncio
import re
import time

from roq.cli.doctor_copies import check_copies, read_copies
from roq.cli.doctor_hosts import check_clock, check_hosts, clock_skew_seconds, hosts_seconds, read_hosts
from roq.cli.finding import Finding, good, warning, wrong
from roq.client.cluster import Cluster, connect
from roq.client.overview import MONITOR_SECONDS, NOT_ASKED, Overview, read_overview
from roq.coordination.address import parse_address
from roq.coordination.leader import read_election, read_leader
from roq.errors import ClusterNotFound, InvalidConfiguration, RoqError, Unavailable
from roq.wire.zookeeper import COORDINATOR_VERSION

ZOOKEEPER_MIN = (3, 9, 4)
ANSWER_SECONDS = 3.0
OVERVIEW_SECONDS = ANSWER_SECONDS + 3 * MONITOR_SECONDS  # the leader's answer, then as long as Monitors that hang may take
COPIES_SECONDS = 60.0  # every master asks all stores
ANSWER_BYTES_MAX = 64 * 1024
FREE_SLOTS_MIN = 1


async def check_cluster(address: str) -> list[Finding]:
    """All findings about the cluster at these ZooKeeper addresses."""
    try:
        parsed = parse_address(address)
    except InvalidConfiguration as error:
        return [wrong("Cluster address", str(error), "write h1:2181,h2:2181[/chroot]")]
    findings = list(await asyncio.gather(*(_zookeeper(server) for server in parsed.hosts.split(","))))
    try:
        leader = await read_leader(address, ANSWER_SECONDS)
    except ClusterNotFound as error:
        return [*findings, wrong("Cluster", str(error), "check the chroot in the address; the first GCM makes it")]
    except Unavailable as error:
        return [*findings, await _no_leader(address, str(error))]
    except RoqError as error:
        return [*findings, wrong("Leader", str(error), "read the GCMs' logs")]
    findings.append(good("Leader", f"{leader.host}:{leader.port}, epoch {leader.epoch}"))
    try:
        async with connect(address) as cluster:
            async with asyncio.timeout(OVERVIEW_SECONDS):
                begun = time.time()
                overview = await read_overview(cluster)
                skew = clock_skew_seconds(overview.time, begun, time.time())
            findings += [*check_clock(skew), *check_overview(overview)]
            findings += await _host_answers(cluster, address, len(overview.hosts), skew)
            return findings + await _copies(cluster, address)
    except (RoqError, TimeoutError) as error:
        told = str(error) or "it did not answer in time"
        advice = f"is port {leader.port} of {leader.host} reachable from here? Read the GCM's log"
        return [*findings, wrong("Leader's answer", told, advice)]


async def _host_answers(cluster: Cluster, address: str, hosts: int, leader_skew_seconds: float) -> list[Finding]:
    try:
        async with asyncio.timeout(hosts_seconds(hosts)):
            return check_hosts(await read_hosts(cluster, address), leader_skew_seconds)
    except (RoqError, TimeoutError) as error:
        return [wrong("Hosts' answers", str(error) or "they were not all asked in time", "read the leading GCM's log")]


async def _copies(cluster: Cluster, address: str) -> list[Finding]:
    try:
        async with asyncio.timeout(COPIES_SECONDS):
            return check_copies(await read_copies(cluster, address))
    except (RoqError, TimeoutError) as error:
        told = str(error) or "the masters and stores were not all asked in time"
        return [wrong("Copies", told, "read the leading GCM's log")]


async def _no_leader(address: str, error: str) -> Finding:
    """Who is first in the election, and does not serve as a leader?"""
    try:
        named = await read_election(address, ANSWER_SECONDS)
    except RoqError:
        named = []
    if not named:
        return wrong("Leader", f"{error}: nobody takes part in the election", "start `roq-gcm`, or read the GCMs' logs")
    told = f"{error}: {named[0]!r} is first in the election, of {len(named)}, and serves nobody"
    advice = "a GCM of that name hangs or has just begun, read its log; else end that program, which is none of RoQ's"
    return wrong("Leader", told, advice)


async def _zookeeper(server: str) -> Finding:
    subject = f"ZooKeeper {server}"
    host, _, port = server.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(b"srvr")
                answer = (await reader.read(ANSWER_BYTES_MAX)).decode(errors="replace")
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return wrong(
            subject, f"does not answer: {str(error) or 'no answer in time'}", "is it running, and is the address right?"
        )
    return judge_srvr(subject, answer)


def judge_srvr(subject: str, answer: str) -> Finding:
    """What ZooKeeper's answer to `srvr` tells."""
    if "not currently serving" in answer:
        return wrong(subject, "does not serve: its ensemble has no quorum", "start more of its servers: a majority must run")
    if COORDINATOR_VERSION in answer:
        return good(subject, "RoQ's coordinator: for one machine, no replica")
    version = re.search(r"Zookeeper version: (\d+)\.(\d+)\.(\d+)", answer)
    mode = re.search(r"Mode: (\w+)", answer)
    if not version:
        told = answer.strip().splitlines()[0] if answer.strip() else "nothing"
        return warning(subject, f"does not tell its version: {told}", "allow srvr: 4lw.commands.whitelist=srvr in zoo.cfg")
    number = tuple(int(part) for part in version.groups())
    found = f"{'.'.join(version.groups())}, {mode.group(1) if mode else 'mode unknown'}"
    if number < ZOOKEEPER_MIN:
        return wrong(subject, found, "RoQ needs ZooKeeper 3.9.4 or newer: earlier ones have bugs that lose ephemeral nodes")
    return good(subject, found)


def check_overview(overview: Overview) -> list[Finding]:
    """What the leader's view of the cluster tells. Pure."""
    return [*_hosts(overview), *_processes(overview), *_queues(overview)]


def _hosts(overview: Overview) -> list[Finding]:
    if not overview.hosts:
        return [wrong("Hosts", "none", "start `roq-hcm` on a machine")]
    findings = []
    for host in overview.hosts:
        if not host.alive:
            up = f"is {host.address} up? " if host.address else ""  # no address: it was stopped, or is away for long
            findings.append(wrong(f"Host {host.host}", "is away", f"{up}Start its `roq-hcm`, or read its log"))
        elif host.draining:
            advice = f"`roq host uncordon {host.host}` ends that"
            findings.append(warning(f"Host {host.host}", "is cordoned: nothing new is placed there", advice))
    usable = [host for host in overview.hosts if host.alive and not host.draining]
    free = sum(max(0, host.exchanges_max - host.exchanges) for host in usable)
    found = f"{len(usable)} of {len(overview.hosts)} usable, {free} free Exchange slots"
    if free < FREE_SLOTS_MIN:
        findings.append(wrong("Hosts", found, "nothing can grow: add a host, or raise exchanges_max of one"))
    else:
        findings.append(good("Hosts", found))
    return findings


def _processes(overview: Overview) -> list[Finding]:
    findings = [
        wrong(
            f"Process {one.process} on {one.host}",
            f"was given up after {one.restarts} restarts: {one.error}",
            "read the process's log on that host; stopping and starting the queue tries again",
        )
        for one in overview.failed
    ]
    return findings or [good("Processes", f"{sum(host.processes for host in overview.hosts)}, none failed")]


def _queues(overview: Overview) -> list[Finding]:
    findings = []
    for queue in overview.queues:
        if not queue.running or queue.problem == NOT_ASKED:
            continue
        show = f"`roq queue show {queue.queue!r}` and `roq host ls` tell more"
        if not queue.ready:
            findings.append(wrong(f"Queue {queue.queue}", queue.problem or "is not ready", show))
        elif queue.problem:
            findings.append(wrong(f"Queue {queue.queue}", queue.problem, show))
        elif queue.lost:
            advice = "its subscribers are too slow: more of them, overflow=block, or a scaling policy"
            findings.append(warning(f"Queue {queue.queue}", f"{queue.lost} messages were lost", advice))
    skipped = sum(queue.problem == NOT_ASKED for queue in overview.queues)
    if skipped:
        advice = "`roq host ls` tells on which hosts the Monitors above are; mend these, then ask again"
        findings.append(wrong("Queues", f"{skipped} were not looked at: too many other Monitors do not answer", advice))
    running = sum(queue.running for queue in overview.queues)
    return findings or [good("Queues", f"{len(overview.queues)}, {running} running, all ready")]
