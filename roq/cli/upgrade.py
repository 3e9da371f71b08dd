"""`roq upgrade check`: may a host be taken down now, to come back with another version, and what waits or is lost meanwhile?

Everything is read as `roq doctor` reads it; what follows from it is pure. Not covered: installing anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import typer

from roq.cli.address import ClusterOption, JsonOption, entered, with_cluster
from roq.cli.doctor import end_with
from roq.cli.doctor_cluster import CopiesOf, HostsState, check_copies, read_copies, read_hosts
from roq.cli.finding import Finding, good, warning, wrong
from roq.cli.output import counted, working
from roq.cli.tree_finding import find_tree_format
from roq.client.cluster import Cluster
from roq.ids import is_reserved
from roq.runtime.installation import installed_version
from roq.runtime.security import process_security
from roq.wire.assignment import Leaving, Overflow
from roq.wire.gcm import ClusterView, QueueInfo, WorkQueueInfo

app = typer.Typer(help="Upgrades of a running cluster.", no_args_is_help=True)
ORDER = (
    "hosts one after the other, then the GCMs, the leader last: `roq host stop HOST`, install, start its roq-hcm, and "
    "`roq upgrade check` again before the next one"
)
SHOWN = 5  # names of one kind


@app.command("check")
def check(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Whether the cluster may be upgraded host by host now, what waits meanwhile, and what stands in the way of going back.

    Exit code 0: nothing stands in the way, warnings at most. 1: something does; it says what to do."""
    address = entered(cluster)

    async def ask(connected: Cluster) -> list[Finding]:
        tree = await find_tree_format(address)
        view = await connected.view()
        groups = [group for queue in view.queues if queue.record.record for group in await connected.groups(queue.record.name)]
        hosts, copies = await read_hosts(connected, address), await read_copies(connected, address)
        return check_upgrade(view, groups, hosts, copies, tree, secured=process_security() is not None)

    async def look(connected: Cluster) -> list[Finding]:
        with working("asking hosts, masters and stores"):
            return await ask(connected)

    end_with(with_cluster(cluster, look), lambda well: {"ready": well, "order": ORDER}, json=json)


def check_upgrade(
    view: ClusterView,
    groups: Sequence[WorkQueueInfo],
    hosts: HostsState,
    copies: Sequence[CopiesOf],
    tree: Finding,
    *,
    secured: bool,
) -> list[Finding]:
    """What was found. tree: of `find_tree_format`. Pure."""
    queues = [queue for queue in view.queues if queue.record.running]
    return [
        *_hosts(view),
        *_versions(hosts),
        *_copies(copies, hosts),
        *_exchanges(queues),
        *_monitors(queues),
        *_masters([*view.work_queues, *groups]),
        *_tapes(queues, len(view.hosts)),
        tree,
        _back(view, groups, secured=secured),
        good("Order", ORDER),
    ]


