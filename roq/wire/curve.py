"""CurveZMQ (rfc.zeromq.org/spec/26) for the connections of zmtp.py: who the other end is, and everything sealed. Pure.

    client                                      server
    greeting, HELLO                          →                      a key for this connection, sealed for the server's key
                                             ←  greeting, WELCOME   the server's key for this connection, and a cookie
    INITIATE: its key, a vouch, properties   →                      whether it is let in: `admit` decides
                                             ←  READY, or ERROR with the reason
    MESSAGE: a number, and the box of flags and body, both ways

A Curve stands between a connection's bytes and a zmtp.Parser: `feed` returns what a peer without security would have sent,
greeting and READY first; `seal` makes of whole frames what leaves in their place. Numbers only grow, so nothing is taken twice.

While a cluster is being given cards its servers take both kinds of clients, each as it speaks (CurveOrNullServer).

Not covered: sockets; who is let in (roq/runtime/security.py).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from nacl import bindings
from nacl.exceptions import CryptoError

from roq.errors import AccessDenied, FrameError
from roq.wire import zmtp
from roq.wire.limits import PROPERTIES_BYTES_MAX

KEY_BYTES = 32
OVERHEAD_BYTES = 8 + 8 + 16 + 1  # of a sealed frame's body: the command's name, the number, the box's own, the flags
REASON_BYTES_MAX = 255
SHAKE_BYTES_MAX = PROPERTIES_BYTES_MAX + 1024  # of a frame of the handshake: nobody is known yet
_GREETING_SERVER, _GREETING_CLIENT = zmtp.greeting(b"CURVE", as_server=True), zmtp.greeting(b"CURVE")
_HELLO, _WELCOME, _INITIATE = b"\x05HELLO", b"\x07WELCOME", b"\x08INITIATE"
_READY, _ERROR, _MESSAGE = b"\x05READY", b"\x05ERROR", b"\x07MESSAGE"
_HELLO_BYTES, _WELCOME_BYTES, _COOKIE_BYTES, _VOUCH_BYTES = 200, 168, 96, 96
_INNER_MORE, _INNER_COMMAND = 1, 2  # flags inside of a box


class KeyPair(NamedTuple):
    """X25519 (Curve25519), 32 bytes each."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> KeyPair:
        """By the system's random numbers."""
        return cls(*bindings.crypto_box_keypair())


