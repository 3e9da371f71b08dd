"""Processes that leave their requests to one of them keep their promises whoever dies when; and each safeguard is needed:
without it the search finds how one is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roq.log.local.publication import _ANSWER, _REQUEST, HEAD_BYTES, PLACE_BYTES, REQUEST_MAX, PublishedRequest, Served
from roq.workqueue.folded_log import CommandAnswer
from roq.workqueue.log_queue import LogQueue
from roq.workqueue.log_replica import Request
from tests.model.combining import Limits, Model
from tests.model.combining_memory import ModelList, modelled
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


class MarksNothing(ModelList):
    """Takes requests without a mark, so that nobody knows which ones a dead combiner had begun with."""

    def take(self) -> list[PublishedRequest]:
        words, others = self._words, [place for place in range(2) if place != self.place]
        numbers = [(place, words[_REQUEST + place]) for place in others if words[_REQUEST + place] != words[_ANSWER + place]]
        at = HEAD_BYTES + (1 - self.place) * PLACE_BYTES
        texts = [(place, number, self._read(at, number, REQUEST_MAX)) for place, number in numbers]
        return [PublishedRequest(place, number, text) for place, number, text in texts if text]


class LeavesTheBroken(ModelList):
    """Does not answer what a round that broke off has taken."""

    def _give_up(self) -> None:
        """Nothing."""


class StaysOnTheBoard(ModelList):
    """Serves itself, and leaves its request where the next combiner finds it."""

    def drop(self) -> None:
        """Nothing."""


class KnowsNoNumbers(ModelList):
    """Takes any whole text for the one it looks for."""

    def _write(self, at: int, number: int, text: bytes) -> None:
        super()._write(at, 0, text)

    def _read(self, at: int, number: int, length_max: int) -> bytes | None:
        return super()._read(at, 0, length_max)


class StartsAnew(ModelList):
    """Counts its requests from 1, whatever the owner before it has left."""

    def _inherited(self) -> int:
        return 0


class AnswersEarly(LogQueue):
    """Answers before it has synced."""

    def _serve_all(self, publications: ModelList, asked: Request, taken: list[PublishedRequest]) -> CommandAnswer:  # type: ignore[override]
        log, self._log = self._log, _Unsynced()  # type: ignore[assignment]
        try:
            return super()._serve_all(publications, asked, taken)
        finally:
            self._log = log


class _Unsynced:
    def sync(self, position: int) -> None:
        """Later, perhaps."""


class WritesAgain(LogQueue):
    """Writes again what may have been written."""

    def _look_up(self, asked: Request) -> CommandAnswer:
        return self._write_alone(asked)


class DropsLate(LogQueue):
    """Takes its own request from the list when it is served, not before."""

    def _serve(self, publications: ModelList, asked: Request) -> CommandAnswer:  # type: ignore[override]
        drop, publications.drop = publications.drop, lambda: None  # type: ignore[method-assign]
        try:
            return super()._serve(publications, asked)
        finally:
            publications.drop = drop  # type: ignore[method-assign]
            drop()


class ServesUnasked(ModelList):
    """Once it is the combiner it serves its own request, without looking whether the combiner before has."""

    def await_answer(self, patience: Callable[[], float], serve: Callable[[], Served]) -> Served | bytes:
        while self.answer() is None:
            if (served := self.combine(serve)) is not None:
                return served
            self.wait(1)
        return super().await_answer(patience, serve)


KILL = Limits(impatient=(0,), kills=1)
CONTROLS = {
    "requests are not marked as taken": KILL._replace(publications=MarksNothing),
    "a broken round is not cleared up": KILL._replace(publications=LeavesTheBroken),
    "who serves itself leaves its request": Limits(asks=2, impatient=(0,), publications=StaysOnTheBoard),
    "texts have no numbers": Limits(asks=2, impatient=(0,), weak=True, publications=KnowsNoNumbers),
    "an heir counts from 1": Limits(impatient=(1,), kills=1, mortal=(0,), heirs=True, publications=StartsAnew),
    "an ack is told before it is durable": KILL._replace(queue=AnswersEarly),
    "who does not know does not look": KILL._replace(queue=WritesAgain),
    "a combiner's own request stays on the list while it is served": Limits(kills=1, queue=DropsLate),
    "the answer is not looked for again": KILL._replace(publications=ServesUnasked),
    "there are two combiners": Limits(exclusive=False),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_without_the_safeguard_a_promise_is_broken(name: str) -> None:
    seen = found(CONTROLS[name])
    assert seen.trail, f"{seen.states} states and no breach"
    assert seen.trail[-1].startswith("==> ")
    assert "not expected" not in seen.trail[-1]
