"""Durable subscribers: what the GCM decides about a position, and when the subscriber's side has one kept.

The leader here is gcm/durables.py's own decisions over a dictionary. Not covered: ZooKeeper (tests/integration/
test_gcm_durables.py), a queue with messages (tests/integration/test_durable.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest
from typer.testing import CliRunner

from gcm.durables import (
    OWNER_CHARACTERS_MAX,
    POSITION_BYTES_MAX,
    DurableRecord,
    check_position,
    keep_in,
    open_record,
)
from roq.cli.main import app
from roq.cli.output import console, moment
from roq.cli.pub_sub import MessageTally
from roq.cli.recorded_names import DurableRow, durable_row, durable_table
from roq.errors import (
    AccessDenied,
    CardRevoked,
    Closed,
    DurableTaken,
    InvalidName,
    InvalidPosition,
    MessagesLost,
    QueueNotFound,
    RoqError,
    Unavailable,
)
from roq.pubsub import durable
from roq.pubsub.durable import DurableSubscriber, PositionKeeper
from roq.pubsub.order import Deliver, FrameEvent
from roq.pubsub.past import Past
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Batch
from roq.wire import durables, gcm, rights
from roq.wire.assignment import from_json, to_json
from roq.wire.card import CardRole, Grant, Right, new_card
from roq.wire.frame import VERSION, FrameKind, Header, PathOpening
from roq.wire.recording import Record, TapePosition

BOUND_SECONDS = 10
OPEN = durables.OpenDurable("q", "d", "one", "host-1 (pid 1)")


def position(**done: int) -> TapePosition:
    return TapePosition("tapes", done)


def keep(number: int, text: str, holder: str = "one") -> durables.KeepPosition:
    return durables.KeepPosition("q", "d", holder, number, text)


# --- what the GCM decides ---------------------------------------------------------------------------------------------


def test_a_name_is_held_by_who_opened_it_last_and_its_position_stays() -> None:
    first = open_record(None, OPEN, 5.0)
    assert first == DurableRecord("one", "host-1 (pid 1)", 5.0)
    assert open_record(first, OPEN, 6.0) is first, "the same request again"
    kept = keep_in(first, keep(1, "p"), 7.0)
    assert kept == DurableRecord("one", "host-1 (pid 1)", 5.0, "p", 1, 7.0)
    second = open_record(kept, durables.OpenDurable("q", "d", "two", "x" * 1000), 8.0)
    assert second == DurableRecord("two", "x" * OWNER_CHARACTERS_MAX, 8.0, "p", 0, 7.0)
    with pytest.raises(DurableTaken, match="'d' of queue 'q' was opened since by xxx"):
        keep_in(second, keep(2, "late"), 9.0)
    assert keep_in(second, keep(1, "next", "two"), 9.0).position == "next"
    assert from_json(to_json(second), DurableRecord) == second


def test_a_position_that_was_overtaken_changes_nothing() -> None:
    record = keep_in(open_record(None, OPEN, 5.0), keep(2, "new"), 6.0)
    for number in (1, 2):
        assert keep_in(record, keep(number, "old"), 7.0) is record


def test_what_was_forgotten_is_not_kept() -> None:
    with pytest.raises(DurableTaken, match="was forgotten: open it again"):
        keep_in(None, keep(1, "p"), 1.0)


def test_only_positions_of_this_queue_are_kept_and_no_long_ones() -> None:
    check_position(str(position(a=1)), "tapes")
    many = position(**{f"{number:016x}": number for number in range(3_000)})
    for text, tapes, why in (
        ("nonsense", "tapes", "not a position"),
        (str(position(a=1)), "others", "of another queue"),
        (str(many), "tapes", f"at most {POSITION_BYTES_MAX}"),
    ):
        with pytest.raises(InvalidPosition, match=why):
            check_position(text, tapes)
    check_position(str(position(**dict(list(many.done.items())[:1_500]))), "tapes")


# --- the keeper -------------------------------------------------------------------------------------------------------


class Leader:
    """A GcmClient whose leader keeps one queue's positions by the decisions above. failures: what the next requests meet."""

    def __init__(self) -> None:
        self.records: dict[str, DurableRecord] = {}
        self.kept: list[TapePosition] = []
        self.listed: tuple[str, ...] | None = None  # tapes that there are; None: those of the last position
        self.tapes = "tapes"
        self.looks = 0
        self.failures: list[RoqError] = []
        self.asked = asyncio.Event()
        self.silent: asyncio.Event | None = None

    async def request(self, body: msgspec.Struct, expect: type, timeout_seconds: float) -> Any:
        self.asked.set()
        if self.silent is not None:
            await self.silent.wait()
        if self.failures:
            raise self.failures.pop(0)
        match body:
            case durables.OpenDurable(name=name):
                self.records[name] = open_record(self.records.get(name), body, 1.0)
                return durables.DurablePosition(self.records[name].position)
            case durables.KeepPosition(name=name):
                self.records[name] = keep_in(self.records.get(name), body, 2.0)
                self.kept.append(TapePosition.parse(self.records[name].position))
                return gcm.Done()
            case gcm.DescribeTapes():
                self.looks += 1
                listed = self.kept[-1].done if self.listed is None else self.listed
                views = tuple(gcm.TapeView(name, name, True, b"") for name in listed)
                return gcm.Tapes(self.tapes, Record(), True, views, {})
        raise AssertionError(body)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            while not condition():
                self.asked.clear()
                await self.asked.wait()
                await asyncio.sleep(0)


