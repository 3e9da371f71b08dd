"""CURVE as bytes: however they are cut the same comes out; who alters, repeats or invents a byte is refused.

Not covered: sockets and libzmq (tests/integration/test_curve_links.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from roq.errors import AccessDenied, FrameError
from roq.wire import zmtp
from roq.wire.curve import OVERHEAD_BYTES, SHAKE_BYTES_MAX, Curve, CurveClient, CurveOrNullServer, CurveServer, KeyPair

BYTES_MAX = 20_000
SERVER, CLIENT = KeyPair.new(), KeyPair.new()
PROPERTIES = zmtp.properties(b"DEALER", {b"X-Card": b"card"})
bodies = st.lists(
    st.tuples(st.one_of(st.binary(max_size=300), st.sampled_from([b"", b"y" * 300, b"z" * BYTES_MAX])), st.booleans()),
    max_size=6,
)


class Pair:
    """Both ends, with what each has told the other."""

    def __init__(
        self, server_key: bytes = SERVER.public, keys: tuple[KeyPair, ...] = (SERVER,), denied: str = "", *, mixed: bool = False
    ) -> None:
        self.seen = list[tuple[bytes, Mapping[bytes, bytes]]]()
        self.denied = denied
        told = keys, self._admit, zmtp.properties(b"ROUTER"), BYTES_MAX
        self.server = CurveOrNullServer(*told, b"ROUTER") if mixed else CurveServer(*told)
        self.client = CurveClient(CLIENT, server_key, PROPERTIES, BYTES_MAX)
        self.at_server, self.at_client = zmtp.Parser(BYTES_MAX), zmtp.Parser(BYTES_MAX)

    def _admit(self, key: bytes, properties: Mapping[bytes, bytes]) -> None:
        self.seen.append((key, properties))
        if self.denied:
            raise AccessDenied(self.denied)

    def shake(self, step: int = 1 << 20) -> Pair:
        for _ in range(3):
            move(self.client, self.server, self.at_server, step)
            move(self.server, self.client, self.at_client, step)
        return self


def taken(curve: Curve) -> bytes:
    data = b"".join(curve.to_send)
    curve.to_send.clear()
    return data


def move(source: Curve, target: Curve, parser: zmtp.Parser, step: int) -> None:
    data = taken(source)
    for at in range(0, len(data), step):
        parser.feed(target.feed(data[at : at + step]))


@pytest.mark.parametrize("step", [1, 7, 64, 65, 1 << 20])
@pytest.mark.parametrize("mixed", [False, True])
def test_both_are_ready_and_the_server_knows_who_it_is(step: int, mixed: bool) -> None:
    pair = Pair(mixed=mixed).shake(step)
    assert all(end.ready for end in (pair.server, pair.client, pair.at_server, pair.at_client))
    assert pair.seen == [(CLIENT.public, {b"socket-type": b"DEALER", b"identity": b"", b"x-card": b"card"})]


@settings(max_examples=100)
@given(bodies, st.integers(1, 5000), st.booleans())
def test_frames_come_out_as_they_went_in(sent: list[tuple[bytes, bool]], step: int, from_client: bool) -> None:
    pair = Pair().shake()
    source, target = (pair.client, pair.server) if from_client else (pair.server, pair.client)
    plain = b"".join(zmtp.frame(body, zmtp.COMMAND if command else 0) for body, command in sent)
    sealed, came = source.seal(plain), b""
    assert all(body not in sealed for body, _ in sent if len(body) > 8)
    for at in range(0, len(sealed), step):
        came += target.feed(sealed[at : at + step])
    assert came == plain
    assert target.unfinished == 0


@pytest.mark.parametrize("step", [1, 7, 63, 64, 65, 1 << 20])
def test_a_server_that_takes_both_does_nothing_for_a_client_without_security(step: int) -> None:
    server, parser = Pair(mixed=True).server, zmtp.Parser(BYTES_MAX)
    told = taken(server)
    assert len(told) < zmtp.GREETING_BYTES, "it waits for what the client says"
    sent = zmtp.hello(b"DEALER") + zmtp.frame(b"a", zmtp.MORE) + zmtp.frame(b"b")
    came = [one for at in range(0, len(sent), step) for one in parser.feed(server.feed(sent[at : at + step]))]
    assert (came, server.ready, parser.ready) == ([[b"a", b"b"]], True, True)
    assert told + taken(server) == zmtp.hello(b"ROUTER")
    assert server.seal(b"whatever") == b"whatever"
    assert server.unfinished == 0


def test_parts_of_a_message_stay_parts() -> None:
    pair = Pair().shake()
    plain = zmtp.frame(b"a", zmtp.MORE) + zmtp.frame(b"b")
    assert pair.server.feed(pair.client.seal(plain)) == plain


def test_a_client_of_a_key_that_was_before_is_still_served() -> None:
    pair = Pair(keys=(KeyPair.new(), SERVER)).shake()
    assert all(end.ready for end in (pair.server, pair.client))


def test_a_client_that_wants_another_server_is_refused() -> None:
    pair = Pair(server_key=KeyPair.new().public)
    with pytest.raises(AccessDenied, match="another cluster"):
        pair.shake()
    with pytest.raises(AccessDenied, match="another cluster"):
        move(pair.server, pair.client, pair.at_client, 1 << 20)


def test_who_is_not_let_in_hears_why() -> None:
    pair = Pair(denied="alice needs the right `publish` to 'q'")
    with pytest.raises(AccessDenied, match="alice"):
        pair.shake()
    assert not pair.server.ready
    with pytest.raises(AccessDenied, match="alice needs the right `publish`"):
        move(pair.server, pair.client, pair.at_client, 1 << 20)


def test_an_end_without_security_is_refused() -> None:
    for curve in (Pair().client, Pair().server):
        with pytest.raises(zmtp.OtherMechanism, match=r"has no security|shows no card"):
            curve.feed(zmtp.hello(b"DEALER"))


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32])
def test_keys_that_are_none_are_refused(key: bytes) -> None:
    pair = Pair()
    hello = taken(pair.client)
    with pytest.raises((FrameError, AccessDenied)):
        pair.server.feed(hello[: 64 + 2 + 80] + key + hello[64 + 2 + 112 :])
    client = CurveClient(CLIENT, key, PROPERTIES, BYTES_MAX) if key == b"\xff" * 32 else Pair().client
    welcome = zmtp.frame(b"\x07WELCOME" + bytes(160), zmtp.COMMAND)
    with pytest.raises((FrameError, AccessDenied)):
        client.feed(zmtp.greeting(b"CURVE", as_server=True) + welcome)


def test_what_was_taken_is_not_taken_again() -> None:
    pair = Pair().shake()
    first, second = pair.client.seal(zmtp.frame(b"pay")), pair.client.seal(zmtp.frame(b"once"))
    assert pair.server.feed(first + second) == zmtp.frame(b"pay") + zmtp.frame(b"once")
    with pytest.raises(FrameError, match="before"):
        pair.server.feed(first)


def test_what_the_other_way_said_is_not_taken_back() -> None:
    pair = Pair().shake()
    with pytest.raises(FrameError, match="sealed for us"):
        pair.client.feed(pair.client.seal(zmtp.frame(b"reflected") * 3))


def test_every_altered_bit_of_a_message_is_noticed() -> None:
    sealed = Pair().shake().client.seal(zmtp.frame(b"pay 10"))
    for at in range(2, len(sealed)):
        pair = Pair().shake()
        altered = bytearray(pair.client.seal(zmtp.frame(b"pay 10")))
        altered[at] ^= 1
        with pytest.raises(FrameError):
            pair.server.feed(bytes(altered))


@pytest.mark.parametrize("at", range(0, 460, 7))
def test_an_altered_handshake_never_makes_a_connection(at: int) -> None:
    pair = Pair()
    altered, sent = False, 0
    for _ in range(3):
        for source, target in ((pair.client, pair.server), (pair.server, pair.client)):
            data = bytearray(taken(source))
            if source is pair.client:
                if not altered and at < sent + len(data) and at >= 64:
                    data[at - sent] ^= 1
                    altered = True
                sent += len(data)
            try:
                target.feed(bytes(data))
            except (FrameError, AccessDenied):
                return
    if altered and not pair.server.ready:
        return  # it waits for more, and is dropped in time
    assert not altered or 64 + 2 + 8 <= at < 64 + 2 + 80, "only the padding of HELLO is not checked"


def test_frames_before_the_handshake_and_plain_frames_after_it_are_refused() -> None:
    pair = Pair()
    with pytest.raises(FrameError):
        pair.server.feed(zmtp.greeting(b"CURVE") + zmtp.frame(b"hi"))
    pair = Pair().shake()
    with pytest.raises(FrameError, match="not sealed"):
        pair.server.feed(zmtp.frame(b"a plain frame that is long enough to be one that is sealed"))


def test_a_frame_above_the_bound_is_refused_at_its_header() -> None:
    pair = Pair().shake()
    with pytest.raises(FrameError):
        pair.server.feed(b"\x02" + (BYTES_MAX + OVERHEAD_BYTES + 1).to_bytes(8, "big"))


def test_before_the_handshake_is_over_only_small_frames_come() -> None:
    pair = Pair()
    with pytest.raises(FrameError):
        pair.server.feed(zmtp.greeting(b"CURVE") + b"\x06" + (SHAKE_BYTES_MAX + 1).to_bytes(8, "big"))


@given(st.binary(max_size=400))
def test_any_bytes_raise_or_wait(junk: bytes) -> None:
    for curve in (Pair().client, Pair().server, Pair().shake().client, Pair().shake().server):
        try:
            curve.feed(junk)
        except (FrameError, AccessDenied):
            continue


@given(st.binary(max_size=400))
def test_any_bytes_behind_a_greeting_make_no_connection(junk: bytes) -> None:
    for curve in (Pair().client, Pair().server):
        try:
            curve.feed(zmtp.greeting(b"CURVE") + junk)
        except (FrameError, AccessDenied):
            continue
        assert not curve.ready


@given(st.binary(max_size=100))
def test_any_properties_are_read_or_refused(data: bytes) -> None:
    try:
        found = zmtp.parse_properties(data)
    except FrameError:
        return
    assert sum(5 + len(name) + len(value) for name, value in found.items()) <= len(data)
