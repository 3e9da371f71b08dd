"""Who this process is, and whom its servers let in: a card file and the cluster's access list.

    card file   JSON, mode 0600: the signed card with its secret key and the cluster's key; of hosts and GCMs also the servers'
                secret keys
    in          a client whose card an authority has signed, for the key it shows, that is not over and not revoked
    revoked     its connections are cut at once, at every server of this process

One process has one card: daemons are given theirs when they start, programs by `roq.connect(card=)` or ROQ_CARD, or find it
under their cluster's address in ~/.config/roq/cards, where `roq up` puts it. So no port is open by oversight: whatever a
process with a card binds takes only who shows one. All servers of a cluster have the same key: clients prove by it that they
talk to the cluster, hosts are known by their cards.

Not covered: what a card allows (roq/wire/rights.py), who tells of revocations (hcm/, gcm/).
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import ssl
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from nacl import bindings

from roq.errors import AccessDenied, CardRevoked, InvalidConfiguration, ProofRefused
from roq.ids import ID_MIN, new_id
from roq.runtime.audit import turned_away
from roq.runtime.files import DISK
from roq.runtime.observe import logger
from roq.runtime.places import configuration_home
from roq.wire import zmtp
from roq.wire.card import CARD_PROPERTY, REVOKED, AccessList, Card, CardRole, SecurityMode, verify, verify_card
from roq.wire.curve import KEY_BYTES, CurveClient, CurveOrNullServer, CurveServer, KeyPair
from roq.wire.member_id import NONCE_BYTES, MemberId, drawn_id, is_proved, seal_grant

log = logger(__name__)
K = TypeVar("K")  # a key or a password


USED = 1  # of keys, if there is one before the newest: this one everybody knows, and of its predecessor there may be cards left


def used(keys: Sequence[K]) -> K:
    """Of those that rotate, the newest first: the one to use. Who is one rotation behind knows it."""
    return keys[min(USED, len(keys) - 1)]


class CardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one holder is given. All in base64. server: public key of the cluster's servers; servers: (public, secret) of
    those that a host or GCM serves with, the newest first; zookeeper: passwords of the cluster's ZooKeeper user, first the one
    that new nodes get; zookeeper_ca: PEM, of who signs ZooKeeper's certificates."""

    card: str
    secret: str
    server: str
    authorities: tuple[str, ...]
    servers: tuple[tuple[str, str], ...] = ()
    zookeeper: tuple[str, ...] = ()
    zookeeper_ca: str = ""


