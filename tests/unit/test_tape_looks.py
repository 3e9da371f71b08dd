"""Looks at which tapes there are: in parts, and one for all who ask. The GCM is a list. Not covered: the real one,
tests/integration/test_gcm_recording.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from gcm import parts
from gcm.parts import part_of
from roq.coordination import parts as client_parts
from roq.coordination.locate import GcmClient
from roq.errors import Unavailable
from roq.pubsub.tape_looks import describe_tapes, look_at_tapes
from roq.wire import gcm
from roq.wire.recording import Record


class Leader(GcmClient):
    """Answers as the GCM does, once it may."""

    def __init__(self, logs: dict[str, bytes]) -> None:
        super().__init__("127.0.0.1:1")
        self.logs, self.name = logs, "t"
        self.asked: list[str | None] = []
        self.may = asyncio.Event()
        self.may.set()
        self.failures: list[Exception] = []

    async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
        assert isinstance(body, gcm.DescribeTapes)
        self.asked.append(body.after)
        await self.may.wait()
        if self.failures:
            raise self.failures.pop(0)
        logs, more = part_of(self.logs, body.after)
        views = tuple(gcm.TapeView(log, log, True, meta) for log, meta in logs.items())
        return gcm.Tapes(self.name, Record(), True, views, {f"of {log}": "e" for log in logs}, more=more)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 100)


LOGS = {"c": b"c" * 60, "a": b"a" * 60, "b": b"b" * 30, "d": b"d" * 500, "e": b"e"}


def test_a_part_is_as_much_as_fits_and_one_at_least() -> None:
    assert part_of(LOGS, None) == (LOGS, False), "an older program asks for all at once"
    assert [list(part_of(LOGS, after)[0]) for after in ("", "b", "c", "d", "e")] == [["a", "b"], ["c"], ["d"], ["e"], []]
    assert [part_of(LOGS, after)[1] for after in ("", "b", "c", "d", "e")] == [True, True, True, False, False]


async def test_all_parts_are_asked_for() -> None:
    leader = Leader(LOGS)
    found = await describe_tapes(leader, "q")
    assert [view.log for view in found.views] == list("abcde")
    assert found.stores == {f"of {log}": "e" for log in "abcde"}
    assert not found.more
    assert leader.asked == ["", "b", "c", "d"]


async def test_older_programs_are_understood() -> None:
    """A GCM that tells all at once, and a client that asks for that."""
    told = msgspec.to_builtins(await Leader(LOGS).request(gcm.DescribeTapes("q"), gcm.Tapes))
    old = msgspec.convert(told[:-1], gcm.Tapes)
    assert (len(old.views), old.more) == (len(LOGS), False)
    assert msgspec.convert(["DescribeTapes", "q"], gcm.DescribeTapes) == gcm.DescribeTapes("q", None)


async def test_a_queue_that_was_made_anew_between_two_parts_is_asked_for_again() -> None:
    class Anew(Leader):
        async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
            if self.asked == [""]:
                self.name, self.logs = "u", {"x": b"", "z": b""}
            return await super().request(body, expect, timeout_seconds)

    found = await describe_tapes(Anew(LOGS), "q")
    assert (found.tapes, [view.log for view in found.views]) == ("u", ["x", "z"])


async def test_a_queue_that_is_made_anew_each_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class EachTime(Leader):
        async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
            self.name = f"t-{len(self.asked)}"
            return await super().request(body, expect, timeout_seconds)

    monkeypatch.setattr(client_parts, "delays", lambda *_: iter(lambda: 0.0, None))
    leader = EachTime(LOGS)
    with pytest.raises(Unavailable, match="another before all were read"):
        await describe_tapes(leader, "q")
    assert leader.asked == ["", "b"] * client_parts.TRIES


async def test_who_asks_at_about_the_same_time_shares_the_answer() -> None:
    leader = Leader({"a": b""})
    begun = time.monotonic()
    found = await asyncio.gather(*(look_at_tapes(leader, "q", begun) for _ in range(100)))
    assert leader.asked == [""]
    assert len(set(map(id, found))) == 1
    assert found[0].began >= begun
    assert await look_at_tapes(leader, "q", begun) is found[0], "it is new enough"
    assert (await look_at_tapes(leader, "q", time.monotonic())).began > found[0].began
    assert (await look_at_tapes(leader, "other", begun)).began > found[0].began
    assert leader.asked == ["", "", ""]


async def test_an_answer_to_a_question_of_before_is_not_enough() -> None:
    leader = Leader({"a": b""})
    leader.may.clear()
    first = asyncio.ensure_future(look_at_tapes(leader, "q", time.monotonic()))
    while not leader.asked:
        await asyncio.sleep(0)
    second, third = (asyncio.ensure_future(look_at_tapes(leader, "q", time.monotonic())) for _ in range(2))
    await asyncio.sleep(0)
    leader.logs["b"] = b""
    leader.may.set()
    await asyncio.gather(first, second, third)
    assert leader.asked == ["", ""], "one more for both of them"
    assert second.result() is third.result()
    assert second.result() is not first.result()


async def test_a_failure_is_told_to_all_who_waited_and_the_next_one_asks_again() -> None:
    leader = Leader({"a": b""})
    leader.failures.append(Unavailable("nobody leads"))
    begun = time.monotonic()
    failed = await asyncio.gather(*(look_at_tapes(leader, "q", begun) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in failed] == [Unavailable] * 3
    assert (await look_at_tapes(leader, "q", begun)).tapes.tapes == "t"
    assert leader.asked == ["", ""]


async def test_whoever_goes_does_not_take_the_answer_from_the_others() -> None:
    leader = Leader({"a": b""})
    leader.may.clear()
    begun = time.monotonic()
    one, other = (asyncio.ensure_future(look_at_tapes(leader, "q", begun)) for _ in range(2))
    while not leader.asked:
        await asyncio.sleep(0)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    leader.may.set()
    assert (await other).tapes.tapes == "t"
    assert leader.asked == [""]
