"""A StopEvent wakes who waits on it, in programs of any size. On connections: tests/integration/test_zmtp_sockets.py."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator

import pytest

from roq.runtime.blocking_connection import StopEvent

DESCRIPTORS = 1024  # select() takes no number from here on


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """All below DESCRIPTORS are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * DESCRIPTORS)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < DESCRIPTORS:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_waiting_in_a_program_with_many_descriptors() -> None:
    event = StopEvent()
    assert event.fileno() >= DESCRIPTORS
    begun = time.monotonic()
    assert not event.wait(0.05)
    assert time.monotonic() - begun >= 0.05
    assert not event.wait(-1.0), "no time at all"
    setter = threading.Timer(0.05, event.set)
    setter.start()
    assert event.wait(20.0)
    assert time.monotonic() - begun < 10.0
    setter.join()
    assert event.wait(20.0), "for ever"
