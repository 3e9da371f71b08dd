"""To which Exchanges a subscriber stays attached, also to those that its Monitor does not list."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

from roq.coordination.locate import GcmClient
from roq.pubsub.attachments import LISTING_SECONDS, Attachments
from roq.pubsub.subscriber import Subscriber
from roq.wire.monitor import ExchangeAddress

KNOWN, OTHER = (ExchangeAddress(name, "127.0.0.1", 1, 2, 1) for name in ("known", "other"))


def attached() -> Attachments:
    """To KNOWN, and welcomed at 10 s by a Monitor that has not heard of it."""

    def connect(exchange: ExchangeAddress) -> Any:
        return SimpleNamespace(exchange=exchange)

    made = Attachments(connect)
    made.welcome(0.0)
    made.take(1, [KNOWN])
    made.attach()
    made.welcome(10.0)
    made.take(1, [])
    return made


def test_who_is_not_listed_by_a_new_monitor_is_left_when_that_had_its_time() -> None:
    one = attached()
    assert not one.leave_unlisted(10.0 + LISTING_SECONDS - 0.1)
    assert [left.exchange for left in one.leave_unlisted(10.0 + LISTING_SECONDS)] == [KNOWN]
    assert not one.by_token


def test_what_a_monitor_said_before_that_is_not_its_list() -> None:
    """It was heard last before it had its time, and may have listed everybody since: to others, for we are cut off from it."""
    one = attached()
    heard = 10.0 + LISTING_SECONDS - 0.1
    assert not one.leave_unlisted(heard), "however long ago that is"
    one.take(2, [KNOWN, OTHER])
    assert not one.leave_unlisted(20.0)
    one.attach()
    assert [attachment.exchange for attachment in one.by_token.values()] == [KNOWN, OTHER]


def test_another_life_of_an_exchange_is_listed_at_once() -> None:
    one = attached()
    one.take(2, [ExchangeAddress("known", "127.0.0.1", 1, 2, 3)])
    assert [left.exchange for left in one.leave_unlisted(10.0)] == [KNOWN]


async def test_a_subscriber_that_is_cut_off_from_its_monitor_leaves_nobody() -> None:
    subscriber = Subscriber(GcmClient("127.0.0.1:1"), "q", (), lambda lost: None)
    subscriber._exchanges = one = attached()
    (attachment,) = one.by_token.values()
    vars(attachment).update(frames=deque(), closed=False, take_rest=lambda: None, close=lambda: None)
    now = time.monotonic()
    one._listing_until = now - 1.0
    subscriber._membership._heard = now - 2.0
    subscriber._leave_unlisted(now)
    assert one.by_token
    subscriber._membership._heard = now
    subscriber._leave_unlisted(now)
    assert not one.by_token
