"""A client whose master and GCM are silent: every thread has its answer, or its error, in its own time.

What an answering master does is in test_master.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from roq.errors import RoqError, Unavailable
from roq.wire import master as wire
from roq.workqueue.master_link import SILENCE_MAX_SECONDS, MasterLink
from tests.integration.zmtp_rig import listening, mute_router

PATIENCE_SECONDS = 1.5
THREADS = 20


@pytest.fixture
def link() -> Iterator[MasterLink]:
    """Its ZooKeeper takes connections and says nothing."""
    with listening() as silent:
        made = MasterLink(f"127.0.0.1:{silent.getsockname()[1]}/RoQ", "w", PATIENCE_SECONDS)
        try:
            yield made
        finally:
            made.close()


def ask_in_threads(link: MasterLink) -> list[tuple[float, RoqError]]:
    """Seconds and error of each of THREADS calls at once."""
    ends: list[tuple[float, RoqError]] = []

    def ask() -> None:
        began = time.monotonic()
        try:
            link.ask(lambda again: wire.Hello(), wire.Welcome)
        except RoqError as error:
            ends.append((time.monotonic() - began, error))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def test_without_a_gcm_nobody_waits_for_the_others(link: MasterLink) -> None:
    ends = ask_in_threads(link)
    assert len(ends) == THREADS
    assert all(type(error) is Unavailable and "'w'" in str(error) for _, error in ends), ends
    assert max(seconds for seconds, _ in ends) < PATIENCE_SECONDS + 1.0, sorted(ends, key=lambda end: end[0])


def test_with_a_silent_master_and_no_gcm_neither(link: MasterLink) -> None:
    with mute_router() as port:
        link._endpoint = f"tcp://127.0.0.1:{port}"
        ends = ask_in_threads(link)
    assert len(ends) == THREADS
    assert all(type(error) is Unavailable and "'w'" in str(error) for _, error in ends), ends
    assert max(seconds for seconds, _ in ends) < PATIENCE_SECONDS + SILENCE_MAX_SECONDS, sorted(ends, key=lambda end: end[0])