class Curve:
    """One connection. `to_send`: what has to leave now, in order. `ready`: frames may be sealed. `unfinished`: bytes of a
    frame that is not complete yet."""

    _without = "the other end shows no card"  # it has no security

    def __init__(self, greeting: bytes, bytes_max: int) -> None:
        self.to_send: list[bytes] = [greeting]
        self.ready = False
        self._frame_max = bytes_max + OVERHEAD_BYTES
        self._chunks: list[bytes] = []
        self._size, self._needed = 0, zmtp.GREETING_BYTES
        self._greeted = False
        self._key = b""  # of the messages' boxes
        self._sent = self._taken = 0  # numbers of boxes
        self._seal_prefix = self._open_prefix = b""

    @property
    def unfinished(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return self._size

    def feed(self, data: bytes) -> bytes:
        """Raises FrameError (the connection is of no use), AccessDenied."""
        if self._chunks and len(self._chunks[-1]) < zmtp.CHUNK_BYTES_MIN:
            self._chunks[-1] += data
        else:
            self._chunks.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return b""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        at, end, out = 0, self._size, list[bytes]()
        if not self._greeted:
            self._greet(data)
            at = zmtp.GREETING_BYTES
        while True:
            if end - at < 2:
                self._needed = 2
                break
            flags, size, begin = data[at], data[at + 1], at + 2
            if flags & zmtp.LONG:
                if end - at < 9:
                    self._needed = 9
                    break
                size, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            if size > (self._frame_max if self.ready else SHAKE_BYTES_MAX) or flags & ~(zmtp.LONG | zmtp.COMMAND):
                raise FrameError(f"a sealed frame of {size} bytes with flags {flags}")
            if begin + size > end:
                self._needed = begin + size - at
                break
            at = begin + size
            out.append(self._open(data[begin:at]) if self.ready else self._shaken(data[begin:at]))
        self._size = end - at
        self._chunks = [data[at:]] if self._size else []
        return out[0] if len(out) == 1 else b"".join(out)

    def _greet(self, data: bytes) -> None:
        mechanism = zmtp.mechanism(data)
        if mechanism != b"CURVE":
            if mechanism == b"NULL":
                raise zmtp.OtherMechanism(self._without)
            raise AccessDenied(f"the other end speaks {mechanism.decode(errors='replace') or 'nothing'}, not CURVE")
        self._greeted = True

    def _shaken(self, body: bytes) -> bytes:
        try:
            return self._shake(body)
        except CryptoError:  # a box for somebody else, or a key that is none
            raise FrameError("a handshake that was not sealed for us") from None

    def _shake(self, body: bytes) -> bytes:
        raise NotImplementedError

    def _begin(self, key: bytes, seal_prefix: bytes, open_prefix: bytes) -> bytes:
        """Messages from now on; what a peer without security would have begun with (its properties were read here)."""
        self._key, self._seal_prefix, self._open_prefix, self.ready = key, seal_prefix, open_prefix, True
        return zmtp.greeting(b"NULL") + zmtp.frame(_READY, zmtp.COMMAND)

    def _open(self, body: bytes) -> bytes:
        if not body.startswith(_MESSAGE) or len(body) < OVERHEAD_BYTES:
            raise FrameError("a frame that is not sealed")
        flags, content = self._content(body)
        return zmtp.frame(content, flags & _INNER_MORE | (zmtp.COMMAND if flags & _INNER_COMMAND else 0))

    def _content(self, body: bytes) -> tuple[int, bytes]:
        number = int.from_bytes(body[8:16], "big")
        if number <= self._taken:
            raise FrameError("a sealed frame that was taken before")
        self._taken = number
        try:
            plain = bindings.crypto_box_open_easy_afternm(body[16:], self._open_prefix + body[8:16], self._key)
        except CryptoError:
            raise FrameError("a box that was not sealed for us") from None
        if plain[0] & ~(_INNER_MORE | _INNER_COMMAND):
            raise FrameError(f"a sealed frame with flags {plain[0]}")
        return plain[0], plain[1:]

    def seal(self, frames: bytes) -> bytes:
        """Whole frames, sealed."""
        key, prefix, number, out = self._key, self._seal_prefix, self._sent, list[bytes]()
        box = bindings.crypto_box_easy_afternm
        for at, begin, stop in zmtp.frames_in(frames):
            number += 1
            tail, flags = number.to_bytes(8, "big"), frames[at]
            inner = flags & zmtp.MORE | (_INNER_COMMAND if flags & zmtp.COMMAND else 0)
            out.append(zmtp.frame(_MESSAGE + tail + box(b"%c%b" % (inner, frames[begin:stop]), prefix + tail, key)))
        self._sent = number
        return out[0] if len(out) == 1 else b"".join(out)

    def _number(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(8, "big")


class CurveClient(Curve):
    """keys: who we are. server_key: whom we want to talk to. properties: what we say of us, from zmtp.properties."""

    _without = (
        "this cluster has no security and takes nobody with a card: leave it out (`roq --card`, roq.connect(card=), ROQ_CARD, "
        "~/.config/roq/cards)"
    )

    def __init__(self, keys: KeyPair, server_key: bytes, properties: bytes, bytes_max: int) -> None:
        super().__init__(_GREETING_CLIENT, bytes_max)
        self._keys, self._server_key, self._properties = keys, server_key, properties
        self._short = KeyPair.new()
        number = self._number()
        signature = bindings.crypto_box_easy(bytes(64), b"CurveZMQHELLO---" + number, server_key, self._short.secret)
        hello = _HELLO + b"\x01\x00" + bytes(72) + self._short.public + number + signature
        self.to_send.append(zmtp.frame(hello, zmtp.COMMAND))
        self._welcomed = False

    def _shake(self, body: bytes) -> bytes:
        if body.startswith(_ERROR):
            raise AccessDenied(body[7 : 7 + body[6]].decode(errors="replace") if len(body) > 7 else None)
        if not self._welcomed and body.startswith(_WELCOME) and len(body) == _WELCOME_BYTES:
            self._initiate(body)
            return b""
        if self._welcomed and body.startswith(_READY) and len(body) >= 30:
            self._taken = int.from_bytes(body[6:14], "big")
            bindings.crypto_box_open_easy_afternm(body[14:], b"CurveZMQREADY---" + body[6:14], self._key)
            return self._begin(self._key, b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES")
        raise FrameError("not what CURVE's handshake says next")

    def _initiate(self, body: bytes) -> None:
        try:
            welcome = bindings.crypto_box_open_easy(body[24:], b"WELCOME-" + body[8:24], self._server_key, self._short.secret)
        except CryptoError:
            raise AccessDenied("the other end is not the cluster that the card is for") from None
        server, cookie = welcome[:KEY_BYTES], welcome[KEY_BYTES:]
        self._key = bindings.crypto_box_beforenm(server, self._short.secret)
        vouch = os.urandom(16)
        told = self._short.public + self._server_key
        vouch += bindings.crypto_box_easy(told, b"VOUCH---" + vouch, server, self._keys.secret)
        number = self._number()
        content = self._keys.public + vouch + self._properties
        box = bindings.crypto_box_easy_afternm(content, b"CurveZMQINITIATE" + number, self._key)
        self.to_send.append(zmtp.frame(_INITIATE + cookie + number + box, zmtp.COMMAND))
        self._welcomed = True


class CurveServer(Curve):
    """keys: the server's; a client may have any of them. admit(key, properties): raises AccessDenied."""

    def __init__(
        self,
        keys: Sequence[KeyPair],
        admit: Callable[[bytes, Mapping[bytes, bytes]], None],
        properties: bytes,
        bytes_max: int,
    ) -> None:
        super().__init__(_GREETING_SERVER, bytes_max)
        self._keys, self._admit, self._properties = keys, admit, properties
        self._long = self._short = KeyPair(b"", b"")
        self._client, self._cookie = b"", b""

    def _shake(self, body: bytes) -> bytes:
        if not self._cookie and body.startswith(_HELLO) and len(body) == _HELLO_BYTES:
            self._welcome(body)
            return b""
        if self._cookie and body.startswith(_INITIATE) and len(body) >= 9 + _COOKIE_BYTES + 8 + 16 + KEY_BYTES + _VOUCH_BYTES:
            return self._let_in(body)
        raise FrameError("not what CURVE's handshake says next")

    def _welcome(self, body: bytes) -> None:
        self._client = body[80:112]
        for keys in self._keys:
            try:
                signed = bindings.crypto_box_open_easy(
                    body[120:], b"CurveZMQHELLO---" + body[112:120], self._client, keys.secret
                )
            except CryptoError:
                continue
            if signed == bytes(64):
                self._long = keys
                break
        else:
            raise self._denied(AccessDenied("the card is for another cluster, or for a key that this one has no more"))
        self._taken = int.from_bytes(body[112:120], "big")
        self._short = KeyPair.new()
        self._cookie = os.urandom(_COOKIE_BYTES)
        nonce = os.urandom(16)
        box = bindings.crypto_box_easy(self._short.public + self._cookie, b"WELCOME-" + nonce, self._client, self._long.secret)
        self.to_send.append(zmtp.frame(_WELCOME + nonce + box, zmtp.COMMAND))

    def _let_in(self, body: bytes) -> bytes:
        at = 9 + _COOKIE_BYTES
        number = int.from_bytes(body[at : at + 8], "big")
        if not hmac.compare_digest(body[9:at], self._cookie) or number <= self._taken:
            raise FrameError("an INITIATE of another handshake")
        self._taken = number
        key = bindings.crypto_box_beforenm(self._client, self._short.secret)
        nonce = b"CurveZMQINITIATE" + body[at : at + 8]
        content = bindings.crypto_box_open_easy_afternm(body[at + 8 :], nonce, key)
        client, properties = content[:KEY_BYTES], content[KEY_BYTES + _VOUCH_BYTES :]
        vouch = content[KEY_BYTES : KEY_BYTES + _VOUCH_BYTES]
        told = bindings.crypto_box_open_easy(vouch[16:], b"VOUCH---" + vouch[:16], client, self._short.secret)
        if not hmac.compare_digest(told, self._client + self._long.public):
            raise FrameError("a vouch for another connection")
        try:
            self._admit(client, zmtp.parse_properties(properties))
        except AccessDenied as denied:
            raise self._denied(denied) from None
        tail = self._number()
        box = bindings.crypto_box_easy_afternm(self._properties, b"CurveZMQREADY---" + tail, key)
        self.to_send.append(zmtp.frame(_READY + tail + box, zmtp.COMMAND))
        return self._begin(key, b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC")

    def _denied(self, denied: AccessDenied) -> AccessDenied:
        """The client hears it too."""
        reason = str(denied).encode()[:REASON_BYTES_MAX]
        self.to_send.append(zmtp.frame(b"%b%c%b" % (_ERROR, len(reason), reason), zmtp.COMMAND))
        return denied


class CurveOrNullServer(CurveServer):
    """Takes clients without security too, and then does nothing. It says which mechanism it has when the client has: until
    then it sends only what all greetings begin with. socket_type: as in zmtp.hello."""

    def __init__(
        self,
        keys: Sequence[KeyPair],
        admit: Callable[[bytes, Mapping[bytes, bytes]], None],
        properties: bytes,
        bytes_max: int,
        socket_type: bytes,
    ) -> None:
        super().__init__(keys, admit, properties, bytes_max)
        self._hello = zmtp.hello(socket_type)
        self.to_send = [_GREETING_SERVER[: zmtp.VERSION_BYTES]]
        self._null = False

    def feed(self, data: bytes) -> bytes:
        """See Curve."""
        if self._null:
            return data
        if not self._greeted:
            data = b"".join((*self._chunks, data))
            self._chunks, self._size = [data], len(data)
            if len(data) < zmtp.GREETING_BYTES:
                return b""
            self._chunks, self._size = [], 0
            self._null = zmtp.mechanism(data) == b"NULL"
            self.to_send.append((self._hello if self._null else _GREETING_SERVER)[zmtp.VERSION_BYTES :])
            if self._null:
                self.ready = True
                return data
        return super().feed(data)

    def seal(self, frames: bytes) -> bytes:
        """See Curve."""
        return frames if self._null else super().seal(frames)
