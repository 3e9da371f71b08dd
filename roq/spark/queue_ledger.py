"""The ledger of a stream: its open manifests, their leases kept alive, acked when Spark has committed them, then forgotten.

    lock                       held by the one process that runs the stream
    stream.json                the stream's id, so that a checkpoint is not used with another folder, and its queue
    committed.json             the highest number that was acked
    {number}.….arrow           manifests (queue_files.py)
    done-{number}.json         tasks that Spark has committed, but whose lease was over before the ack

A task whose lease was over may be leased again. If it is one of an open manifest, the new lease takes the place of the old one;
if it is done, it is acked at once. So as long as the stream is the queue's only reader, a row comes once however often the
driver dies; with other readers, at least once.

Done are tasks that Spark has committed and the queue does not know: their leases were over before the ack. Whoever leases one
again acks it. As long as nobody has, its id is noted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from roq.errors import CallError, Closed, ManifestGone, ManifestsTaken, RoqError, StorageFailed, TemporaryError
from roq.ids import new_token
from roq.runtime.backoff import delays
from roq.spark.queue_crash import crash_point
from roq.spark.queue_files import Manifest, create_note, manifests, write_manifest, write_note
from roq.spark.queue_options import lies_within
from roq.wire.task import LeasedTask, Settlement
from roq.workqueue.address import same_queue
from roq.workqueue.contract import Backend

SETTLE_COUNT = 4000  # settlements in one trip, and one sync
RENEW_SHARE = 3  # a lease is renewed when a third of it is over
LOCK_SECONDS = 30.0  # a driver that was killed leaves its Python processes to find out by themselves
FAIL_SECONDS = 120.0  # a queue that is away, or takes no ack, for longer ends the stream
KEEP_SECONDS = 7 * 86_400.0  # a task that nobody leased again for so long is another reader's
log = logging.getLogger(__name__)


class DoneTasks:
    """Of one folder of manifests. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notes: dict[str, Path] = {}  # id → where it is noted
        self._left: dict[Path, set[str]] = {}
        self._noted: dict[Path, float] = {}  # Unix seconds
        for path in folder.glob("done-*.json"):
            self._remember(path, msgspec.json.decode(path.read_bytes(), type=list[str]), path.stat().st_mtime)
        self._prune()

    def __contains__(self, id: str) -> bool:
        return id in self._notes

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, number: int, ids: Sequence[str]) -> None:
        """These tasks of a manifest are done. Durable on return; what has been here for too long goes."""
        path = self._folder / f"done-{number}.json"
        write_note(path, ids)
        self._remember(path, ids, time.time())
        self._prune()

    def acked(self, ids: Iterable[str]) -> None:
        """The queue knows now: it will not lease these again."""
        for id in ids:
            if (path := self._notes.pop(id, None)) is not None:
                self._left[path].discard(id)
                if not self._left[path]:
                    self._forget(path)

    def _remember(self, path: Path, ids: Iterable[str], noted: float) -> None:
        self._left[path], self._noted[path] = set(ids), noted
        self._notes.update(dict.fromkeys(self._left[path], path))

    def _prune(self) -> None:
        oldest = time.time() - KEEP_SECONDS
        for path in [path for path, noted in self._noted.items() if noted < oldest]:
            self._forget(path)

    def _forget(self, path: Path) -> None:
        del self._noted[path]
        for id in self._left.pop(path):
            if self._notes.get(id) == path:
                del self._notes[id]
        path.unlink(missing_ok=True)


class _Stream(msgspec.Struct, frozen=True):
    id: str
    queue: str = ""  # its address in one form (queue_options.py)


class _Committed(msgspec.Struct, frozen=True):
    number: int


class _Open:
    """An open manifest. moved: rows with another token than the file's. renewed: monotonic."""

    __slots__ = ("_rows", "manifest", "moved", "renewed")

    def __init__(self, manifest: Manifest, renewed: float) -> None:
        self.manifest, self.renewed = manifest, renewed
        self.moved: dict[int, str] = {}
        self._rows: dict[str, int] | None = None

    def row(self, id: str) -> int | None:
        """Where a task is in it."""
        if self._rows is None:
            self._rows = {id: row for row, id in enumerate(self.manifest.ids())}
        return self._rows.get(id)

    def tokens(self) -> list[str]:
        """As of now."""
        tokens = self.manifest.tokens()
        for row, token in self.moved.items():
            tokens[row] = token
        return tokens