class Reader:
    """The subscriber's part: a position, and what it failed with."""

    def __init__(self, leader: Leader, name: str = "d", every_seconds: float = 0.01) -> None:
        self.done: dict[str, int] = {}
        self.unfinished = set[str]()
        self.failed: asyncio.Future[RoqError] = asyncio.get_running_loop().create_future()
        client: Any = leader
        ask = self.position, lambda: self.unfinished
        self.keeper = PositionKeeper(client, "q", name, *ask, self.failed.set_result, every_seconds)

    def position(self) -> TapePosition:
        return TapePosition("tapes", dict(self.done))

    async def begin(self) -> TapePosition | None:
        found = await self.keeper.open(1.0)
        self.done = dict(found.done) if found is not None else {"A": 0}
        await self.keeper.keep(1.0)
        self.keeper.start()
        return found


async def test_where_it_begins_is_kept_at_once_and_what_follows_soon() -> None:
    leader = Leader()
    reader = Reader(leader)
    assert await reader.begin() is None
    assert leader.kept == [position(A=0)], "a crash from now on goes on here"
    reader.done["A"] = 5
    await leader.until(lambda: leader.kept[-1] == position(A=5))
    reader.done["B"] = 2
    await leader.until(lambda: leader.kept[-1] == position(A=5, B=2))
    assert len(leader.kept) == 3, "the same one is not written again"
    reader.done["B"] = 3
    await reader.keeper.close(1.0)
    assert leader.kept[-1] == position(A=5, B=3)
    await reader.keeper.close(1.0)
    assert len(leader.kept) == 4
    assert await Reader(leader).begin() == position(A=5, B=3)


async def test_a_place_that_is_passed_over_is_not_kept_only_one_behind_it() -> None:
    leader = Leader()
    reader = Reader(leader)
    await reader.keeper.open(1.0)
    reader.done = {"A": 3}
    reader.keeper.pass_over()
    reader.keeper.start()
    await reader.keeper.keep()
    assert leader.kept == []
    reader.done = {"A": 4}
    await leader.until(lambda: leader.kept == [position(A=4)])
    await reader.keeper.close(1.0)


async def test_it_asks_once_in_its_time_however_much_was_taken() -> None:
    leader = Leader()
    reader = Reader(leader, every_seconds=3600)
    await reader.begin()
    for entry in range(1_000):
        reader.done["A"] = entry
        await asyncio.sleep(0)
    assert leader.kept == [position(A=0)]
    await reader.keeper.close(1.0)
    assert leader.kept == [position(A=0), position(A=999)]


