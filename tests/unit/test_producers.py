"""Producers: what the GCM keeps, what is found on tapes, whom Monitor and Exchange refuse, in which order paths open.

Not covered: ZooKeeper (tests/integration/test_gcm_producers.py), a queue with messages (tests/integration/test_producers.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any, TypeVar, cast

import msgspec
import pytest

from gcm.producers import ProducerRecord, grant, keep_in, open_record
from roq.cli.output import console
from roq.cli.recorded_names import ProducerRow, producer_row, producer_table
from roq.coordination.locate import GcmClient
from roq.errors import (
    CallError,
    DeadlineExceeded,
    FrameError,
    IncompatibleVersion,
    MessagesLost,
    NotReady,
    ProducerFenced,
    RoqError,
    Unavailable,
)
from roq.pubsub import producer
from roq.pubsub.monitor.fences import FENCES_KEPT, Fences
from roq.pubsub.monitor.membership import EXCHANGE_SILENT_SECONDS, Membership
from roq.pubsub.monitor.records import Notify
from roq.pubsub.named_publisher import NamedPublisher
from roq.pubsub.path import PathMachine, SendOpen
from roq.pubsub.producer import Producer
from roq.pubsub.producer_sender import ProducerSender
from roq.pubsub.producer_tail import StoredNumbers
from roq.runtime.rpc import RpcServer
from roq.tools.simulation.loop import SimulatedLoop
from roq.tools.simulation.recordings import Reading, RecordedPublisher, RecordingBooks, judge_recording
from roq.wire import monitor as wire
from roq.wire import producers
from roq.wire.assignment import MonitorAddress, Overflow, QueueRecord, QueueSettings
from roq.wire.frame import FrameKind, encode_bundle, encode_control, encode_data
from roq.wire.gcm import Done, QueueInfo
from roq.wire.member_id import MemberId
from roq.wire.policy import Policy
from roq.wire.producers import LEASE_SECONDS, LIFE_BITS, LIVES_MAX, KeepProducer, OpenProducer
from roq.wire.recording import Record, encode_entry
from roq.wire.zmtp import frame

T = TypeVar("T", bound=msgspec.Struct)
P = 0x1122334455667788
OPEN = OpenProducer("q", "p", "one", "host-1 (pid 1)")
NEXT = OpenProducer("q", "p", "two", "host-2 (pid 2)")


def keep(
    turn: int, number: int, holder: str = "one", *, fresh: bool = True, path: int = 1, closed: bool = False
) -> KeepProducer:
    return KeepProducer("q", "p", holder, turn, number, fresh, path, "A", closed)


# --- at the GCM -------------------------------------------------------------------------------------------------------


def test_a_new_name_has_nothing_behind_it() -> None:
    record = open_record(None, OPEN, P, 7.0)
    assert open_record(record, OPEN, P + 1, 8.0) is record, "the same request again"
    assert grant(record) == producers.ProducerGrant(P, 0, 0, "", True, 7.0, 7.0 + LEASE_SECONDS)


def test_who_holds_it_is_granted_it_again_and_nobody_else_gets_it_so() -> None:
    asks = msgspec.structs.replace(OPEN, holds=True)
    record = keep_in(open_record(None, OPEN, P, 7.0), keep(1, 5), 8.0)
    assert open_record(record, asks, P + 1, 9.0) is record
    with pytest.raises(ProducerFenced, match="was opened since by host-2"):
        open_record(open_record(record, NEXT, P, 10.0), asks, P, 11.0)
    with pytest.raises(ProducerFenced, match="was forgotten"):
        open_record(None, asks, P, 11.0)


def test_who_closed_it_left_nothing_to_be_looked_for() -> None:
    closed = keep_in(keep_in(open_record(None, OPEN, P, 7.0), keep(1, 0), 8.0), keep(2, 10, path=3, closed=True), 9.0)
    given = grant(open_record(closed, NEXT, P + 1, 20.0))
    assert (given.publisher, given.path, given.number, given.exchange, given.settled) == (P, 3, 10, "A", True)


def test_the_next_life_looks_from_where_the_one_before_has_kept_last() -> None:
    """What is behind a number was sent after the turn before that one was answered."""
    record = open_record(None, OPEN, P, 7.0)
    record = keep_in(record, keep(1, 0), 8.0)
    assert (record.since, record.kept) == (7.0, 8.0)
    record = keep_in(record, keep(2, 10), 9.0)
    assert (record.since, record.number) == (8.0, 10)
    record = keep_in(record, keep(3, 12, fresh=False), 15.0)
    assert (record.since, record.number, record.kept) == (8.0, 12, 15.0), "some of what follows may be older"
    assert keep_in(record, keep(3, 12), 99.0) is record, "the same request again, or one that was overtaken"
    given = grant(open_record(record, NEXT, P, 100.0))
    assert (given.settled, given.since, given.until) == (False, 8.0, 15.0 + LEASE_SECONDS)
    again = open_record(open_record(record, NEXT, P, 100.0), OPEN, P, 200.0)
    assert (grant(again).since, grant(again).until) == (8.0, 15.0 + LEASE_SECONDS)


def test_each_life_has_paths_above_those_of_the_one_before() -> None:
    record = keep_in(open_record(None, OPEN, P, 1.0), keep(1, 0, path=2), 2.0)
    second = open_record(record, NEXT, P, 3.0)
    assert second.path == 1 << LIFE_BITS
    moved = keep_in(second, keep(1, 0, "two", path=second.path + (1 << LIFE_BITS) + 7), 4.0)
    assert open_record(moved, OPEN, P, 5.0).path == 3 << LIFE_BITS
    worn = keep_in(second, keep(1, 0, "two", path=(LIVES_MAX << LIFE_BITS) - 1), 4.0)
    with pytest.raises(CallError, match="`roq queue forget-producer` lets it begin anew"):
        open_record(worn, OPEN, P, 5.0)
    assert worn.path < 1 << 32


def test_an_opening_that_failed_leaves_what_was() -> None:
    """It has kept nothing, so it has sent nothing."""
    record = keep_in(open_record(None, OPEN, P, 1.0), keep(1, 0), 2.0)
    crashed = grant(open_record(record, NEXT, P, 3.0))
    again = open_record(record, NEXT, P, 3.0)
    for turn in range(3):
        again = open_record(again, OpenProducer("q", "p", f"holder {turn}"), P, 4.0 + turn)
        assert grant(again) == crashed
    kept = keep_in(again, keep(1, 0, "holder 2", path=again.path + 1), 9.0)
    assert open_record(kept, NEXT, P, 10.0).path == again.path + (1 << LIFE_BITS), "it may have"
    closed = keep_in(record, keep(2, 10, path=3, closed=True), 5.0)
    settled = open_record(open_record(closed, NEXT, P, 6.0), OPEN, P, 7.0)
    assert grant(settled) == grant(open_record(closed, NEXT, P, 6.0))
    assert (settled.settled, settled.path) == (True, 3)


def test_who_is_not_the_holder_is_fenced() -> None:
    record = open_record(open_record(None, OPEN, P, 1.0), NEXT, P, 2.0)
    with pytest.raises(ProducerFenced, match=r"'p' of queue 'q' was opened since by host-2 \(pid 2\)"):
        keep_in(record, keep(1, 1), 3.0)
    with pytest.raises(ProducerFenced, match="was forgotten: open it again"):
        keep_in(None, keep(1, 1), 3.0)
    assert isinstance(keep_in(record, keep(1, 1, "two"), 3.0), ProducerRecord)


# --- on the tapes -----------------------------------------------------------------------------------------------------


def data(first: int, count: int = 1, topic: bytes = b"t", publisher: int = P, index: int = 0) -> bytes:
    return encode_data(topic, publisher, 1, first, 0, index, [b"x"] * count, 0)


def entry(*found: bytes) -> bytes:
    return encode_entry(1, [frame(one) for one in found])


def test_what_is_stored_without_a_gap_counts() -> None:
    stored = StoredNumbers(P)
    stored.take(entry(data(3, 2), data(9, publisher=P + 1), encode_control(FrameKind.FIN, P, 1, 4, None, 0)))
    stored.take(entry(data(5, index=4)))
    stored.take(entry(encode_bundle(P, 1, 5, [data(1, 2), data(6, topic=b"u")], 0)))
    stored.take(entry(b"t\0 no header", b"\xff" + P.to_bytes(8, "little")))  # Exchanges record what they can't read
    assert stored.behind(0) == (6, {"t": (5, 5), "u": (6, 1)})
    stored.take(entry(data(8, topic=b"v")))
    assert stored.behind(0) == (6, {"t": (5, 5), "u": (6, 1)}), "7 is missing"
    assert stored.behind(7).number == 8
    assert stored.behind(20).number == 20


def test_entries_of_others_are_not_decoded() -> None:
    stored = StoredNumbers(P)
    stored.take(b"\x09 of a version nobody knows")
    assert stored.behind(3) == (3, {})


# --- Monitor and Exchange ---------------------------------------------------------------------------------------------


def exchange(id: str, incarnation: int = 0) -> wire.ExchangeReport:
    address = wire.ExchangeAddress(id, "127.0.0.1", 1, 2, incarnation)
    return wire.ExchangeReport(address, "host", 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0, wire.SERVER_PROTOCOL)


def from_older(message: T) -> T:
    """As a version sends it that does not know the last field."""
    return msgspec.convert(msgspec.to_builtins(message)[:-1], type(message))


def monitor(*ids: str) -> Membership:
    use = wire.PublisherWelcome(1, 0, wire.ExchangeAddress("", "", 0, 0), Overflow.BLOCK, 1 << 20)
    made = Membership(1, use)
    for id in ids:
        made.exchange_report(exchange(id), 0.0, id.encode())
        made.exchange_heard(f"{id}/0", 0.0)
    return made


def test_a_producer_is_let_in_when_every_exchange_has_fenced_the_one_before() -> None:
    queue = monitor("a", "b")
    first = queue.join_publisher(wire.JoinPublisher(P), b"old", 0.0)
    second = wire.JoinPublisher(P, above=1 << LIFE_BITS, prefer="b")
    told = queue.fence(second, b"new", 1.0)
    fence = wire.FencePublisher(P, 1 << LIFE_BITS)
    assert told == [Notify(b"old", wire.ProducerReplaced(1)), Notify(b"a", fence), Notify(b"b", fence)]
    with pytest.raises(NotReady, match="a, b"):
        queue.join_publisher(second, b"new", 1.0)
    queue.fences.done(P, 1 << LIFE_BITS, "a/0")
    queue.fences.done(P, 7, "b/0")  # of a life before
    assert queue.fence(second, b"new", 1.2) == [Notify(b"old", wire.ProducerReplaced(1)), Notify(b"b", fence)]
    queue.fences.done(P, 1 << LIFE_BITS, "b/0")
    welcome = queue.join_publisher(second, b"new", 1.3)
    assert (welcome.path, welcome.exchange.id) == ((1 << LIFE_BITS) + 1, first.exchange.id), "behind what it left there"
    late = wire.PublisherReport(P, first.path, first.exchange.id, "", 0, 0, 0, 0, 0.0)
    assert queue.publisher_report(late, b"old", 1.4) == [Notify(b"old", wire.ProducerReplaced(1))]
    assert queue.fence(wire.JoinPublisher(P, 1, "a", "a/0"), b"old", 1.5) == [Notify(b"old", wire.ProducerReplaced(1))]
    with pytest.raises(ProducerFenced):
        queue.join_publisher(wire.JoinPublisher(P, 1, "a", "a/0"), b"old", 1.5)
    assert queue.publishers[P].peer == b"new"
    queue.check()


def test_who_opens_it_behind_one_that_has_begun_nothing_gets_its_path() -> None:
    """The path that subscribers look for next, behind the last one of a life that was closed."""
    queue = monitor("a")
    joins = wire.JoinPublisher(P, above=3, prefer="a")
    queue.fence(joins, b"failed", 1.0)
    queue.fences.done(P, 3, "a/0")
    for peer in b"failed", b"next":
        queue.fence(joins, peer, 2.0)
        assert queue.join_publisher(joins, peer, 2.0).path == 4
    assert queue.publishers[P].peer == b"next"


def test_an_exchange_that_is_silent_is_not_waited_for() -> None:
    queue = monitor("a", "b")
    late = EXCHANGE_SILENT_SECONDS + 1
    queue.exchange_report(exchange("a"), late, b"a")
    joins = wire.JoinPublisher(P, above=9)
    assert [one.peer for one in queue.fence(joins, b"new", late) if isinstance(one, Notify)] == [b"a"]
    queue.fences.done(P, 9, "a/0")
    assert queue.join_publisher(joins, b"new", late).path == 10


def test_an_exchange_of_an_older_version_is_named() -> None:
    """It would never answer."""
    queue = monitor("a", "b")
    queue.exchange_report(from_older(exchange("c")), 0.0, b"c")
    joins = wire.JoinPublisher(P, above=9)
    queue.fence(joins, b"new", 1.0)
    with pytest.raises(IncompatibleVersion, match=r"upgrade their hosts: c on host$"):
        queue.join_publisher(joins, b"new", 1.0)
    queue.exchange_report(exchange("c", 1), 2.0, b"c")  # its host was upgraded
    queue.fence(joins, b"new", 2.0)
    with pytest.raises(NotReady, match="a, b, c"):
        queue.join_publisher(joins, b"new", 2.0)


def test_the_oldest_fences_are_forgotten() -> None:
    fences = Fences()
    for publisher in range(FENCES_KEPT + 1):
        fences.add(publisher, 5)
    assert not fences.refuses(0, 4)
    assert fences.refuses(1, 4)
    assert not fences.refuses(1, 5)
    fences.add(1, 3)
    assert fences.refuses(1, 4), "a fence is never lowered"


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_closed_life_and_the_next_one_are_paths_of_one_publisher() -> None:
    paths = PathMachine(path=4, left="a")
    there = wire.ExchangeAddress("b", "", 0, 0)
    assert paths.assign(there, 4) == [], "that was the life before"
    paths.assign(there, 5)
    assert paths.attached(5) == [SendOpen(5, "a", True)]


class Gcm:
    """Answers, unless it is away or has another holder. kept: what it was told."""

    def __init__(self) -> None:
        self.away = self.taken = False
        self.kept: list[KeepProducer] = []

    async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> Any:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("no GCM leads")
        if isinstance(request, KeepProducer):
            if self.taken:
                raise ProducerFenced("opened since by somebody else")
            self.kept.append(request)
            return Done()
        return grant(open_record(None, OPEN, P, 7.0))


class OlderMonitor:
    """Knows no producers: the path that it gives is the first one. As a GCM it names itself; is_new: it is upgraded."""

    def __init__(self) -> None:
        self.server = RpcServer("127.0.0.1", 0, wire.Request, self._handle, wire.NoticeToMonitor, lambda peer, notice: None)
        self.is_new = False

    async def _handle(self, peer: bytes, request: Any) -> msgspec.Struct:
        assert isinstance(request, wire.JoinPublisher)
        where = wire.ExchangeAddress("e", "127.0.0.1", 1, 2)
        welcome = wire.PublisherWelcome(1, 1, where, Overflow.BLOCK, 1 << 20, monitor=wire.SERVER_PROTOCOL)
        return welcome if self.is_new else from_older(welcome)

    async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> Any:
        match request:
            case OpenProducer():
                return grant(open_record(None, OPEN, P, 7.0))
            case KeepProducer():
                return Done()
        record = QueueRecord("q", QueueSettings(), True, "h", 1, {}, 0.0, record=Record(), recorded=True)
        return QueueInfo(record, (MonitorAddress("h", "127.0.0.1", self.server.port, 1),), True, Policy())


async def test_a_monitor_of_an_older_version_is_told_at_once() -> None:
    older = OlderMonitor()
    try:
        publisher = NamedPublisher(cast(GcmClient, older), "q", "p")
        async with asyncio.timeout(5):
            with pytest.raises(IncompatibleVersion, match=r"Monitor of queue 'q' .* upgrade the hosts"):
                await publisher.open(60.0)
        with pytest.raises(IncompatibleVersion):
            await publisher.publish("t", b"0")
        older.is_new = True
        with pytest.raises(DeadlineExceeded, match="no Exchange"):
            await NamedPublisher(cast(GcmClient, older), "q", "p").open(0.3)
    finally:
        older.server.close()


async def test_a_gcm_of_an_older_version_is_told() -> None:
    class OlderGcm:
        async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> Any:
            raise FrameError("undecodable request")

    made = Producer(cast(GcmClient, OlderGcm()), "q", "p", lambda: 0, lambda error: None)
    with pytest.raises(IncompatibleVersion, match=r"GCM .* upgrade the hosts"):
        await made.open(Watched(), 1.0)


class Watched(ProducerSender):
    """Tells when it is held, and when it goes on."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: None, lambda: 0, lambda: None)
        self.is_held, self.goes_on = asyncio.Event(), asyncio.Event()

    def hold(self) -> None:
        super().hold()
        self.is_held.set()

    def resume(self) -> None:
        super().resume()
        self.goes_on.set()


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Gcm, Producer, Watched, asyncio.Future[RoqError]]]:
    monkeypatch.setattr(producer, "KEEP_SECONDS", 0.01)
    monkeypatch.setattr(producer, "LEASE_SECONDS", 0.05)
    monkeypatch.setattr(producer, "IDLE_SECONDS", 0.02)
    failed: asyncio.Future[RoqError] = asyncio.get_running_loop().create_future()
    gcm, sender = Gcm(), Watched()
    made = Producer(cast(GcmClient, gcm), "q", "p", lambda: 0, failed.set_result)
    assert await made.open(sender, 1.0) == MemberId(P)
    assert not sender.goes_on.is_set(), "nothing leaves before it is known what is stored"
    assert await made.begin(sender, 1.0) == (0, {})
    assert gcm.kept[0].turn == 1, "a later life must not look for what this one sends where the one before was"
    assert sender.goes_on.is_set()
    yield gcm, made, sender, failed
    made.stop()


