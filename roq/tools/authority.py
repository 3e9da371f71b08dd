"""The cluster's authority: the file that signs cards, kept away from the cluster (`roq ca`, `roq access`).

authority   signing key, keys of the cluster's servers, and every card that was signed
card        a file for one holder; the authority keeps no secret key of it
access list what the cluster is told: which cards are revoked, which programs can't show theirs
"""

from __future__ import annotations

import base64
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from nacl import bindings

from roq.errors import CallError, InvalidConfiguration
from roq.runtime.security import CardFile, text, tls, used, write_secret
from roq.wire.card import NO_QUOTA, AccessList, Card, CardRole, Grant, Quota, new_card, sign, verify
from roq.wire.curve import KeyPair
from roq.wire.limits import PROPERTIES_BYTES_MAX

DAY_SECONDS = 86400.0
DAYS = 365.0  # of a card, unless it is said
CARD_BYTES_MAX = PROPERTIES_BYTES_MAX - 512
KEYS_KEPT = 3  # of each kind, the newest first: who is one rotation behind knows two of them, so keys rotate without a gap


class Issued(msgspec.Struct, frozen=True):
    """One card that was signed. signed: as its holder shows it, in base64; admitted: its holder can't show it."""

    id: str
    name: str
    role: CardRole
    grants: tuple[Grant, ...]
    expires: float
    signed: str
    revoked: bool = False
    admitted: bool = False
    quota: Quota = NO_QUOTA


class AuthorityFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In base64. signing: (public, secret), the newest first; servers: the same, of the cluster's servers; zookeeper: passwords
    of GCMs and hosts there; zookeeper_ca: in PEM, of who signs ZooKeeper's certificates."""

    signing: tuple[tuple[str, str], ...]
    servers: tuple[tuple[str, str], ...]
    zookeeper: tuple[str, ...]
    zookeeper_ca: str = ""
    version: int = 0  # of the access list
    issued: tuple[Issued, ...] = ()


