"""When somebody is told that something waits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from roq.errors import Unavailable
from roq.pubsub import outage


def test_an_outage_that_lasts_is_warned_of_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one = outage.Outage("the tapes can't be read now", queue="orders")
    warned = []
    with caplog.at_level("INFO", outage.__name__):
        for now in (1_000.0, 1_009.0, 1_010.0, 1_050.0, 1_070.0, 1_131.0, 1_140.0, 1_141.0):
            one.failed(Unavailable("nobody leads"))
            if caplog.records[-1].levelname == "WARNING":
                warned.append(now)
    assert warned == [1_010.0, 1_070.0, 1_141.0], "a new one is borne for a moment first"
    fields: Any = caplog.records[-1]
    assert fields.fields == {"queue": "orders", "reason": "nobody leads"}
    assert fields.getMessage().startswith("the tapes can't be read now: waiting, trying again")
