"""`roq task move FROM TO`: carries tasks from one queue to another while workers work on both.

A batch is leased from FROM, put to TO, then acked at FROM, so nothing is lost whenever this process dies; what it had put and
not acked is put again by the next move, under the same dedup key (the task's id in FROM), and so is the same task in TO while
TO remembers the key. Priorities and the order go along; a delayed task is carried when its delay is over. Dead letters stay.
A new TO is made with FROM's settings; one that exists keeps its own, and that is said.
"""

from __future__ import annotations

import signal
import threading
from contextlib import closing
from typing import Annotated

import msgspec
import typer

from roq.blocking import Task, WorkQueue, open_queue
from roq.cli.address import JsonOption
from roq.cli.completion import work_queue_names
from roq.cli.output import counted, print_json, say
from roq.cli.progress import Told, progressing
from roq.cli.task_address import full_address, opened, settings_text
from roq.errors import CallError, WorkQueueConflict
from roq.wire.headers import OWN_PREFIX
from roq.wire.store import ENTRY_BYTES_MAX
from roq.wire.task import NewTask
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import parse, same_queue
from roq.workqueue.contract import LEASE_COUNT_MAX
from roq.workqueue.stop_signals import stopped_by_signals

LEASE_SECONDS = 60.0  # of a batch; shorter than any sensible dedup window
FIRST_COUNT = 10  # tasks of the first batch, which tells how big they are
BATCH_BYTES = 8 * 1024 * 1024  # aimed at from then on
WAIT_SECONDS = 1.0  # for tasks to come while FROM is not empty
TERMINATED = 128 + signal.SIGTERM


class TasksMoved(msgspec.Struct):
    """What a move did. again: tasks whose lease at FROM ended before they were acked there; they may be done twice.
    dead_left: dead letters of FROM."""

    moved: int = 0
    again: int = 0
    dead_left: int = 0
    stopped: bool = False


def move(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help="An address, as of other commands.", show_default=False, autocompletion=work_queue_names
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="Where to; made with the settings of FROM if it is new.", show_default=False)
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Go on when it is empty, until Ctrl-C.")] = False,
    json: JsonOption = False,
) -> None:
    """Carry all tasks of a queue to another one, at least once each, while workers go on. Ends when FROM is empty."""
    if same_queue(full_address(source), full_address(target)):
        raise CallError("FROM and TO are the same queue")
    done = TasksMoved()
    stop = threading.Event()  # the batch in hand is finished first
    with (
        opened(source) as giver,
        closing(_taker(full_address(target), giver.settings)) as taker,
        stopped_by_signals(stop.set),
    ):
        try:
            with progressing("moving") as told:
                _carry(giver, taker, done, stop, told, follow=follow)
            done.dead_left = giver.status().dead
        finally:
            letters = f"; {done.dead_left} dead letters stay" if done.dead_left else ""
            twice = f"; {done.again} may be done twice" if done.again else ""
            say(f"roq task move: {counted(done.moved, 'task')}{twice}{letters}")
            if json:
                print_json(done)
    if done.stopped and not follow:
        raise typer.Exit(TERMINATED)


def _taker(address: str, settings: TaskSettings) -> WorkQueue:
    """TO, open. What its address asks for counts more than FROM's settings; stores and standbys are its cluster's matter."""
    place = parse(address)
    asked = place.options.given()
    kept = {name: getattr(settings, name) for name in TaskSettings.__struct_fields__ if name not in asked}
    if place.scheme == "roq" and "payload_bytes_max" in kept:
        kept["payload_bytes_max"] = min(kept["payload_bytes_max"], ENTRY_BYTES_MAX)  # no cluster takes more
    queue = open_queue(address, **kept)
    try:
        queue.open()
    except WorkQueueConflict:
        queue = open_queue(address)
        queue.open()
        say(f"roq task move: TO keeps its settings: {settings_text(queue.settings)}; FROM has: {settings_text(settings)}")
    return queue


def _headers(task: Task) -> dict[str, str | bytes]:
    """Those of a group's message say its topic; what it said to groups alone is left out."""
    headers = {name: value for name, value in task.headers.items() if not name.startswith(OWN_PREFIX)}
    return {"topic": task.topic, **headers} if task.topic else headers


def _carry(
    giver: WorkQueue, taker: WorkQueue, done: TasksMoved, stop: threading.Event, progress: Told, *, follow: bool
) -> None:
    count, wait, told = FIRST_COUNT, 0.0, False
    status = giver.status()
    total = status.ready + status.delayed + status.leased
    while not stop.is_set():
        tasks = giver.lease(LEASE_SECONDS, count, wait)
        if not tasks:
            status = giver.status()
            if not (follow or status.ready or status.delayed or status.leased or status.behind_ms > 0):
                return
            if not told and (status.delayed or status.leased):
                told = True
                say(
                    f"roq task move: {counted(done.moved, 'task')} so far; waiting for {status.leased} leased and "
                    f"{status.delayed} delayed ones (if no worker holds them any more: `roq task release-all`)"
                )
            wait = WAIT_SECONDS
            continue
        wait = 0.0
        try:
            taker.put_many(NewTask(task.payload, 0.0, task.priority, task.id, _headers(task)) for task in tasks)
        except BaseException:
            giver.release_many(tasks)
            raise
        done.again += len(giver.ack_many(tasks))
        done.moved += len(tasks)
        progress("tasks", done.moved, max(total, done.moved))
        mean = max(1, sum(len(task.payload) for task in tasks) // len(tasks))
        count = max(1, min(LEASE_COUNT_MAX, BATCH_BYTES // mean))
    done.stopped = True
