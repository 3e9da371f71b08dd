"""Bugs that RoQ once had, put back one at a time: a simulation has to find each of them.

Most are rules of the pure machines that their models switch off as well; the others are what the changelog tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from roq.pubsub import links, order, path, replay_buffer
from roq.runtime.links import PublisherLink
from roq.tools.simulation import machines
from roq.tools.simulation.run import What

Bug = Callable[[], contextlib.AbstractContextManager[None]]


class Known(NamedTuple):
    """put_back: while it is entered the bug is there. seed: the first, from 0 on, whose run shows it. what: kind of run. cheap:
    the run takes seconds, so it is in `make test`."""

    put_back: Bug
    seed: int
    what: What = What.MESSAGES
    cheap: bool = False


@contextlib.contextmanager
def put(*table: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in table]
    for owner, name, value in table:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


@contextlib.contextmanager
def _without(machine: Any, *rules: str) -> Iterator[None]:
    """A machine of which rules are switched off, as its model does it."""
    init = machine.__init__
    defaults = init.__defaults__
    init.__defaults__ = tuple(type(one)(**dict.fromkeys(rules, False)) if hasattr(one, rules[0]) else one for one in defaults)
    try:
        yield
    finally:
        init.__defaults__ = defaults


def rule(machine: Any, *rules: str) -> Bug:
    return lambda: _without(machine, *rules)


def _reconnecting_link() -> contextlib.AbstractContextManager[None]:
    def again(link: Any, message: bytes) -> None:
        if message[:2] == b"\x01\xfe" and not link.welcomed:
            link.welcomed = True
            link._on_welcome(link)

    return put((links.ExchangeLink, "told", again), (links.ExchangeLink, "ended", PublisherLink.ended))


def _broken_for_good(kept: replay_buffer.ReplayBuffer) -> None:
    """The path is lost, and what was sent on it counts as arrived."""
    kept._marks.clear()


def _nothing_adopted(children: Any, name: str, pid: int, started: int, log_path: Path) -> bool:
    return False


BUGS: dict[str, Known] = {
    "repeats are delivered": Known(rule(order.OrderMachine, "drop_repeats"), 2, cheap=True),
    "gaps are not reported": Known(rule(order.OrderMachine, "report_gaps"), 2, cheap=True),
    "a new path overtakes the one before": Known(rule(order.OrderMachine, "hold_for_fin"), 0, cheap=True),
    "a publisher begins before it is welcome": Known(rule(path.PathMachine, "await_welcome"), 0, cheap=True),
    "a publisher's link connects again by itself": Known(_reconnecting_link, 0, cheap=True),
    "what was sent on a lost path is not sent again": Known(
        lambda: put((replay_buffer.ReplayBuffer, "broken", _broken_for_good)), 3, cheap=True
    ),
    "an HCM that comes back adopts nothing": Known(
        lambda: put((machines.SimulatedChildren, "adopt", _nothing_adopted)), 10, cheap=True
    ),
}