async def test_who_opened_it_before_fails_and_keeps_nothing_more() -> None:
    leader = Leader()
    first, second = Reader(leader), Reader(leader)
    await first.begin()
    first.done["A"] = 4
    await leader.until(lambda: leader.kept[-1] == position(A=4))
    assert await second.begin() == position(A=4)
    first.done["A"] = 9
    error = await asyncio.wait_for(first.failed, BOUND_SECONDS)
    assert isinstance(error, DurableTaken)
    await first.keeper.close(1.0)
    assert max(one.done["A"] for one in leader.kept) == 4
    second.done["A"] = 5
    await leader.until(lambda: leader.kept[-1] == position(A=5))
    assert not second.failed.done()
    await second.keeper.close(1.0)


@pytest.mark.parametrize("error", [Unavailable("nobody leads"), AccessDenied("the card is not valid yet")])
async def test_while_nobody_leads_or_it_is_not_let_in_it_goes_on_and_keeps_the_newest_later(error: RoqError) -> None:
    leader = Leader()
    reader = Reader(leader)
    await reader.begin()
    leader.failures = [error] * 3
    reader.done["A"] = 1
    await leader.until(lambda: len(leader.failures) < 3)
    reader.done["A"] = 7
    await leader.until(lambda: leader.kept[-1] == position(A=7))
    assert not reader.failed.done()
    await reader.keeper.close(1.0)


@pytest.mark.parametrize("error", [QueueNotFound("no queue is named 'q'"), CardRevoked("the card of alice was revoked")])
async def test_what_can_not_be_repaired_fails_the_subscriber_but_not_a_closed_cluster(error: RoqError) -> None:
    leader = Leader()
    reader = Reader(leader)
    await reader.begin()
    leader.failures = [error]
    reader.done["A"] = 1
    assert await asyncio.wait_for(reader.failed, BOUND_SECONDS) is error
    await reader.keeper.close(1.0)
    assert leader.kept == [position(A=0)], "nothing is tried again"
    other = Reader(leader, "e")
    await other.begin()
    leader.failures = [Closed("this cluster connection is closed")]
    other.done["A"] = 1
    await leader.until(lambda: not leader.failures)
    await other.keeper.close(1.0)
    assert not other.failed.done()


async def test_closing_takes_no_longer_than_it_may_and_says_what_was_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    leader = Leader()
    reader = Reader(leader, every_seconds=3600)
    await reader.begin()
    leader.silent = asyncio.Event()
    reader.done["A"] = 1
    async with asyncio.timeout(BOUND_SECONDS):
        with caplog.at_level("WARNING", durable.__name__):
            await reader.keeper.close(0)
    assert "last position not stored: messages taken since then are redelivered" in caplog.text
    unopened = Reader(leader)
    await unopened.keeper.close(1.0)


async def test_tapes_that_have_expired_leave_a_position_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "TAPES_KEPT", 3)
    leader = Leader()
    reader = Reader(leader, every_seconds=3600)
    await reader.keeper.open(1.0)
    reader.done = {"A": 1, "B": 2, "C": 3}
    await reader.keeper.keep()
    assert leader.looks == 0
    reader.done |= {"D": 4}
    leader.listed = ("C", "D")
    await reader.keeper.keep()
    reader.done |= {"D": 5}
    await reader.keeper.keep()
    assert leader.looks == 1
    assert leader.kept[1:] == [position(C=3, D=4), position(C=3, D=5)]


