"""Which hosts get something: rendezvous hashing, so that a host more or less moves as little as possible. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def rank(key: str, hosts: Iterable[str]) -> list[str]:
    """All hosts, the best one for `key` first; the same everywhere."""
    return sorted(hosts, key=lambda host: (blake2b(f"{key}\0{host}".encode(), digest_size=8).digest(), host), reverse=True)


def choose(key: str, hosts: Iterable[str], count: int, keep: Iterable[str] = ()) -> tuple[str, ...]:
    """Up to `count` hosts: those of `keep` first, then the best ones for `key`."""
    kept = list(dict.fromkeys(keep))[:count]
    others = [host for host in rank(key, set(hosts)) if host not in kept]
    return tuple((kept + others)[:count])
