"""Who holds a range, who buffers an attempt: rendezvous hashing. Every host gets a score for every thing, the highest ones win.
So each host gets its even share, a host that leaves gives away only what it held (to the others evenly), and a host that joins
takes only its share (from the others evenly). All hosts weigh the same. Not covered: which hosts there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b


def holders(shuffle: str, identity: int, hosts: Iterable[str], replicas: int) -> tuple[str, ...]:
    """The hosts that hold the range with this identity, best first; fewer when there are fewer hosts."""
    return _best(f"range\0{shuffle}\0{identity}", hosts, replicas)


def buffer_of(shuffle: str, partition: int, attempt: str, hosts: Iterable[str]) -> str:
    """The host whose buffer role takes the attempt. Raises IndexError without hosts."""
    return _best(f"attempt\0{shuffle}\0{partition}\0{attempt}", hosts, 1)[0]


def replica_order(reader: str, shuffle: str, number: int, hosts: Iterable[str]) -> tuple[str, ...]:
    """In which order a reader asks a range's holders: round robin over all readers, without state."""
    return _best(f"read\0{shuffle}\0{number}\0{reader}", hosts, None)


def place(shuffle: str, identities: Iterable[int], hosts: Sequence[str], replicas: int) -> dict[int, tuple[str, ...]]:
    """The holders of each identity."""
    return {identity: holders(shuffle, identity, hosts, replicas) for identity in identities}


def _best(thing: str, hosts: Iterable[str], count: int | None) -> tuple[str, ...]:
    base = blake2b(thing.encode(), digest_size=8)
    scores = []
    for host in hosts:
        score = base.copy()
        score.update(b"\0" + host.encode())
        scores.append((score.digest(), host))
    scores.sort(reverse=True)
    return tuple(host for _, host in scores[:count])