class Authority:
    """`init` makes one, `load` reads it. Every change is written before it is returned."""

    def __init__(self, path: Path, file: AuthorityFile) -> None:
        self.path, self._file = path, file

    @classmethod
    def init(cls, path: Path) -> Authority:
        """Raises InvalidConfiguration: there is one."""
        if path.exists():
            raise InvalidConfiguration(f"{path} exists: an authority that is replaced leaves its cluster without cards")
        made = cls(path, AuthorityFile((_signing_pair(),), (_server_pair(),), (_password(),)))
        write_secret(path, made._file)
        return made

    @classmethod
    def load(cls, path: Path) -> Authority:
        """Raises InvalidConfiguration."""
        try:
            return cls(path, msgspec.json.decode(path.read_bytes(), type=AuthorityFile))
        except OSError as error:
            raise InvalidConfiguration(f"can't read the authority {path}: {error.strerror}: `roq ca init` makes one") from None
        except msgspec.MsgspecError as error:
            raise InvalidConfiguration(f"{path} is no authority: {error}") from None

    @property
    def issued(self) -> tuple[Issued, ...]:
        """All cards, the oldest first."""
        return self._file.issued

    def _change(self, change: Callable[[AuthorityFile], AuthorityFile]) -> None:
        """Of the file as it is now: somebody else may have signed a card since it was read."""
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._file = change(Authority.load(self.path)._file)
            write_secret(self.path, self._file)
        finally:
            os.close(lock)

    def issue(
        self,
        name: str,
        role: CardRole,
        grants: Iterable[Grant] = (),
        days: float = DAYS,
        now: float | None = None,
        quota: Quota = NO_QUOTA,
    ) -> CardFile:
        """A new card with a key of its own. days: until it is over. Raises CallError."""
        keys = KeyPair.new()
        _, signed = self._sign(name, role, keys.public, grants, days, now, quota, admitted=False)
        file = self._file
        servers = file.servers if role is not CardRole.CLIENT else ()
        authorities = tuple(public for public, _ in file.signing)
        first = used(file.zookeeper)
        passwords = (first, *(one for one in file.zookeeper if one != first)) if role is not CardRole.CLIENT else ()
        server, _ = file.servers[0] if role is CardRole.CLIENT else used(file.servers)  # programs are given theirs last
        return CardFile(text(signed), text(keys.secret), server, authorities, servers, passwords, file.zookeeper_ca)

    def admit(self, name: str, key: bytes, grants: Iterable[Grant], days: float = DAYS, quota: Quota = NO_QUOTA) -> Card:
        """A card for a program that has a CURVE key and no way to show a card: the access list has it."""
        card, _ = self._sign(name, CardRole.CLIENT, key, grants, days, None, quota, admitted=True)
        return card

    def _sign(
        self,
        name: str,
        role: CardRole,
        key: bytes,
        grants: Iterable[Grant],
        days: float,
        now: float | None,
        quota: Quota,
        *,
        admitted: bool,
    ) -> tuple[Card, bytes]:
        begins = time.time() if now is None else now
        card = new_card(name, role, key, grants, begins, begins + days * DAY_SECONDS, quota=quota)
        signed = sign(card, self._signer())
        if len(signed) > CARD_BYTES_MAX:
            raise CallError(f"a card of {len(signed)} bytes: use fewer or shorter names, as `orders.*`")
        issued = Issued(card.id, name, role, card.grants, card.expires, text(signed), admitted=admitted, quota=quota)
        self._change(lambda file: msgspec.structs.replace(file, issued=(*file.issued, issued), version=file.version + admitted))
        return card, signed

    def revoke(self, name: str) -> int:
        """All cards of this name, or the one of this id; how many that were. Raises CallError: there is none."""
        chosen = set[str]()

        def change(file: AuthorityFile) -> AuthorityFile:
            chosen.update(one.id for one in file.issued if name in (one.name, one.id) and not one.revoked)
            if not chosen:
                raise CallError(f"no card of {name!r} that is not revoked: `roq access ls` lists them")
            issued = tuple(msgspec.structs.replace(one, revoked=one.revoked or one.id in chosen) for one in file.issued)
            return msgspec.structs.replace(file, issued=issued, version=file.version + 1)

        self._change(change)
        return len(chosen)

    def trust_zookeeper(self, ca: str) -> None:
        """Cards that are signed from now on have connections to ZooKeeper use TLS. ca: PEM, of who signs its certificates;
        "": none again. Raises InvalidConfiguration."""
        if ca:
            tls(ca)
        self._change(lambda file: msgspec.structs.replace(file, zookeeper_ca=ca))

    def rotate(self) -> None:
        """New keys of the authority and of the cluster's servers, and a new password for ZooKeeper. The ones before are used
        until the next rotation, because who has no new card yet knows no others."""
        signing, server = _signing_pair(), _server_pair()

        def change(file: AuthorityFile) -> AuthorityFile:
            signs = (signing, *file.signing)[:KEYS_KEPT]
            issued = tuple(_signed_again(one, file.signing, used(signs)) if one.admitted else one for one in file.issued)
            servers = (server, *file.servers)[:KEYS_KEPT]
            changed = {"signing": signs, "servers": servers, "zookeeper": (_password(), *file.zookeeper)[:KEYS_KEPT]}
            return msgspec.structs.replace(file, **changed, issued=issued, version=file.version + 1)  # of the access list

        self._change(change)

    def _signer(self) -> bytes:
        return base64.b64decode(used(self._file.signing)[1])

    def access_list(self) -> bytes:
        """Signed, for the cluster."""
        now = time.time()
        revoked = tuple(one.id for one in self.issued if one.revoked and one.expires + DAY_SECONDS > now)  # clocks differ
        live = (one for one in self.issued if one.admitted and not one.revoked and one.expires > now)
        admitted = tuple(base64.b64decode(one.signed) for one in live)
        return sign(AccessList(self._file.version, revoked, admitted), self._signer())

    def server_key(self) -> bytes:
        """Public: what programs in other languages need beside their own."""
        return base64.b64decode(self._file.servers[0][0])


def _password() -> str:
    return secrets.token_urlsafe(32)


def _signed_again(issued: Issued, before: tuple[tuple[str, str], ...], signer: tuple[str, str]) -> Issued:
    card = verify(base64.b64decode(issued.signed), [base64.b64decode(public) for public, _ in before], Card)
    return msgspec.structs.replace(issued, signed=text(sign(card, base64.b64decode(signer[1]))))


def _signing_pair() -> tuple[str, str]:
    public, secret = bindings.crypto_sign_keypair()
    return text(public), text(secret)


def _server_pair() -> tuple[str, str]:
    keys = KeyPair.new()
    return text(keys.public), text(keys.secret)