def _named(names: Sequence[str]) -> str:
    """As in "a, b and 3 more"."""
    shown = ", ".join(sorted(names)[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _hosts(view: ClusterView) -> list[Finding]:
    gone = [host.host for host in view.hosts if not host.alive]
    if gone:
        return [wrong("Hosts", f"not there: {_named(gone)}", "bring them back, or remove them, before another one goes")]
    if len(view.hosts) == 1:
        advice = "members wait for it; messages of queues with overflow drop are dropped while it is away: add a host first"
        return [warning("Hosts", "there is only one", advice)]
    return [good("Hosts", f"all {len(view.hosts)} are there")]


def _versions(hosts: HostsState) -> list[Finding]:
    silent = [host.host for host in hosts.hosts if host.capacity is None]
    if silent:
        return [wrong("Versions", f"not reported by {_named(silent)}", "is the port of its roq-hcm reachable from here?")]
    found = Counter(host.capacity.version or "0.1" for host in hosts.hosts if host.capacity is not None)
    told = ", ".join(f"{version} on {counted(count, 'host')}" for version, count in sorted(found.items()))
    told = f"{told}; here {installed_version()}"
    if len(found) > 1:
        return [warning("Versions", told, "an upgrade is under way: finish it, or go back")]
    return [good("Versions", told)]


def _copies(copies: Sequence[CopiesOf], hosts: HostsState) -> list[Finding]:
    """What lacks copies might lack its last ones with one more host away. A master of 0.1 does not tell, and what a store of
    0.1 holds can't be compared: it counts as missing."""
    old = {host.host for host in hosts.hosts if host.capacity is not None and not host.capacity.version}
    known = [
        msgspec.structs.replace(
            one, shortages=[short for short in one.shortages if not (short.hosts and set(short.hosts) <= old)]
        )
        for one in copies
    ]
    short = check_copies([one for one in known if one.shortages or one.lost])
    unknown = [
        one.subject
        for one, before in zip(known, copies, strict=True)
        if not one.lost and (one.error or len(one.shortages) < len(before.shortages))
    ]
    findings = [wrong(one.subject, one.found, one.advice) for one in short]
    if unknown:
        advice = "`roq doctor` says why; a master of 0.1 does not report it, and what a store of 0.1 has can't be compared"
        findings.append(warning("Copies", f"not reported for {_named(unknown)}", advice))
    return findings or [good("Copies", "everything has all of its")]


def _exchanges(queues: Sequence[QueueInfo]) -> list[Finding]:
    alone: dict[str, list[str]] = {}
    for queue in queues:
        if len(places := set(queue.record.exchanges.values())) == 1 and not is_reserved(queue.record.name):
            loses = queue.record.settings.overflow is Overflow.DROP
            alone.setdefault("drop" if loses else "wait", []).append(f"{queue.record.name} on {places.pop()}")
    findings = []
    if names := alone.get("drop"):
        advice = "`roq queue add-exchange QUEUE --host OTHER` first: until its host is back what is published may be dropped"
        findings.append(warning("Exchanges on one host alone", _named(names), advice))
    if names := alone.get("wait"):
        advice = "`roq queue add-exchange QUEUE --host OTHER` first, or publishers wait until its host is back"
        findings.append(warning("Exchanges on one host alone", _named(names), advice))
    return findings or [good("Exchanges", "every queue has them on two hosts at least")]


def _monitors(queues: Sequence[QueueInfo]) -> list[Finding]:
    alone = [f"{queue.record.name} on {queue.record.monitor_host}" for queue in queues if queue.record.settings.replication < 2]
    if alone:
        advice = "messages flow on, but nobody joins and nothing scales until the host is back; --replication 2 has a backup"
        return [warning("Monitors without a backup", _named(alone), advice)]
    return [good("Monitors", "every queue has a backup")]


def _masters(work_queues: Sequence[WorkQueueInfo]) -> list[Finding]:
    masters = [one for info in work_queues for one in (info, *info.shards)]
    alone = [f"{info.record.name} on {info.record.master_host}" for info in masters if not info.record.standby_hosts]
    if alone:
        advice = "puts and leases wait until its host is back, or another one has taken over; standbys=1 has one ready"
        return [warning("Masters without a standby", _named(alone), advice)]
    return [good("Masters", "every work queue and group has a standby")] if work_queues else []


def _tapes(queues: Sequence[QueueInfo], hosts: int) -> list[Finding]:
    few = []
    for queue in queues:
        if queue.record.record is not None and queue.record.recorded:
            write, ack = queue.record.record.quorums(hosts)
            if write - 1 < ack:
                few.append(queue.record.name)
    if few:
        advice = "with one host away they can't be stored on as many as must confirm: publishers wait, and readers may"
        return [warning("Recorded with no copy to spare", _named(few), advice)]
    return []


def _back(view: ClusterView, groups: Sequence[WorkQueueInfo], *, secured: bool) -> Finding:
    """Version 0.1 knows none of these."""
    recorded = [queue.record.name for queue in view.queues if queue.record.record is not None]
    new = [f"recorded queues: {_named(recorded)}"] if recorded else []
    new += [f"groups: {_named([info.record.name for info in groups])}"] if groups else []
    several = [info.record.name for info in view.work_queues if info.shards]
    new += [f"work queues of several shards: {_named(several)}"] if several else []
    ruled = [queue.record.name for queue in view.queues if queue.rules]
    new += [f"targets, or other rules of policies that it lacks: {_named(ruled)}"] if ruled else []
    left = [host.host for host in view.hosts if host.leaving is not Leaving.NOTHING]
    new += [f"hosts that are drained or evacuated, which its GCM only cordons: {_named(left)}"] if left else []
    new += ["cards"] if secured else []
    if new:
        return good("Back to 0.1", f"only without what it does not know ({'; '.join(new)}), see docs/compatibility.md")
    return good("Back to 0.1", "nothing that it does not know is in use")