async def test_tapes_that_have_expired_are_asked_for_in_a_while_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of them are reported as lost when the name is opened again, though all of it was taken."""
    leader = Leader()
    reader = Reader(leader, every_seconds=3600)
    await reader.begin()
    reader.done = {"A": 1, "B": 2, "C": 3}
    leader.listed, reader.unfinished = ("B",), {"C"}
    await reader.keeper.keep()
    assert (leader.looks, leader.kept[-1]) == (0, position(A=1, B=2, C=3))
    monkeypatch.setattr(durable, "LOOK_SECONDS", -1.0)
    await reader.keeper.keep()
    assert leader.kept[-1] == position(B=2, C=3), "also if nothing was taken since; not what is to be reported yet"
    monkeypatch.setattr(durable, "LOOK_SECONDS", 3600.0)
    reader.unfinished = set()
    await reader.keeper.keep()
    assert (leader.looks, len(leader.kept)) == (1, 3)
    await reader.keeper.close(1.0)
    assert leader.kept[-1] == position(B=2)


async def test_a_queue_that_was_created_anew_says_nothing_of_the_tapes_of_a_position() -> None:
    leader = Leader()
    reader = Reader(leader, every_seconds=3600)
    await reader.begin()
    leader.listed, leader.tapes = (), "others"
    await reader.keeper.close(1.0)
    assert (leader.looks, leader.kept) == (1, [position(A=0)])


async def test_at_the_end_the_position_is_kept_though_nobody_says_which_tapes_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leader = Leader()
    reader = Reader(leader, every_seconds=3600)
    await reader.begin()
    reader.done["A"] = 5
    request = leader.request

    async def no_tapes(body: msgspec.Struct, expect: type, timeout_seconds: float) -> Any:
        if isinstance(body, gcm.DescribeTapes):
            raise Unavailable("nobody leads")
        return await request(body, expect, timeout_seconds)

    leader.request = no_tapes  # type: ignore[method-assign]
    with caplog.at_level("INFO", durable.__name__):
        await reader.keeper.close(1.0)
    assert leader.kept[-1] == position(A=5)
    assert [record.levelname for record in caplog.records] == ["INFO"]


# --- the subscriber ---------------------------------------------------------------------------------------------------


async def opened(leader: Leader, losses: list[MessagesLost], done: dict[str, int]) -> DurableSubscriber:
    """A reader of tapes that are only in memory; it got so far before it was opened."""
    client: Any = leader
    subscriber = DurableSubscriber(client, "q", (), losses.append, "earliest", follow=True, where="", name="d")
    subscriber._opened, subscriber._tapes, subscriber._done = True, "tapes", done
    await subscriber._keeper.open(1.0)
    return subscriber


async def test_a_position_is_not_kept_before_the_application_took_what_is_reported_of_it() -> None:
    leader, losses = Leader(), list[MessagesLost]()
    subscriber = await opened(leader, losses, {"A": 1})
    subscriber.missed(MessagesLost(0, "", 6, 6, 0))
    await subscriber._keeper.keep()
    assert leader.kept == [], "after a crash it is reported again"
    waits = asyncio.ensure_future(subscriber.next_batch())
    await asyncio.sleep(0)
    assert [loss.first for loss in losses] == [6]
    await subscriber._keeper.keep()
    assert leader.kept == [position(A=1)], "also if nothing follows"
    waits.cancel()
    subscriber.reached("A", 2)
    assert subscriber._unfinished() == {"A"}
    await subscriber.close(0)


@pytest.mark.parametrize("again", [True, False])
async def test_a_replay_of_what_the_life_before_had_is_not_reported(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Its Exchange died after that life: its publisher sends on another one what it still holds. Who began with all tapes, and
    went on to something newer without that, has lost it."""

    async def found(subscriber: Subscriber, past: Past, timeout_seconds: float) -> None:
        subscriber._tapes, subscriber._done = "tapes", {"A": 5}

    monkeypatch.setattr(Subscriber, "_begin", found)
    leader: Any = Leader()
    for _ in range(1 + again):
        subscriber = DurableSubscriber(
            leader, "q", (), list[MessagesLost]().append, "earliest", follow="stored", where="", name="d"
        )
        assert subscriber._past is not None
        await subscriber._begin(subscriber._past, 1.0)
        await subscriber._keeper.close(1.0)
    order, opening = subscriber._order, PathOpening("A", finished=False)
    assert order.handle(FrameEvent(b"t", Header(VERSION, 0, 7, 2, 9, 8, 8, 1, 0)), 1.0)
    assert order.handle(FrameEvent(b"", Header(VERSION, FrameKind.OPEN, 7, 3, 3, 0, 0, 0, 0), None, opening), 2.0) == []
    replayed = order.handle(FrameEvent(b"t", Header(VERSION, 0, 7, 3, 4, 3, 3, 5, 0)), 2.0)
    assert [(type(one), str(one)[:20]) for one in replayed] == ([] if again else [(MessagesLost, "lost 5 messages with")])
    assert [type(one) for one in order.handle(FrameEvent(b"t", Header(VERSION, 0, 7, 3, 10, 9, 9, 1, 0)), 2.0)] == [Deliver]


