"""`roq doctor`, the cluster: ZooKeeper, leader, hosts, processes, queues, copies.

Each HCM is asked for its clock, its disk and its version; what its store can do is in its report. Masters and stores are asked
for copies: may a disk be replaced now, and if not, what lacks copies on which hosts.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence, Set

import msgspec

from roq.cli.finding import Finding, good, warning, wrong
from roq.cli.tape_copies import tape_shortages
from roq.cli.tree_finding import find_tree_format
from roq.client.cluster import Cluster, connect
from roq.client.overview import MONITOR_SECONDS, NOT_ASKED, Overview, read_overview
from roq.coordination.link import ZooKeeperAddress, parse_address
from roq.coordination.locate import GcmClient, read_election, read_leader
from roq.errors import ClusterNotFound, DataLost, InvalidConfiguration, RoqError, Unavailable
from roq.runtime.installation import SOURCE, installed_version
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.runtime.security import enter_cluster, leave_cluster, process_security
from roq.tools.local.zookeeper import server_status
from roq.wire import gcm, hcm, master, shuffle
from roq.wire.assignment import Leaving, ProcessKind, ProcessState
from roq.wire.card import Card
from roq.wire.fleet import FleetInfo
from roq.wire.shuffle import ShuffleState
from roq.wire.zookeeper import COORDINATOR_VERSION

ZOOKEEPER_MIN = (3, 9, 4)
ANSWER_SECONDS = 3.0
OVERVIEW_SECONDS = ANSWER_SECONDS + 3 * MONITOR_SECONDS  # the leader's answer, then as long as Monitors that hang may take
COPIES_SECONDS = 60.0  # every master asks all stores
FREE_SLOTS_MIN = 1
ASKED_AT_ONCE = 32
CLOCK_SKEW_SECONDS = 1.0  # latencies between hosts are wrong by this much
CLOCK_WRONG_SECONDS = 30.0  # no NTP client is at work there: nobody's times mean anything any more
DISK_BYTES_GOOD = 200 * 1024 * 1024
DISK_BYTES_MIN = 16 * 1024 * 1024  # below, a store takes little or nothing
NTP = "run an NTP client on every machine"
MASTER_SECONDS = 10.0  # a master asks all stores before it answers
DAY_SECONDS, CARD_DAYS_MIN = 86400.0, 14.0
LEAVE_WORDS = {Leaving.PROCESSES: "processes (drained)", Leaving.EVERYTHING: "processes and data (evacuated)"}
SHOWN_MAX = 5  # shortages of one queue
WAIT = "replace no further disk until this is gone; it is copied again by itself"


async def check_cluster(address: str) -> list[Finding]:
    """All findings about the cluster at these ZooKeeper addresses."""
    try:
        parsed = parse_address(address)
    except InvalidConfiguration as error:
        return [wrong("Cluster address", str(error), "write h1:2181,h2:2181[/chroot]")]
    enter_cluster(str(parsed))
    try:
        return await _check(address, parsed)
    finally:
        leave_cluster(str(parsed))


async def _check(address: str, parsed: ZooKeeperAddress) -> list[Finding]:
    findings = list(await asyncio.gather(*(check_zookeeper(server) for server in parsed.hosts.split(","))))
    try:
        leader = await read_leader(address, ANSWER_SECONDS)
    except ClusterNotFound as error:
        return [*findings, wrong("Cluster", str(error), "check the chroot in the address; the first GCM makes it")]
    except Unavailable as error:
        return [*findings, *await asyncio.gather(_no_leader(address, str(error)), find_tree_format(address))]
    except RoqError as error:
        return [*findings, wrong("Leader", str(error), "read the GCMs' logs")]
    findings.append(good("Leader", f"{leader.host}:{leader.port}, epoch {leader.epoch}"))
    findings.append(await find_tree_format(address))
    security = process_security()
    findings.append(check_security(security.card if security is not None else None, leader.host, time.time()))
    try:
        async with connect(address) as cluster:
            async with asyncio.timeout(OVERVIEW_SECONDS):
                begun = time.time()
                overview = await read_overview(cluster)
                skew = clock_skew_seconds(overview.time, begun, time.time())
            findings += [*check_clock(skew), *check_overview(overview)]
            findings += await _host_answers(cluster, address, len(overview.hosts), skew)
            findings += await _fleet(cluster)
            return findings + await _copies(cluster, address)
    except (RoqError, TimeoutError) as error:
        told = str(error) or "it did not answer in time"
        advice = f"is port {leader.port} of {leader.host} reachable from here? Read the GCM's log"
        return [*findings, wrong("Leader's answer", told, advice)]


def check_security(card: Card | None, leader: str, now: float) -> Finding:
    """card: ours; leader: its address; now: seconds since 1970."""
    if card is not None:
        left = (card.expires - now) / DAY_SECONDS
        found = f"your card is that of {card.name}, good for {left:.0f} days"
        return good("Security", found) if left > CARD_DAYS_MIN else warning("Security", found, "have a new one signed")
    if leader.startswith("127."):
        return good("Security", "none, and the leader is bound to this machine")
    advice = "give GCMs and hosts cards (docs/security.md), or keep everybody else from their network"
    return warning("Security", f"none: whoever reaches {leader} reads and changes everything", advice)


async def _host_answers(cluster: Cluster, address: str, hosts: int, leader_skew_seconds: float) -> list[Finding]:
    try:
        async with asyncio.timeout(hosts_seconds(hosts)):
            return check_hosts(await read_hosts(cluster, address), leader_skew_seconds)
    except (RoqError, TimeoutError) as error:
        return [wrong("Hosts' answers", str(error) or "they were not all asked in time", "read the leading GCM's log")]


async def _fleet(cluster: Cluster) -> list[Finding]:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return check_fleet(await cluster.fleet())
    except (RoqError, TimeoutError):  # an older GCM, during an upgrade
        return []


def check_fleet(info: FleetInfo) -> list[Finding]:
    """Machines that the cluster makes for itself; nothing is said where it may make none."""
    if info.limits is None or not (info.limits.most or info.machines):
        return []
    if info.problem:
        return [warning("Fleet", info.problem, "`roq fleet show` says more, and the leading GCM's log")]
    return [good("Fleet", f"{len(info.machines)} machines of {info.limits.most} that may be made")]


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


async def check_zookeeper(server: str) -> Finding:
    """What one of its servers, `host:port`, says of itself."""
    subject = f"ZooKeeper {server}"
    host, _, port = server.rpartition(":")
    try:
        answer = await server_status(host.strip("[]"), int(port), ANSWER_SECONDS)
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
        return warning(subject, f"does not report its version: {told}", "allow srvr: 4lw.commands.whitelist=srvr in zoo.cfg")
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
        elif host.stopping:
            findings.append(
                warning(f"Host {host.host}", "is about to end, and hands over", "it has been asked to stop: nothing to do")
            )
        elif host.leaving:
            advice = f"`roq host evacuate {host.host}` shows what is left; `roq host uncordon {host.host}` calls it off"
            findings.append(warning(f"Host {host.host}", f"is being left by {LEAVE_WORDS[host.leaving]}", advice))
        elif host.draining:
            advice = f"`roq host uncordon {host.host}` ends that"
            findings.append(warning(f"Host {host.host}", "is cordoned: nothing new is placed there", advice))
        left = (host.card_expires - overview.time) / DAY_SECONDS
        if host.card_expires and left < CARD_DAYS_MIN:
            found = f"its card is good for {left:.0f} days: then none of its processes is started again"
            advice = f"`roq ca sign host {host.host} FILE`, put it in place and start roq-hcm again"
            findings.append(warning(f"Host {host.host}", found, advice))
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
        show = f"`roq queue show {queue.queue!r}` and `roq host ls` show more"
        if not queue.ready:
            findings.append(wrong(f"Queue {queue.queue}", queue.problem or "is not ready", show))
        elif queue.problem:
            findings.append(wrong(f"Queue {queue.queue}", queue.problem, show))
        elif queue.lost:
            advice = "its subscribers are too slow: more of them, overflow=block, or a scaling policy"
            findings.append(warning(f"Queue {queue.queue}", f"{queue.lost} messages were lost", advice))
    skipped = sum(queue.problem == NOT_ASKED for queue in overview.queues)
    if skipped:
        advice = "`roq host ls` shows on which hosts the Monitors above are; repair these, then ask again"
        findings.append(wrong("Queues", f"{skipped} were not looked at: too many other Monitors do not answer", advice))
    running = sum(queue.running for queue in overview.queues)
    return findings or [good("Queues", f"{len(overview.queues)}, {running} running, all ready")]


class HostState(msgspec.Struct, frozen=True):
    """What a live host's HCM reported. skew_seconds: its clock minus ours, at least."""

    host: str
    address: str
    capacity: hcm.Capacity | None
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
        client = RpcClient(f"tcp://{info.address}:{info.port}", hcm.Reply, on_disconnect=OnDisconnect.FAIL)
        try:
            begun = time.time()
            capacity = await client.request(hcm.GetCapacity(), hcm.Capacity, ANSWER_SECONDS)
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
        skew = host.skew_seconds - leader_skew_seconds
        findings += _clock(subject, f"its clock {_apart(skew)} the leader's", skew)
        findings += _disk(subject, host.capacity.disk_free_bytes)
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
    return _clock("Clock", f"{_apart(-skew_seconds)} the leader's", skew_seconds)


