"""Where something new goes: the least loaded live host. Pure; randomness comes in as an argument.

Load is what is *assigned*, not what is reported: a burst of requests spreads although no host has reported yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable

from gcm.cluster import ClusterState, Host
from roq.errors import HostFull, HostNotFound, NoHosts

Load = Callable[[Host], tuple[int, int]]


def place(cluster: ClusterState, wanted: str, chance: random.Random) -> Host:
    """The host named `wanted`, or if that is empty the one for a new queue: fewest Monitors, then most free Exchange slots.

    Raises HostNotFound, HostFull or NoHosts.
    """
    if wanted:
        return _named(cluster, wanted)
    return _least(_with_room(cluster), lambda host: (host.monitors, host.slots_used), chance)


def place_exchange(cluster: ClusterState, wanted: str, chance: random.Random) -> Host:
    """The host named `wanted`, or if that is empty the one with most free Exchange slots, then fewest Monitors.

    Raises HostNotFound, HostFull or NoHosts.
    """
    if wanted:
        return _named(cluster, wanted)
    return _least(_with_room(cluster), lambda host: (host.slots_used, host.monitors), chance)


def place_monitor(cluster: ClusterState, taken: Collection[str], chance: random.Random) -> Host | None:
    """The host for one more Monitor of a queue that has some on `taken`: fewest Monitors, rather with a free Exchange slot.
    None if no host takes it."""
    hosts = [host for host in cluster.hosts.values() if host.name not in taken and takes_monitor(host)]
    return _least(hosts, lambda host: (host.monitors, host.exchanges >= host.exchanges_max), chance) if hosts else None


def place_master(cluster: ClusterState, taken: Collection[str], chance: random.Random) -> Host | None:
    """The host for one more master of a work queue that has some on `taken`: fewest masters, then fewest Monitors. None if no
    host takes it."""
    hosts = [host for host in cluster.hosts.values() if host.name not in taken and takes_monitor(host)]
    return _least(hosts, lambda host: (host.masters, host.monitors), chance) if hosts else None


def refilled(
    hosts: Collection[str], count: int, failed: Callable[[str], bool], place: Callable[[Collection[str]], Host | None]
) -> tuple[str, ...]:
    """The hosts of `count` backups that run, as far as `place(taken)` finds hosts; those that failed go last of all, one for
    each that replaces them."""
    backups = list(hosts)
    lame = [name for name in backups if failed(name)]
    while len(backups) - len(lame) < count:
        host = place(backups)
        if host is None:
            break
        backups.append(host.name)
        if lame and len(backups) > count:
            backups.remove(lame.pop())
    return tuple(backups)


def takes_monitor(host: Host) -> bool:
    """One more Monitor, master or store may be placed here."""
    return host.takes_more


def has_room(host: Host) -> bool:
    """One more Exchange, or queue, may be placed here."""
    return host.takes_more and host.slots_used < 0


def _named(cluster: ClusterState, name: str) -> Host:
    host = cluster.hosts.get(name)
    if host is None or not host.alive:
        raise HostNotFound(f"no live host is named {name!r}")
    if host.draining:
        raise HostFull(f"host {name!r} is cordoned: nothing new is placed there")
    if not has_room(host):
        raise HostFull(f"host {name!r} has all its {host.exchanges_max} Exchange slots in use")
    return host


def _with_room(cluster: ClusterState) -> list[Host]:
    free = [host for host in cluster.hosts.values() if host.takes_more and host.slots_used < 0]
    if free:
        return free
    if not cluster.alive:
        raise NoHosts
    raise HostFull(f"all {cluster.alive} hosts are full or cordoned")


def _least(hosts: Iterable[Host], load: Load, chance: random.Random) -> Host:
    loads = [(load(host), host) for host in hosts]
    least = min(each for each, _ in loads)
    return chance.choice(sorted((host for each, host in loads if each == least), key=lambda host: host.name))
