"""Which task to lease next, without listing the folder for every lease.

One listing gives a window of the first tasks that may be leased, in order; later leases take from it until it is empty. What
another process took meanwhile costs one failed open; after a lost race the next one is drawn from a few more, so that workers
who listed the same folder spread. Nothing leasable: the earliest due time is remembered, and the folder is listed again when
that comes, when the folder changed, or after a few seconds (a network file system may hide changes for a while).

Listing a million names takes most of a second: big folders in which nothing was found are listed for at most a tenth of the
time, so what others put or let go of there is found seconds late. Tasks this process put itself are known without a listing.
"""

from __future__ import annotations

import heapq
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from roq.workqueue.file_queue import names

WINDOW_NAMES = 50_000  # 5 MB
OWN_NAMES = 10_000  # put by this process and not listed yet
SPREAD_NAMES = 64  # to draw from after lost races
RELIST_SECONDS = 5.0  # at the latest
SETTLED_SECONDS = 2.0  # a folder changed so shortly before its listing may have changed since, within its clock's tick
CHEAP_SECONDS = 0.005  # a listing this short may be repeated at once
LISTING_SHARE = 10  # of the time, one part at most is spent listing
_SAMPLE = 2_000


def first(texts: list[str], count: int, key: Callable[[str], str]) -> list[str]:
    """About the `count` smallest, sorted: all of a short list, and of a long one those below a threshold found by sampling."""
    if len(texts) > 2 * count:
        sample = sorted(map(key, random.sample(texts, _SAMPLE)))
        threshold = sample[min(_SAMPLE - 1, _SAMPLE * count // len(texts) + 10)]
        texts = [text for text in texts if key(text) <= threshold]
    return sorted(texts, key=key)


class Candidates:
    """The window over some folders. clock: Unix seconds. Any thread."""

    def __init__(self, folders: Sequence[str], clock: Callable[[], float]) -> None:
        self._folders = folders
        self._clock = clock
        self._lock = threading.Lock()
        self._window: list[str] = []  # last one first
        self._own: list[tuple[str, str]] = []  # a heap of (order, name)
        self._changed: tuple[int, ...] = ()  # modification times when listed
        self._listed = float("-inf")  # monotonic, end of the last listing
        self._cost = 0.0  # seconds the last listing took
        self._cut = False  # the window did not take all that was leasable
        self._due: int | None = None  # of the earliest task that was not leasable
        self._unknown = names.stamp(0)  # time of the listing, for ids of python-task-queue
        self._lost = 0  # races in a row
        self.listings = 0  # so far

    def take(self, listings_max: int) -> str | None:
        """The next name to try, None if nothing is leasable as far as known. listings_max: list no more when `listings`
        reached this."""
        with self._lock:
            if self.listings < listings_max and (self._stale() if self._window else self._may_list()):
                self._list()
            if not self._window or (self._own and self._own[0][0] < self._order(self._window[-1])):
                return heapq.heappop(self._own)[1] if self._own else None
            self._spread()
            return self._window.pop()

    def tell(self, *, lost: bool) -> None:
        """How it went with the name taken."""
        self._lost = self._lost + 1 if lost else 0

    def add(self, added: Iterable[str]) -> None:
        """Names this process made leasable."""
        with self._lock:
            for text in added:
                if len(self._own) >= OWN_NAMES:
                    return
                heapq.heappush(self._own, (self._order(text), text))

    def clear(self) -> None:
        """Forget everything: the next `take` lists."""
        with self._lock:
            self._window, self._own = [], []
            self._listed, self._cost = float("-inf"), 0.0

    def wait_seconds(self) -> float:
        """How long nothing becomes due that is known of."""
        return float("inf") if self._due is None else max(0.0, self._due - self._clock())

    def _spread(self) -> None:
        reach = min(1 << self._lost, SPREAD_NAMES, len(self._window)) if self._lost else 1
        if reach > 1:
            other = -random.randint(1, reach)
            self._window[-1], self._window[other] = self._window[other], self._window[-1]

    def _order(self, text: str) -> str:
        return names.order(text, self._unknown)

    def _stale(self) -> bool:
        """Others may have put tasks of a higher priority since."""
        return time.monotonic() - self._listed > max(RELIST_SECONDS, 2 * LISTING_SHARE * self._cost)

    def _may_list(self) -> bool:
        if self._cut:
            return True  # more is known to be leasable
        since = time.monotonic() - self._listed
        if self._cost > CHEAP_SECONDS and since < self._cost * LISTING_SHARE:
            return False
        due = self._due is not None and self._due <= self._clock()
        return due or since > RELIST_SECONDS or self._modified() != self._changed

    def _modified(self) -> tuple[int, ...]:
        """Modification times, read through an open folder so that a network file system asks its server."""
        found = []
        for folder in self._folders:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                found.append(os.fstat(fd).st_mtime_ns)
            finally:
                os.close(fd)
        return tuple(found)

    def _list(self) -> None:
        begun = time.monotonic()
        modified = self._modified()
        now = self._clock()
        ready, later = names.split_due([text for folder in self._folders for text in os.listdir(folder)], int(now))
        self._due = min((int(text[:-43]) for text in later), default=None)
        self._unknown = names.stamp(int(now * 1000))
        window = first(ready, WINDOW_NAMES, self._order)
        window.reverse()
        self._window, self._own = window, []
        self._cut = len(window) < len(ready)
        settled = all(time_ns < (now - SETTLED_SECONDS) * 1e9 for time_ns in modified)
        self._changed = modified if settled else ()
        self.listings += 1
        self._listed = time.monotonic()
        self._cost = self._listed - begun
