"""Processes that leave their requests to one of them keep their promises whoever dies when; and each safeguard is needed:
without it the search finds how one is broken."""

from __future__ import annotations

import pytest

from roq.log.local.board import _ANSWER, _REQUEST, HEAD_BYTES, PLACE_BYTES, REQUEST_MAX, BoardRequest
from roq.workqueue.log_clerk import Asked, Clerk, CommandAnswer
from tests.model.board import Limits, Model
from tests.model.board_memory import ModelBoard, modelled
from tests.model.search import Found, explore

SITUATIONS = {
    "one serves, one asks": Limits(impatient=(0,), kills=1),
    "both ask": Limits(kills=1),
    "both want to serve": Limits(impatient=(0, 1), kills=1),
    "an heir takes the place of who asked": Limits(impatient=(1,), kills=1, mortal=(0,), heirs=True),
    "texts are seen late": Limits(impatient=(0,), kills=1, weak=True),
    "the disk is full": Limits(impatient=(0,), kills=1, fulls=1),
}


def found(limits: Limits) -> Found:
    with modelled(limits.processes):
        return explore(Model(limits), 200_000)


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_request_takes_effect_once_and_is_answered(name: str) -> None:
    seen = found(SITUATIONS[name])
    assert not seen.trail, "\n".join(seen.trail)
    assert seen.ends


class MarksNothing(ModelBoard):
    """Takes requests without a mark, so that nobody knows which ones a dead clerk had begun with."""

    def take(self) -> list[BoardRequest]:
        words, others = self._words, [place for place in range(2) if place != self.place]
        numbers = [(place, words[_REQUEST + place]) for place in others if words[_REQUEST + place] != words[_ANSWER + place]]
        at = HEAD_BYTES + (1 - self.place) * PLACE_BYTES
        texts = [(place, number, self._read(at, number, REQUEST_MAX)) for place, number in numbers]
        return [BoardRequest(place, number, text) for place, number, text in texts if text]


class LeavesTheBroken(ModelBoard):
    """Does not answer what a round that broke off has taken."""

    def _give_up(self) -> None:
        """Nothing."""


class StaysOnTheBoard(ModelBoard):
    """Serves itself, and leaves its request where the next clerk finds it."""

    def drop(self) -> None:
        """Nothing."""


class KnowsNoNumbers(ModelBoard):
    """Takes any whole text for the one it looks for."""

    def _write(self, at: int, number: int, text: bytes) -> None:
        super()._write(at, 0, text)

    def _read(self, at: int, number: int, length_max: int) -> bytes | None:
        return super()._read(at, 0, length_max)


class StartsAnew(ModelBoard):
    """Counts its requests from 1, whatever the owner before it has left."""

    def _inherited(self) -> int:
        return 0


class AnswersEarly(Clerk):
    """Answers before it has synced."""

    def _serve_all(self, board: ModelBoard, asked: Asked, taken: list[BoardRequest]) -> CommandAnswer:  # type: ignore[override]
        log, self._log = self._log, _Unsynced()  # type: ignore[assignment]
        try:
            return super()._serve_all(board, asked, taken)
        finally:
            self._log = log


class _Unsynced:
    def sync(self, position: int) -> None:
        """Later, perhaps."""


class WritesAgain(Clerk):
    """Writes again what may have been written."""

    def _look_up(self, asked: Asked) -> CommandAnswer:
        return self._write_alone(asked)


class DropsLate(Clerk):
    """Takes its own request from the board when it is served, not before."""

    def _serve(self, board: ModelBoard, asked: Asked) -> CommandAnswer:  # type: ignore[override]
        drop, board.drop = board.drop, lambda: None  # type: ignore[method-assign]
        try:
            return super()._serve(board, asked)
        finally:
            board.drop = drop  # type: ignore[method-assign]
            drop()


class ServesUnasked(Clerk):
    """Once it is the clerk it serves its own request, without looking whether the clerk before has."""

    def _wait(self, board: ModelBoard, asked: Asked) -> CommandAnswer:  # type: ignore[override]
        while board.answer() is None:
            if (answer := self._round(board, asked)) is not None:
                return answer
            board.wait(1)
        return super()._wait(board, asked)


KILL = Limits(impatient=(0,), kills=1)
CONTROLS = {
    "requests are not marked as taken": KILL._replace(board=MarksNothing),
    "a broken round is not cleared up": KILL._replace(board=LeavesTheBroken),
    "who serves itself leaves its request": Limits(asks=2, impatient=(0,), board=StaysOnTheBoard),
    "texts have no numbers": Limits(asks=2, impatient=(0,), weak=True, board=KnowsNoNumbers),
    "an heir counts from 1": Limits(impatient=(1,), kills=1, mortal=(0,), heirs=True, board=StartsAnew),
    "an ack is told before it is durable": KILL._replace(clerk=AnswersEarly),
    "who does not know does not look": KILL._replace(clerk=WritesAgain),
    "a clerk's own request stays on the board while it is served": Limits(kills=1, clerk=DropsLate),
    "the answer is not looked for again": KILL._replace(clerk=ServesUnasked),
    "there are two clerks": Limits(exclusive=False),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_without_the_safeguard_a_promise_is_broken(name: str) -> None:
    seen = found(CONTROLS[name])
    assert seen.trail, f"{seen.states} states and no breach"
    assert seen.trail[-1].startswith("==> ")
    assert "not expected" not in seen.trail[-1]
