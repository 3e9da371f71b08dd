"""What all tests share: a clean environment and repeatable property tests. Fixtures of one kind of test live beside them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="roq-tests-")  # clusters of tests keep no cards in people's homes
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
settings.register_profile("roq", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("roq")

GRACE_SECONDS = 30.0
"""What each phase of a test may take beyond the time limit."""
STDERR = pytest.StashKey[int]()
"""Where stacks are printed: the file itself, as what tests print is captured."""

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # begun in the background by a shell: what a test starts would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests are kept to the end: looking for garbage among them takes a third of the time here, and a second of a
    test now and then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that takes long first."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@contextlib.contextmanager
def bounded(item: pytest.Item) -> Iterator[None]:
    """A phase of a test that its time limit could not end (the exception came where it was swallowed, or clean-up hangs, for
    which there is no limit any more) ends its worker, with the stacks of all threads: pytest-xdist names the test and goes on
    with a new worker. For each phase anew, as pytest ends this after a failure and for a debugger."""
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=item.config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """See `bounded`."""
    with bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """See `bounded`."""
    with bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """See `bounded`."""
    with bounded(item):
        return (yield)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration comes from the test alone: ROQ_* of the person who runs it is hidden."""
    for name in os.environ:
        if name.startswith("ROQ_"):
            monkeypatch.delenv(name)
