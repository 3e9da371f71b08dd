"""What the master of a closed shard answers: it takes no more tasks, and says what it has taken. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from roq.errors import NotReady, RoqError, ShardClosed, TemporaryError
from roq.wire import master as wire
from roq.workqueue import codec
from roq.workqueue.contract import PUT_COUNT_MAX
from roq.workqueue.fold import Fold
from roq.workqueue.records import Use


def check(closed: bool) -> None:
    """Raises NotReady: what is asked has an answer that lasts only when nothing more is taken."""
    if not closed:
        raise NotReady("this shard does not know yet that it takes no more tasks")


def was_put(fold: Fold, producer: int, sequence: int) -> bool:
    """Whether this number was used, or may have been."""
    return fold.producers.seen(producer, sequence) is not Use.NEW


def refusal(fold: Fold, request: wire.Reserve | wire.PayloadStored, being_stored: bool) -> RoqError | None:
    """Why no payload is taken; None: it is, as its task was put before, or is about to be. A task with a key is not, unless it
    is being_stored already: whoever asks for its key is told to wait for those only."""
    if was_put(fold, request.producer, request.sequence):
        return None
    if isinstance(request, wire.PayloadStored):
        return ShardClosed() if request.task.dedup_key and not being_stored else None
    return NotReady("this task is being stored: ask again") if being_stored else ShardClosed()


def put_again(fold: Fold, request: wire.Put, shards: int) -> wire.TasksAdded:
    """What was put before is said once more, the rest is refused. Raises TemporaryError."""
    known, repeated, refused = list[tuple[int, str]](), list[int](), list[int]()
    for place, task in enumerate(request.tasks):
        number = request.producer, request.sequence + place
        use, same = fold.producers.seen(*number), fold.known_key(task.dedup_key)
        if use is Use.FORGOTTEN:
            raise TemporaryError("this put was repeated too late: whether it took effect is unknown")
        if same is not None and same != number:
            known.append((place, codec.task_id(same)))
        if use is Use.KNOWN:
            repeated.append(place)
        elif same is None:
            refused.append(place)
    return wire.TasksAdded(known, repeated, refused, shards)


def keys_found(fold: Fold, keys: Sequence[str]) -> wire.KeysFound:
    """The tasks that dedup keys stand for."""
    found = map(fold.known_key, keys[:PUT_COUNT_MAX])
    return wire.KeysFound([None if task is None else codec.task_id(task) for task in found])


def left(fold: Fold) -> wire.Counted:
    """What keeps it from being removed, but for payloads on their way."""
    now = fold.status(fold.clock)
    return wire.Counted(now.ready + now.delayed + now.leased + now.dead + now.outgoing + fold.known_keys())