class Security:
    """Of one process. access: what the cluster's access list says now. mixed: the other ends need not have any yet."""

    def __init__(self, file: CardFile, clock: Callable[[], float] = time.time, *, mixed: bool = False) -> None:
        self._clock, self.mixed = clock, mixed
        self.signed = _bytes(file.card)
        self._authorities = tuple(map(_bytes, file.authorities))
        self._server_key = _bytes(file.server)
        self._server_keys = tuple(KeyPair(_bytes(public), _bytes(secret)) for public, secret in file.servers)
        self.zookeeper_passwords = file.zookeeper
        self.zookeeper_tls = tls(file.zookeeper_ca) if file.zookeeper_ca else None
        self.card = verify(self.signed, self._authorities, Card)
        self.card.check_time(clock())
        self._keys = KeyPair(self.card.key, _bytes(file.secret))
        self.access = AccessList()
        self._admitted: dict[bytes, bytes] = {}
        self._lock = threading.Lock()  # a store's follower has a loop of its own
        self._servers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def is_over(self) -> bool:
        """Its own card has expired: it stays connected where it is, and gets in nowhere else."""
        return self._clock() > self.card.expires

    @property
    def serves(self) -> bool:
        """Whether its holder has what servers need."""
        return bool(self._server_keys)

    def client(self, socket_type: bytes, bytes_max: int) -> CurveClient:
        """For a connection that we make."""
        properties = zmtp.properties(socket_type, {CARD_PROPERTY: self.signed})
        return CurveClient(self._keys, self._server_key, properties, bytes_max)

    def server(self, socket_type: bytes, bytes_max: int, let_in: Callable[[Card], None]) -> CurveServer:
        """For a connection that was made to us. let_in(card): its card is good; raises AccessDenied if that is not enough."""

        def admit(key: bytes, properties: Mapping[bytes, bytes]) -> None:
            try:
                card = self._card_of(key, properties.get(CARD_PROPERTY, b""))
                let_in(card)
            except AccessDenied as denied:
                turned_away(denied, key)
                raise

        told = self._server_keys, admit, zmtp.properties(socket_type), bytes_max
        return CurveOrNullServer(*told, socket_type) if self.mixed else CurveServer(*told)

    def _card_of(self, key: bytes, shown: bytes) -> Card:
        signed = shown or self._admitted.get(key, b"")
        if not signed:
            raise AccessDenied("no card was shown, and the access list has none for this key")
        card = verify_card(signed, key, self._authorities, self._clock())
        self.check_good(card)
        return card

    def presented(self, signed: bytes, secret: bytes) -> Card:
        """Of who holds this secret key, as every server of the cluster would let it in. Raises AccessDenied."""
        if len(secret) != KEY_BYTES:
            raise AccessDenied(f"a secret key of {len(secret)} bytes")
        return self._card_of(bindings.crypto_scalarmult_base(secret), signed)

    def check_good(self, card: Card) -> None:
        """That it is not over and not revoked by now. Raises AccessDenied."""
        card.check_time(self._clock())
        if card.id in self.access.revoked:
            raise CardRevoked(f"the card of {card.name} {REVOKED}")

    def draw_member_id(self) -> MemberId:
        """For a publisher or subscriber of this process."""
        while True:
            nonce = secrets.token_bytes(NONCE_BYTES)
            if (drawn := drawn_id(self.card.name, nonce)) >= ID_MIN:
                return MemberId(drawn, nonce)

    def seal_grant(self, queue: str, id: int, card: Card) -> bytes:
        """Proof that the holder of this card was given a producer's id."""
        return seal_grant(used(self._server_keys).secret, queue, id, card.name)

    def check_member(self, card: Card, queue: str, member: MemberId) -> None:
        """That a program with this card may publish or subscribe under this id. GCMs and hosts are trusted with each other's.
        Raises ProofRefused."""
        if card.role is CardRole.CLIENT and not is_proved(
            member, queue, card.name, (keys.secret for keys in self._server_keys)
        ):
            raise ProofRefused(f"{card.name} did not prove that the id {member.id:x} is its own")

    def watch(self, server: Any) -> None:
        """Its `cut(revoked)` is called when cards are revoked."""
        with self._lock:
            self._servers.add(server)

    def checked(self, signed: bytes) -> AccessList:
        """An access list. Raises AccessDenied: no authority has signed it."""
        return verify(signed, self._authorities, AccessList)

    def take(self, signed: bytes) -> bool:
        """An access list; True if it is newer than what is known. Raises AccessDenied: no authority has signed it."""
        access = self.checked(signed)
        if access.version <= self.access.version:
            return False
        admitted = dict[bytes, bytes]()
        for one in access.admitted:
            try:
                admitted[verify(one, self._authorities, Card).key] = one
            except AccessDenied as error:
                fields = {"version": access.version, "reason": str(error)}
                log.error("a card of the access list is invalid and admits nobody", extra={"fields": fields})
        self.access, self._admitted = access, admitted
        revoked = frozenset(access.revoked)
        with self._lock:
            servers = list(self._servers)
        for server in servers:
            server.cut(revoked)
        return True


