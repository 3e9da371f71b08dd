"""Bugs of groups that RoQ's models switch on, put back one at a time."""

from __future__ import annotations

from functools import partial

from roq.tools.simulation.run import What
from roq.workqueue import records
from roq.workqueue.fold import Fold
from roq.workqueue.master.intake import GroupIntake
from roq.workqueue.ready import StoredTask
from tests.simulation.known_bugs import Known, put


def _always_new(one: records.Sender, number: int) -> bool:
    """Publishers' numbers say nothing."""
    one.highest = max(one.highest, number)
    return True


def _nobody_waits(one: Fold, task: StoredTask) -> bool:
    """Of a topic all may be taken at once."""
    task.ordered = False
    one.fed_bytes += len(task.payload)  # type: ignore[arg-type]
    return True


def _ahead(one: GroupIntake, done: dict[str, int]) -> None:
    """The position is kept an entry before what lies up to there."""
    one._service.feed_position({exchange: entry + 1 for exchange, entry in done.items()}, one.now())
    one._term.turn()


BUGS: dict[str, Known] = {
    "a message comes into a group twice": Known(partial(put, (records.Sender, "ascend", _always_new)), 1, What.GROUPS),
    "a topic's messages don't wait for each other": Known(partial(put, (Fold, "_is_first", _nobody_waits)), 0, What.GROUPS),
    "a group's position is ahead of its messages": Known(partial(put, (GroupIntake, "reached", _ahead)), 9, What.GROUPS),
}