def _clock(subject: str, found: str, skew_seconds: float) -> list[Finding]:
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
    found = f"runs RoQ {version or 'of a version that does not report it'}, this is {ours}"
    return [wrong(subject, found, "install one version everywhere, then restart the daemons, one host after the other")]


class CopiesOf(msgspec.Struct, frozen=True):
    """What was found out about one recorded queue, work queue or shuffle. error: why nothing was; lost: it says that data are
    gone; by_hosts: only that the hosts are there (tape_copies.py)."""

    subject: str
    shortages: Sequence[master.Shortage] = ()
    error: str = ""
    lost: bool = False
    by_hosts: bool = False


async def read_copies(cluster: Cluster, zookeeper: str) -> list[CopiesOf]:
    """Of all recorded queues, work queues and sealed shuffles. Raises RoqError if no GCM answers."""
    gate = asyncio.Semaphore(ASKED_AT_ONCE)
    view = await cluster.view()
    alive = {host.host for host in view.hosts if host.alive}
    recorded = [queue.record.name for queue in view.queues if queue.record.record is not None]
    tapes = await asyncio.gather(*(_of_tapes(cluster, name, alive, gate) for name in recorded))
    masters = [one for info in await cluster.work_queues() for one in (info, *info.shards)]
    queues = await asyncio.gather(*(_of_queue(info, gate) for info in masters))
    leader = GcmClient(zookeeper)
    try:
        listed = (await leader.request(gcm.ListShuffles(), gcm.ShuffleList, MASTER_SECONDS)).shuffles
        sealed = [one.name for one in listed if one.state is ShuffleState.SEALED]
        infos = [await leader.request(gcm.DescribeShuffle(name), gcm.ShuffleInfo, MASTER_SECONDS) for name in sealed]
    finally:
        leader.close()
    endpoints = {host: endpoint for info in infos for host, endpoint in info.followers.items()}
    views = dict(zip(endpoints, await asyncio.gather(*(_view(one, gate) for one in endpoints.values())), strict=True))
    return [*tapes, *queues, *(shuffle_copies(info, views) for info in infos)]