def tls(ca: str) -> ssl.SSLContext:
    """For connections to servers with certificates of this CA alone (PEM), for the names that they are reached by. Raises
    InvalidConfiguration."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=ca)
    except ssl.SSLError as error:
        raise InvalidConfiguration(f"no certificate of a CA in PEM: {error.reason or error}") from None
    return context


def load_card(path: Path, *, mixed: bool = False) -> Security:
    """Raises InvalidConfiguration, AccessDenied."""
    try:
        mode = os.stat(path).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidConfiguration(
                f"the card {path} can be read by others: `chmod 600 {path}`, and have it revoked if it was"
            )
        return Security(msgspec.json.decode(path.read_bytes(), type=CardFile), mixed=mixed)
    except OSError as error:
        raise InvalidConfiguration(f"can't read the card {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise InvalidConfiguration(f"{path} is no card of RoQ: {error}") from None


def use_card(path: Path | None, *, mixed: bool = False) -> Security | None:
    """All connections and servers of this process are this card's from now on. None: ROQ_CARD's, if it is set. mixed: see
    Security. Raises InvalidConfiguration: another card is used already; and as load_card."""
    if path is None:
        return process_security()
    loaded, used = load_card(path, mixed=mixed), _process.security
    if used is not None and used.card.id != loaded.card.id:
        raise InvalidConfiguration(f"this process uses the card of {used.card.name} already: one process has one card")
    if used is None:
        _process.security = loaded
    return _process.security


def process_security() -> Security | None:
    """None: this process has no card, and its connections no security."""
    if _process.security is None and not _process.looked:
        if path := os.environ.get("ROQ_CARD"):
            _process.security = load_card(Path(path))
        _process.looked = True
    return _process.security


def known_card(cluster: str) -> Path:
    """Where the card for a cluster of this machine's is kept. cluster: ZooKeeper's "h:p,h:p/chroot"."""
    return configuration_home() / "cards" / f"{quote(cluster, safe='')}.card"


def enter_cluster(cluster: str) -> None:
    """A client of this cluster begins: if this process was given no card, it uses the one that is kept for the cluster, or
    none. Every one is followed by `leave_cluster`. Raises InvalidConfiguration: it uses another cluster's at the same time;
    and as load_card."""
    with _process.lock:
        given = process_security() is not None and not _process.found
        if not given and not _process.settled:
            security, used = _kept(cluster), _process.security
            if (security and security.card.id) != (used and used.card.id):
                if others := [other for other in _process.clusters if other != cluster]:
                    raise InvalidConfiguration(f"one process has one card: this one uses that of {others[0]}, close it first")
                _process.security, _process.found = security, security is not None
        _process.clusters[cluster] += 1


def leave_cluster(cluster: str) -> None:
    """It has ended."""
    with _process.lock:
        _process.clusters -= Counter([cluster])


def _kept(cluster: str) -> Security | None:
    try:
        path = known_card(cluster)
        if not path.exists():
            return None
    except OSError:  # a home that we may not look into
        return None
    return load_card(path)


def drop_card() -> None:
    """For who starts and stops secured clusters: what is connected from now on has no card again."""
    _process.security, _process.found = None, False


@dataclass
class _ProcessCard:
    security: Security | None = None
    looked: bool = False  # for ROQ_CARD
    found: bool = False  # it is one that was kept for its cluster
    clusters: Counter[str] = field(default_factory=Counter)  # clients that are open, of any thread
    lock: threading.Lock = field(default_factory=threading.Lock)
    settled: bool = False  # it has been given its card, or none: it looks for none


_process = _ProcessCard()


def use_daemon_card(path: Path | None, mode: SecurityMode, role: CardRole, name: str = "") -> Security | None:
    """As use_card, for what must be this role's; it is not looked for elsewhere. name: of the host. Raises
    InvalidConfiguration."""
    _process.looked = _process.settled = True
    if mode is SecurityMode.NONE:
        if path is not None:
            raise InvalidConfiguration('there is a card, and security = "none": leave out one of them')
        return None
    if path is None:
        raise InvalidConfiguration(
            "no card: name one by --card (`roq ca sign` makes it, docs/security.md says how), or say --security none "
            "where everybody on the network may read and change everything"
        )
    security = use_card(path, mixed=mode is SecurityMode.MIXED)
    assert security is not None
    card = security.card
    if card.role is not role or not security.serves or (name and card.name != name):
        what = f"host {name!r}" if name else f"a {role.upper()}"
        raise InvalidConfiguration(f"the card of {card.name} is that of a {card.role}: {what} needs its own (`roq ca sign`)")
    return security


def take_kept(security: Security, access: Path) -> None:
    """The access list in this file, if there is one."""
    if not access.exists():
        return
    try:
        security.take(access.read_bytes())
    except (OSError, AccessDenied) as error:
        fields = {"path": str(access), "reason": str(error)}
        log.error("the stored access list is invalid or unreadable: it is ignored", extra={"fields": fields})


def use_child_card(path: str, access: str, *, mixed: bool) -> None:
    """Of a host's process that was forked. access: file with the access list that its HCM knew. Raises as load_card."""
    _process.looked = _process.settled = True
    if path and (security := use_card(Path(path), mixed=mixed)) is not None:
        take_kept(security, Path(access))


def write_secret(path: Path, what: msgspec.Struct) -> None:
    """As JSON, for its owner alone."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    DISK.write_file(path, msgspec.json.format(msgspec.json.encode(what), indent=2) + b"\n", mode=0o600)


def text(data: bytes) -> str:
    """As card files have it."""
    return base64.b64encode(data).decode()


def _bytes(told: str) -> bytes:
    return base64.b64decode(told, validate=True)


def members_only(card: Card) -> None:
    """For endpoints between processes of the cluster. Raises AccessDenied."""
    if card.role is CardRole.CLIENT:
        raise AccessDenied(f"{card.name} is no host of this cluster")


def new_member_id() -> MemberId:
    """For a publisher or subscriber of this process."""
    security = process_security()
    return MemberId(new_id()) if security is None else security.draw_member_id()