class Ledger:
    """Of one folder and one queue (QueueOptions.queue). on_error: called once if the keeper must stop. Raises ManifestsTaken if
    another process has the folder for long, ManifestGone if it is another queue's."""

    def __init__(
        self, folder: Path, queue: str, backend: Backend, lease_seconds: float, on_error: Callable[[RoqError], None]
    ) -> None:
        self.folder, self._backend, self._lease_seconds = folder, backend, lease_seconds
        self._look_seconds = lease_seconds / RENEW_SHARE / 4  # between two looks whether a lease is to be renewed
        self._on_error = on_error
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = _locked(folder / "lock")
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        try:
            self.stream = _stream(folder, queue)
            self.committed = _committed(folder)
            former = manifests(folder)
            self._done = DoneTasks(folder)
        except BaseException:
            os.close(self._lock_file)
            raise
        self._open = {number: _Open(manifest, float("-inf")) for number, manifest in former.items()}
        self._former = set(self._open)  # open ones of a driver before this one
        self.highest = max([self.committed, *self._open])
        self._to_commit = self.committed
        self._closed = False
        self._keeper = threading.Thread(target=self._keep, name="roq-manifests", daemon=True)
        self._keeper.start()

    # --- manifests ----------------------------------------------------------------------------------------------------

    def add(self, tasks: Sequence[LeasedTask[bytes]], leased_at: float) -> Manifest:
        """A manifest of these, durable on return. leased_at: monotonic."""
        manifest = write_manifest(self.folder, self.highest + 1, tasks)
        with self._news:
            self.highest = manifest.number
            self._open[manifest.number] = _Open(manifest, leased_at)
        crash_point("source.manifest")
        return manifest

    def after(self, number: int) -> list[Manifest]:
        """Open manifests above a number, in order."""
        with self._lock:
            return [one.manifest for one in self._open.values() if one.manifest.number > number]

    def between(self, start: int, end: int) -> list[Manifest]:
        """Manifests above `start` up to `end`. Raises ManifestGone if one is not there."""
        with self._lock:
            missing = [number for number in range(start + 1, end + 1) if number not in self._open]
            if missing:
                raise ManifestGone(
                    f"manifest {missing[0]} of stream {self.stream} is not in {self.folder} any more, but Spark's checkpoint "
                    f"wants manifests {start + 1} to {end}: its tasks were acked, or the folder was emptied. Restore the "
                    "folder, or begin with a new checkpoint"
                )
            return [self._open[number].manifest for number in range(start + 1, end + 1)]

    def rows(self) -> int:
        """Rows of all open manifests."""
        with self._lock:
            return sum(one.manifest.file.rows for one in self._open.values())

    def sift(self, tasks: list[LeasedTask[bytes]]) -> tuple[list[LeasedTask[bytes]], list[LeasedTask[bytes]]]:
        """Those that are new to the stream; those that are done, to be acked. Leases of tasks in open manifests are noted."""
        with self._lock:
            careful = bool(self._former or self._done)
            if not careful and all(task.attempt == 1 for task in tasks):
                return tasks, []
            new: list[LeasedTask[bytes]] = []
            done: list[LeasedTask[bytes]] = []
            for task in tasks:
                if task.id in self._done:
                    done.append(task)
                elif not ((careful or task.attempt > 1) and self._moved(task)):
                    new.append(task)
            return new, done

    def acked(self, done: Sequence[LeasedTask[bytes]], answers: Sequence[str | None]) -> None:
        """What the queue said to the acks of tasks that `sift` found done."""
        with self._lock:
            self._done.acked(task.id for task, answer in zip(done, answers, strict=True) if answer is not None)

    def _moved(self, task: LeasedTask[bytes]) -> bool:
        """Whether it is a task of an open manifest, which has this lease from now on."""
        for one in self._open.values():
            row = one.row(task.id)
            if row is not None:
                one.moved[row] = task.token
                return True
        return False

    # --- the end of manifests -----------------------------------------------------------------------------------------

    def commit(self, number: int) -> None:
        """Spark has committed everything up to this manifest. Returns at once."""
        with self._news:
            if number > self._to_commit:
                self._to_commit = number
                self.highest = max(self.highest, number)
                self._news.notify_all()

    def wait_acked(self, seconds: float) -> bool:
        """Wait until everything committed is acked; whether it is."""
        with self._news:
            return self._news.wait_for(lambda: not self._due() or self._closed, seconds)

    def drop(self, number: int) -> None:
        """Give the tasks of manifests above this number back: Spark never heard of them."""
        for manifest in reversed(self.after(number)):
            with self._lock:
                one = self._open.pop(manifest.number)
            tokens = one.tokens()
            os.unlink(manifest.file.path)
            with suppress(TemporaryError):  # then their leases run out
                self._settle_all([Settlement.release(token) for token in tokens])

    def close(self) -> None:
        """Stop the keeper and let go of the folder. The backend is the caller's."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._keeper.join(LOCK_SECONDS)
        os.close(self._lock_file)

    def _due(self) -> list[_Open]:
        return [one for number, one in self._open.items() if number <= self._to_commit]

    # --- the keeper's thread ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        pauses, failing_since = delays(0.1, 5.0), 0.0
        while not self._closed:
            try:
                self._round()
                pauses, failing_since = delays(0.1, 5.0), 0.0
            except Closed:
                return
            except StorageFailed as error:
                self._on_error(error)
                return
            except TemporaryError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() > failing_since + FAIL_SECONDS:
                    self._on_error(error)
                    return
                log.warning("%s: leases can't be acked or renewed for now: %s", self.folder, error)
                with self._news:
                    self._news.wait_for(lambda: self._closed, min(next(pauses), self._look_seconds))
            except Exception as error:  # the thread's boundary: the query has to end
                log.exception("%s: the thread that keeps leases ends", self.folder)
                self._on_error(error if isinstance(error, RoqError) else StorageFailed(f"{self.folder}: {error!r}"))
                return

    def _round(self) -> None:
        """Renew first: what a driver before this one leased may be old, and an ack that fails must cost no other lease."""
        failure: TemporaryError | None = None
        try:
            self._renew()
        except TemporaryError as error:
            failure = error
        for one in self._due_now() if failure else self._wait():
            self._finish(one)
        if failure is not None:
            raise failure

    def _wait(self) -> list[_Open]:
        with self._news:
            self._news.wait_for(lambda: self._closed or self._due(), self._look_seconds)
            return [] if self._closed else self._due()

    def _due_now(self) -> list[_Open]:
        with self._lock:
            return self._due()

    def _finish(self, one: _Open) -> None:
        """Ack what a committed manifest holds, and forget it."""
        number = one.manifest.number
        crash_point("source.committed")
        with self._lock:
            tokens = one.tokens()
        rows, gone = list(range(len(tokens))), set[int]()
        while rows:
            answers = self._settle_all([Settlement.ack(tokens[row]) for row in rows])
            gone.difference_update(rows)
            gone.update(row for row, answer in zip(rows, answers, strict=True) if answer is None)
            with self._news:
                rows = [row for row in gone if one.moved.get(row, tokens[row]) != tokens[row]]  # leased again meanwhile
                for row in rows:
                    tokens[row] = one.moved[row]
                if not rows:
                    self._lose(one, sorted(gone))
        crash_point("source.acked")
        write_note(self.folder / "committed.json", _Committed(number))
        with self._news:
            self.committed = number
            self._open.pop(number, None)
            self._former.discard(number)
            self._news.notify_all()
        os.unlink(one.manifest.file.path)
        crash_point("source.forgotten")

    def _lose(self, one: _Open, lost: list[int]) -> None:
        """These rows are done, and the queue does not know."""
        if lost:
            ids = one.manifest.ids()
            self._done.add(one.manifest.number, [ids[row] for row in lost])
            log.warning("%s: %d leases were over before their rows were committed", self.folder, len(lost))
        self._open.pop(one.manifest.number, None)

    def _renew(self) -> None:
        """Extend what is older than a third of a lease."""
        before = time.monotonic() - self._lease_seconds / RENEW_SHARE
        with self._lock:
            old = [one for one in self._open.values() if one.renewed < before]
        for one in old:
            now = time.monotonic()
            with self._lock:
                tokens = one.tokens()
            answers = self._settle_all([Settlement.extend(token, self._lease_seconds) for token in tokens])
            with self._lock:
                one.renewed = now
                for row, (token, answer) in enumerate(zip(tokens, answers, strict=True)):
                    if answer and answer != token and one.moved.get(row, token) == token:
                        one.moved[row] = answer

    def _settle_all(self, settlements: Sequence[Settlement]) -> list[str | None]:
        answers: list[str | None] = []
        for start in range(0, len(settlements), SETTLE_COUNT):
            part = settlements[start : start + SETTLE_COUNT]
            try:
                answers += self._backend.settle(part)
            except Closed:
                raise
            except CallError:  # tokens of a queue that was made anew
                log.warning("%s: the queue does not know these leases", self.folder, exc_info=True)
                answers += [None] * len(part)
        return answers


def _locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline, pauses = time.monotonic() + LOCK_SECONDS, delays(0.02, 0.5)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise ManifestsTaken(
                    f'{path.parent} is in use by another stream: give each stream of a queue its own .option("manifests", …)'
                ) from None
            time.sleep(next(pauses))


def _stream(folder: Path, queue: str) -> str:
    """The stream's id, after a look at whose manifests these are. Raises ManifestGone."""
    path = folder / "stream.json"
    create_note(path, _Stream(new_token(), queue))
    kept = msgspec.json.decode(path.read_bytes(), type=_Stream)
    if kept.queue and not same_queue(kept.queue, queue) and not lies_within(folder, queue):
        raise ManifestGone(
            f"{folder} holds the manifests of a stream of {kept.queue}, not of {queue}: give each stream of each queue its own "
            'folder by .option("manifests", …), and its own checkpoint'
        )
    if kept.queue != queue:
        write_note(path, _Stream(kept.id, queue))
    return kept.id


def _committed(folder: Path) -> int:
    try:
        return msgspec.json.decode((folder / "committed.json").read_bytes(), type=_Committed).number
    except FileNotFoundError:
        return 0