async def _of_tapes(cluster: Cluster, queue: str, alive: Set[str], gate: asyncio.Semaphore) -> CopiesOf:
    subject = f"recorded queue {queue}"
    async with gate:
        try:
            return CopiesOf(subject, tape_shortages((await cluster.tapes(queue)).views, alive), by_hosts=True)
        except RoqError as error:
            return CopiesOf(subject, error=str(error))


async def _view(endpoint: str, gate: asyncio.Semaphore) -> shuffle.FollowerView | None:
    async with gate:
        client = RpcClient(endpoint, shuffle.Reply)
        try:
            return await client.request(shuffle.DescribeFollower(), shuffle.FollowerView, MASTER_SECONDS)
        except RoqError:
            return None
        finally:
            client.close()


def shuffle_copies(info: gcm.ShuffleInfo, views: Mapping[str, shuffle.FollowerView | None]) -> CopiesOf:
    """Which ranges of a sealed shuffle have too few complete holders. Pure. views: by host; None: no answer."""
    id, wanted = info.description.id, info.description.spec.replicas
    bad = {
        host
        for one in info.description.ranges
        for host in one.holders
        if host not in info.followers or (view := views.get(host)) is None or not view.compared or id in view.lacking
    }
    short: dict[int, list[tuple[str, ...]]] = {}  # copies -> hosts without one, per range
    for one in info.description.ranges:
        missing = tuple(host for host in one.holders if host in bad)
        if (copies := len(one.holders) - len(missing)) < wanted:
            short.setdefault(copies, []).append(missing)
    shortages = [
        master.Shortage(f"{len(some)} ranges", copies, wanted, tuple(sorted({host for hosts in some for host in hosts})))
        for copies, some in sorted(short.items())
    ]
    return CopiesOf(f"shuffle {info.description.name}", shortages)


async def _of_queue(info: gcm.WorkQueueInfo, gate: asyncio.Semaphore) -> CopiesOf:
    subject = f"work queue {info.record.name}"
    if not info.ready or not info.masters:
        return CopiesOf(subject, error="has no active master")
    async with gate:
        client = RpcClient(info.masters[0].endpoint(), master.Reply)
        try:
            return CopiesOf(subject, (await client.request(master.GetCopies(), master.Copies, MASTER_SECONDS)).shortages)
        except RoqError as error:
            return CopiesOf(subject, error=str(error), lost=isinstance(error, DataLost))
        finally:
            client.close()


def check_copies(found: Sequence[CopiesOf]) -> list[Finding]:
    """One finding if everything is complete, else one for each that is not. Pure."""
    findings = []
    for one in found:
        subject = f"Copies of {one.subject}"
        if one.lost:
            findings.append(wrong(subject, one.error, "replace no disk, and bring back the one that was taken out last"))
        elif one.error:
            findings.append(warning(subject, f"are not known: {one.error}", "replace no disk until they are"))
        elif one.shortages:
            shown = [_shown(shortage) for shortage in one.shortages[:SHOWN_MAX]]
            left = len(one.shortages) - len(shown)
            told = "; ".join([*shown, f"and {left} more"] if left else shown)
            few = any(not shortage.hosts for shortage in one.shortages)
            findings.append(warning(subject, told, f"{WAIT}{', if there are enough hosts with room' if few else ''}"))
    if not findings and found:
        told = f"{len(found)} queues and shuffles have all of theirs: one disk may be replaced now"
        if any(one.by_hosts for one in found):
            told += ", unless one was a short time ago: what is recorded is taken to be where its hosts are"
        findings.append(good("Copies", told))
    return findings


def _shown(shortage: master.Shortage) -> str:
    where = f", missing on {', '.join(shortage.hosts)}" if shortage.hosts else ", no further host has one"
    return f"{shortage.what}: {shortage.copies} of {shortage.wanted} copies{where}"
