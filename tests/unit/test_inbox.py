"""What a subscriber hands out of its inbox, with a condition, too, and what counts as taken.

Not covered: what a condition says (test_where.py), how the inbox is filled (tests/model).
"""

from __future__ import annotations

import asyncio
import time

import pytest

from roq.errors import MessagesLost
from roq.pubsub.inbox import BATCHES_WITHOUT_BREATH, EXPIRED, LATENCIES_KEPT, LATENCIES_SECONDS, Inbox
from roq.pubsub.subscription import Batch, Message
from roq.wire.frame import VERSION, Header
from roq.wire.where import Where


class Filled(Inbox):
    """By hand; it ends when it is empty."""

    def __init__(self, where: str) -> None:
        self.losses: list[MessagesLost] = []
        super().__init__(self.losses.append, Where(where) if where else None)
        self.room = 0
        self._closed = True

    def look(self) -> None:
        raise AssertionError("nothing else comes")

    def took(self) -> None:
        self.room += 1

    def holds_back(self) -> bool:
        return False

    def entry(self, number: int, *payloads: bytes) -> None:
        """A batch that is one entry of a tape."""
        header = Header(VERSION, 0, 7, 1, number * 100, 0, 0, len(payloads), 1)
        self._buffer.append(Batch(b"t", header, payloads, 10))
        self.reached("A", number)

    def lose(self, number: int) -> None:
        self._buffer.append(MessagesLost(7, "t", number, number, 1))

    @property
    def done(self) -> int:
        return self._done.get("A", 0)


def prices(*numbers: int) -> list[bytes]:
    return [b'{"price": %d}' % number for number in numbers]


async def test_what_is_selected_keeps_its_number_and_empty_lists_are_not_handed_out() -> None:
    inbox = Filled("price > 1")
    inbox.entry(1, *prices(1, 2, 3))
    inbox.entry(2, *prices(1, 1))
    inbox.lose(250)
    inbox.entry(3, b"no JSON")
    inbox.entry(4, *prices(4, 1))
    inbox.entry(5, *prices(0))
    found = [batch async for batch in inbox.batches()]
    assert [[one.sequence for one in batch] for batch in found] == [[101, 102], [400]]
    assert (inbox.messages, inbox.unselected, inbox.lost) == (3, 6, 1)
    assert [loss.first for loss in inbox.losses] == [250]
    assert (inbox.done, inbox.room) == (5, 5), "what is not selected is taken all the same"
    assert inbox.taken == 9


async def test_a_position_waits_for_what_was_handed_out_and_for_nothing_else() -> None:
    inbox = Filled("price > 1")
    inbox.entry(1, *prices(1))
    inbox.entry(2, *prices(2))
    inbox.entry(3, *prices(1))
    assert (await anext(inbox)).payload == b'{"price": 2}'
    assert inbox.done == 1, "the second one is being worked on"
    assert inbox.taken == 2, "who selects nothing is not slow"
    with pytest.raises(StopAsyncIteration):
        await anext(inbox)
    assert inbox.done == 3


async def test_of_entries_with_nothing_in_between_one_item_is_kept_whatever_their_tapes() -> None:
    """A narrow filter while the application works on a message: nothing else bounds them."""
    inbox = Filled("")
    inbox.entry(1, b"1")
    for entry in range(2, 1_000):
        inbox.reached("A", entry)
        inbox.reached("B", entry)
        inbox.reached("C", entry)
    inbox.reached("C", EXPIRED)
    assert len(inbox._buffer) == 2
    inbox.lose(250)
    inbox.reached("B", 1_000)
    assert len(inbox._buffer) == 4, "not before what came first"
    assert (await anext(inbox)).payload == b"1"
    assert inbox._done == {}
    with pytest.raises(StopAsyncIteration):
        await anext(inbox)
    assert inbox._done == {"A": 999, "B": 1_000}


async def test_others_have_their_turn_while_nothing_is_selected() -> None:
    inbox, turns = Filled("price > 1"), list[int]()
    for number in range(10 * BATCHES_WITHOUT_BREATH):
        inbox.entry(number + 1, *prices(1))

    async def other() -> None:
        while True:
            turns.append(inbox.unselected)
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(other())
    assert await inbox.next_batch() is None
    beside.cancel()
    assert len(turns) >= 10
    assert turns[0] <= BATCHES_WITHOUT_BREATH


@pytest.mark.parametrize("where", ["", "price >= 0 or size > 0"])
async def test_without_a_condition_and_with_one_that_all_meet(where: str) -> None:
    inbox = Filled(where)
    inbox.entry(1, *prices(1, 2))
    inbox.entry(2, b"")
    assert [one async for one in inbox][:2] == [
        Message("t", payload, 7, 100 + at, 1) for at, payload in enumerate(prices(1, 2))
    ]
    assert inbox.messages + inbox.unselected == 3
    assert inbox.unselected == (1 if where else 0)


async def test_percentiles_are_of_the_last_seconds_and_no_more_than_so_many_batches() -> None:
    inbox, now = Filled(""), time.time_ns()
    for late_ms in (5000, *[1] * 20):
        header = Header(VERSION, 0, 7, 1, 100, 0, 0, 1, now - late_ms * 1_000_000)
        inbox._buffer.append(Batch(b"t", header, [b"1"], 10))
    assert len([one async for one in inbox]) == 21
    latencies = inbox._latencies
    assert latencies.all(time.time_ns())[2] >= 5
    slow = latencies.kept[0][0]
    assert latencies.all(slow + int(LATENCIES_SECONDS * 1e9) + 1)[2] < 5, "that one is too long ago, few as came since"
    assert latencies.all(time.time_ns() + int(LATENCIES_SECONDS * 1e9) + 1)[1:] == (0.0, 0.0)
    assert latencies.kept.maxlen == LATENCIES_KEPT


# --- what a position counts -------------------------------------------------------------------------------------------


class Entries(Inbox):
    """An inbox that is filled by hand: batches of so many messages, each the whole of an entry."""

    def __init__(self) -> None:
        super().__init__(on_lost=lambda lost: None)

    def look(self) -> None:
        """Nothing comes by itself."""

    def took(self) -> None:
        """There is always room."""

    def holds_back(self) -> bool:
        return False

    def entry(self, number: int, messages: int) -> None:
        header = Header(VERSION, 0, 7, 1, number * 100, 0, 0, messages, 1)
        self._buffer.append(Batch(b"t", header, [b"%d" % one for one in range(messages)], 10))
        self.reached("A", number)

    @property
    def done(self) -> int:
        return self._done.get("A", 0)


@pytest.mark.parametrize("loops", [True, False], ids=["async for", "anext"])
async def test_an_entry_counts_when_the_application_comes_back_from_its_last_message(loops: bool) -> None:
    inbox = Entries()
    source = aiter(inbox) if loops else inbox
    inbox.entry(1, 3)
    inbox.entry(2, 1)
    inbox.entry(3, 1)
    seen = []
    for _ in range(5):
        await anext(source)
        seen.append(inbox.done)
    assert seen == [0, 0, 0, 1, 2]
    waiting = asyncio.ensure_future(anext(source))
    await asyncio.sleep(0)
    assert inbox.done == 3, "it waits for the next: what came before is done with"
    waiting.cancel()


async def test_a_batch_counts_when_the_next_one_is_asked_for() -> None:
    inbox = Entries()
    inbox.entry(1, 3)
    inbox.entry(2, 2)
    seen = []
    batches = inbox.batches()
    for _ in range(2):
        await anext(batches)
        seen.append(inbox.done)
    assert seen == [0, 1]