async def test_closing_leaves_the_queue_though_the_position_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber = await opened(Leader(), [], {})

    async def interrupted(timeout_seconds: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(subscriber._keeper, "close", interrupted)
    with pytest.raises(asyncio.CancelledError):
        await subscriber.close(0)
    assert subscriber.health().problems == ("closed",)
    assert await subscriber.next_batch() is None


async def test_what_another_one_will_get_takes_no_room() -> None:
    subscriber = await opened(Leader(), [], {})
    subscriber._started = 1.0
    subscriber._buffer.append(Batch(b"t", Header(VERSION, 0, 7, 1, 1, 0, 0, 1, 1), [b"1"], 10))
    subscriber._buffered = 10
    subscriber.fail(DurableTaken("'d' was opened elsewhere"))
    assert subscriber.health().buffered_bytes == 0
    with pytest.raises(DurableTaken):
        await subscriber.next_batch()
    await subscriber.close(0)


async def test_a_name_is_checked_before_anything_is_asked() -> None:
    with pytest.raises(InvalidName, match="durable subscriber"):
        Reader(Leader(), "a/b")


# --- who may, and what people see -------------------------------------------------------------------------------------


def test_who_subscribes_keeps_positions_and_who_administers_forgets_them() -> None:
    allow = rights.for_names(rights.GCM)
    kept, listed, forgotten = keep(1, "p"), durables.ListDurables("q"), durables.ForgetDurable("q", "d")
    may: dict[Right, list[object]] = {
        Right.SUBSCRIBE: [OPEN, kept, listed],
        Right.READ: [OPEN, kept, listed],
        Right.DESCRIBE: [listed],
        Right.ADMIN: [listed, forgotten],
        Right.PUBLISH: [],
    }
    for right, requests in may.items():
        for request in (OPEN, kept, listed, forgotten):
            for names, covered in (("q", request in requests), ("other", False)):
                card = new_card("alice", CardRole.CLIENT, bytes(32), [Grant(right, names)], 0.0, 1e12)
                if covered:
                    allow(card, request)
                else:
                    with pytest.raises(AccessDenied, match="to 'q'"):
                        allow(card, request)
    assert {type(OPEN), type(kept), type(listed), type(forgotten)} & rights.ADMINISTRATIVE == {durables.ForgetDurable}


def test_a_durable_subscriber_for_programs_and_for_people() -> None:
    text = str(position(A=5, B=2))
    rows = [
        durable_row(durables.DurableView("d", text, "host-1 (pid 7)", 1_700_000_000.0, 1_700_000_060.0)),
        durable_row(durables.DurableView("new", "", "", 0.0, 0.0)),
    ]
    assert rows == [
        DurableRow("d", text, 2, 7, "host-1 (pid 7)", 1_700_000_000.0, 1_700_000_060.0),
        DurableRow("new", "", 0, 0, "", None, None),
    ]
    out = console()
    with out.capture() as said:
        out.print(durable_table(rows))
    title, head, first, second = (" ".join(line.split()) for line in said.get().splitlines())
    assert (title, head) == ("Durable subscribers", "NAME TAPES ENTRIES KEPT OPENED BY OPENED")
    assert first == f"d 2 7 {moment(1_700_000_060.0)} host-1 (pid 7) {moment(1_700_000_000.0)}"
    assert second == "new 0 0 - - -"


def test_a_group_keeps_its_place_by_itself() -> None:
    result = CliRunner().invoke(app, ["sub", "q", "--group", "g", "--durable", "d", "-c", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "not for a group" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("durable", "further"), [(None, f"--start {position(A=1)}"), ("d", "--durable d")])
def test_where_to_go_on_is_told(durable: str | None, further: str, capsys: pytest.CaptureFixture[str]) -> None:
    subscriber = create_autospec(Subscriber, instance=True, position=position(A=1))
    MessageTally("roq sub", durable).tell("received", subscriber, "--start")
    assert capsys.readouterr().err.splitlines()[-1] == f"roq sub: go on with {further}"
