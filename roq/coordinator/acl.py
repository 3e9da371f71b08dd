"""Who may do what to a node, as ZooKeeper 3.9 decides it. Pure.

    world:anyone          everybody
    digest:name:hash      whoever has shown the name and its password on this connection; hash: SHA-1 of both, in base64
    auth                  when it is set: every digest that the connection has shown

A node without an ACL of its own is anybody's. An identity lasts as long as its connection. Not covered: schemes "ip" and
"x509", a super user.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Set
from enum import IntFlag

from roq.wire.zookeeper import OPEN_ACL, Acl

WORLD, ANYONE, AUTH, DIGEST = "world", "anyone", "auth", "digest"
HIDDEN = "x"  # in place of a digest's hash
Identity = tuple[str, str]  # scheme, id
AclList = tuple[Acl, ...]


class Permission(IntFlag):
    """The bits of Acl.perms."""

    READ = 1
    WRITE = 2
    CREATE = 4
    DELETE = 8
    ADMIN = 16


def identity(scheme: str, shown: bytes) -> Identity | None:
    """Who has shown this; None: there is no such scheme."""
    if scheme != DIGEST:
        return None
    name = shown.partition(b":")[0].decode("utf-8", "replace")
    return DIGEST, f"{name}:{base64.b64encode(hashlib.sha1(shown, usedforsecurity=False).digest()).decode()}"


def settled(acl: AclList, who: Set[Identity]) -> AclList | None:
    """What is kept of an ACL that this connection sets; None: it is none."""
    kept: list[Acl] = []
    for entry in dict.fromkeys(acl):
        if entry.scheme == AUTH and who:
            kept += [Acl(entry.perms, *one) for one in sorted(who)]
        elif (entry.scheme, entry.id) == (WORLD, ANYONE) or (entry.scheme == DIGEST and entry.id.count(":") == 1):
            kept.append(entry)
        else:
            return None
    return (OPEN_ACL if tuple(kept) == OPEN_ACL else tuple(kept)) or None


def permits(acl: AclList, who: Set[Identity], wanted: Permission) -> bool:
    """Whether one of these may do one of what is wanted."""
    return acl is OPEN_ACL or any(
        entry.perms & wanted and (entry.scheme == WORLD or (entry.scheme, entry.id) in who) for entry in acl
    )


def shown(acl: AclList, who: Set[Identity]) -> AclList:
    """What is told of it: hashes only to those who may change it."""
    if permits(acl, who, Permission.ADMIN):
        return acl
    return tuple(
        Acl(entry.perms, DIGEST, f"{entry.id.partition(':')[0]}:{HIDDEN}") if entry.scheme == DIGEST else entry for entry in acl
    )
