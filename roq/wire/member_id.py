"""Ids of publishers and subscribers that nobody else can use in a secured cluster. Pure.

An id can be read off messages, so alone it proves nothing. It comes with a proof, good for one name on cards:

    drawn     the id is a hash of that name and of 16 random bytes, which are the proof: to find some for an id that exists
              already, and another name, 2^64 hashes have to be tried
    granted   a named producer's id stays with the producer, whoever goes on with it: the GCM seals to whom it was given last,
              with a secret that only the cluster's servers know

A renewed card has the same name, so proofs outlive cards. Where nobody has a card they are empty, and nobody asks for them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from roq.ids import ID_MIN

NONCE_BYTES = 16
SEAL_BYTES = 32
_DRAWN, _GRANTED = b"roq member id\0", b"roq producer id\0"


Proof = bytes


class MemberId(NamedTuple):
    """id: 64 bits. proof: b"" where there are no cards."""

    id: int
    proof: Proof = b""


def drawn_id(name: str, nonce: bytes) -> int:
    """First 8 bytes, little endian, of the SHA-256 of "roq member id", 00, the name in UTF-8, 00, the nonce. Below ID_MIN: draw
    again."""
    return int.from_bytes(hashlib.sha256(_DRAWN + name.encode() + b"\0" + nonce).digest()[:8], "little")


def seal_grant(secret: bytes, queue: str, id: int, name: str) -> bytes:
    """Proof that this producer's id was given to this name. secret: of a server."""
    what = b"\0".join((queue.encode(), name.encode(), id.to_bytes(8, "little")))
    return hmac.digest(secret, _GRANTED + what, "sha256")


def is_proved(member: MemberId, queue: str, name: str, secrets: Iterable[bytes]) -> bool:
    """Whether it may be used under a card of this name, in this queue. secrets: of the cluster's servers."""
    if member.id < ID_MIN:
        return False
    if len(member.proof) == NONCE_BYTES:
        return drawn_id(name, member.proof) == member.id
    return any(hmac.compare_digest(seal_grant(one, queue, member.id, name), member.proof) for one in secrets)
