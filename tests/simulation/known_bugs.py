"""Bugs that RoQ once had, put back one at a time: a simulation has to find each of them.

Most are rules of the pure machines that their models switch off as well; the others are what the changelog tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import roq.client.link
import roq.coordination.multi
import roq.coordination.session
import roq.coordination.watch
import roq.monitor.membership
import roq.monitor.process
import roq.runtime.child
import roq.runtime.sockets
from roq.client import lane, order, path, publisher, ring, subscriber
from roq.coordination.operations import ANY_VERSION, Check
from roq.monitor.former import FormerLives
from roq.simulation import machines
from roq.wire.assignment import Overflow

Bug = Callable[[], contextlib.AbstractContextManager[None]]


class Known(NamedTuple):
    """put_back: while it is entered the bug is there. seed: from which on the runs are made, of which one shows it."""

    put_back: Bug
    seed: int


@contextlib.contextmanager
def _put(*table: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in table]
    for owner, name, value in table:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


@contextlib.contextmanager
def _without(module: Any, machine: Any, *rules: str) -> Iterator[None]:
    """A machine of which rules are switched off, as its model does it."""
    init = machine.__init__
    defaults = init.__defaults__
    init.__defaults__ = (*defaults[:-1], module.Safeguards(**dict.fromkeys(rules, False)))
    try:
        yield
    finally:
        init.__defaults__ = defaults


def _rule(module: Any, machine: Any, *rules: str) -> Bug:
    return lambda: _without(module, machine, *rules)


async def _nobody_is_fenced(former: Any, term: int, expect: Any) -> None:
    return


def _unfenced() -> contextlib.AbstractContextManager[None]:
    return _put(
        (roq.monitor.process, "fence", _nobody_is_fenced),
        (roq.monitor.process, "FormerLives", lambda lives, now: FormerLives([], now)),
        (roq.runtime.child.Lease, "check", lambda lease: None),
    )


def _hasty_monitor() -> contextlib.AbstractContextManager[None]:
    names = ("REJOIN_SECONDS", "NOBODY_SECONDS", "NEWCOMER_SECONDS")
    return _put(*((roq.monitor.membership, name, 0.0) for name in names))


def _impatient_hold() -> contextlib.AbstractContextManager[None]:
    return _put((subscriber, "HOLD_SECONDS", 0.05), (subscriber, "HOLD_MAX_SECONDS", dict.fromkeys(Overflow, 0.05)))


def _reconnecting_link() -> contextlib.AbstractContextManager[None]:
    def again(link: Any, message: bytes) -> None:
        if message[:2] == b"\x01\xfe" and not link.welcomed:
            link.welcomed = True
            link._on_welcome(link)

    return _put(
        (roq.client.link, "publisher_socket", roq.runtime.sockets.probe_socket), (roq.client.link.ExchangeLink, "_heard", again)
    )


async def _confirmed_at_once(lane: Any, timeout_seconds: float) -> None:
    return


def _broken_for_good(kept: ring.Ring) -> None:
    """The path is lost, and what was sent on it counts as arrived."""
    kept._marks.clear()


def _deaf_watch(watch: Any) -> None:
    return


BUGS: dict[str, Known] = {
    "older messages of another topic follow a replay": Known(_rule(order, order.OrderMachine, "order_topics"), 0),
    "repeats are delivered": Known(_rule(order, order.OrderMachine, "drop_repeats"), 0),
    "gaps are not reported": Known(_rule(order, order.OrderMachine, "report_gaps"), 0),
    "a new path overtakes the one before": Known(_rule(order, order.OrderMachine, "hold_for_fin"), 0),
    "who was passed by trusts strangers": Known(_rule(order, order.OrderMachine, "doubt_strangers"), 0),
    "unconfirmed frames are forgotten by age, unsaid": Known(
        _rule(ring, ring.Ring, "keep_unconfirmed", "know_what_is_gone", "open_before_unknown"), 0
    ),
    "a MARK confirms what another path carried": Known(_rule(ring, ring.Ring, "paths_in_order"), 0),
    "a publisher begins before it is welcome": Known(_rule(path, path.PathMachine, "await_welcome"), 0),
    "the old link is closed before its FIN is confirmed": Known(_rule(path, path.PathMachine, "keep_old_link"), 0),
    "a path ends behind the next one's OPEN": Known(_rule(path, path.PathMachine, "fin_before_open"), 0),
    "what was replaced is not fenced": Known(_unfenced, 0),
    "a new Monitor serves at once": Known(_hasty_monitor, 0),
    "the hold runs out before the FIN comes": Known(_impatient_hold, 0),
    "a publisher's link connects again by itself": Known(_reconnecting_link, 0),
    "beacons are sent once": Known(lambda: _put((publisher.Publisher, "_look_after_beacons", lambda one: None)), 0),
    "a fenced Monitor names nobody": Known(lambda: _put((roq.monitor.process.Monitor, "_fenced", lambda one, term: None)), 0),
    "flush says at once that all is well": Known(lambda: _put((lane.Lane, "confirm", _confirmed_at_once)), 0),
    "what was sent on a lost path is not sent again": Known(lambda: _put((ring.Ring, "broken", _broken_for_good)), 0),
    "watches are not read again after a reconnection": Known(
        lambda: _put(
            (roq.coordination.watch.Watch, "reread", _deaf_watch), (roq.coordination.session, "REREAD_SECONDS", 600.0)
        ),
        0,
    ),
    "an HCM that comes back adopts nothing": Known(
        lambda: _put((machines.Children, "adopt", lambda children, name, pid, started, log_path: False)), 0
    ),
    "writes of a former reign are not refused": Known(
        lambda: _put((roq.coordination.multi, "Check", lambda path, version: Check(path, ANY_VERSION))), 0
    ),
}