async def test_who_can_not_keep_its_name_sends_nothing(
    watched: tuple[Gcm, Producer, Watched, asyncio.Future[RoqError]],
) -> None:
    gcm, _, sender, _ = watched
    sender.goes_on.clear()
    gcm.away = True
    async with asyncio.timeout(5):
        await sender.is_held.wait()
        assert not sender.goes_on.is_set()
        gcm.away = False
        await sender.goes_on.wait()
    assert [one.turn for one in gcm.kept] == sorted(one.turn for one in gcm.kept)


async def test_who_is_told_of_another_one_asks_and_ends(
    watched: tuple[Gcm, Producer, Watched, asyncio.Future[RoqError]],
) -> None:
    gcm, made, sender, failed = watched
    sender.goes_on.clear()
    made.doubt(sender)
    assert sender.is_held.is_set(), "at once"
    async with asyncio.timeout(5):
        await sender.goes_on.wait()  # it was a mistake
        gcm.taken = True
        made.doubt(sender)
        assert isinstance(await failed, ProducerFenced)


# --- how a simulation is judged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "since", "doubted", "wrong"),
    [
        (True, 0.0, 2, False),
        (True, 0.0, 3, True),  # that one came from the life that it met
        (True, -math.inf, 2, True),  # it was there from the beginning
        (False, 0.0, 2, True),
    ],
)
def test_what_lives_sent_before_a_reader_met_the_producer_may_be_doubted(
    named: bool, since: float, doubted: int, wrong: bool
) -> None:
    book = RecordedPublisher("p", P, [1.0, 2.0, 3.0, 4.0], ["t"] * 4, named=named)
    book.are_stored(4, 5.0)
    earlier = Reading("one", "ago", 0.5, since, got={P: [1, 2]})
    told = MessagesLost(P, "t", 1, doubted, 0)
    reading = Reading("two", "position", 2.5, since, None if since < 0 else earlier, {P: [3, 4]}, {P: [told]})
    said = judge_recording(RecordingBooks(cast(SimulatedLoop, None), recorded=[book], readings=[reading]), lossless=True)
    assert any("reported as lost" in one for one in said) is wrong, said


# --- for people -------------------------------------------------------------------------------------------------------


def test_producers_are_listed() -> None:
    rows = [
        producer_row(producers.ProducerView("p", 10, True, "host-1 (pid 7)", 1_700_000_000.0, 1_700_000_060.0)),
        producer_row(producers.ProducerView("new", 0, False, "", 0.0, 0.0)),
    ]
    assert rows[1] == ProducerRow("new", 0, False, "", None, None)
    out = console()
    with out.capture() as shown:
        out.print(producer_table(rows))
    text = shown.get()
    assert "closed" in text
    assert "open, or ended without a close" in text
