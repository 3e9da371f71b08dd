"""Dumps of a master's state: the same whether a fork makes them or not, of the moment they were begun, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import uvloop

from roq.errors import StorageFailed
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Fold
from roq.workqueue.master.dump import Dump
from roq.workqueue.records import CommitTransaction, Complete, Configure, FeedMessages, Outgoing, Pop, Push
from roq.workqueue.state import State


def fold_of(tasks: int) -> Fold:
    fold = Fold()
    fold.apply(Configure(1, TaskSettings(), 0))
    for number in range(1, tasks + 1):
        fold.apply(Push(1, 7, number, b"%060d" % number))
    return fold


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> str:
    """Of this process, also those that ended and nobody has taken note of."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_a_fork_dumps_the_state_of_its_moment() -> None:
    """On the loop that masters run on."""

    async def story() -> None:
        fold = fold_of(2000)
        before, open_before, children_before = State(fold).dump(), descriptors(), children()
        dump = Dump(fold)
        for nonce in range(1, 500):
            fold.apply(Pop(2, 9, nonce, 1, 1000))
        fold.apply(Complete(3, next(iter(fold.leased)), 9))
        data = await dump.data()
        assert bytes(data) == before
        assert State.load(bytes(data)).digest() == State.load(before).digest()
        del data
        dump.discard()
        assert descriptors() == open_before
        assert children() == children_before

    uvloop.run(story())


async def test_a_small_state_is_dumped_at_once() -> None:
    fold, before = fold_of(10), children()
    dump = Dump(fold)
    assert children() == before
    assert await dump.data() == State(fold).dump()


async def test_messages_of_transactions_count_and_what_is_over_does_not() -> None:
    fold, before = fold_of(0), children()
    fold.apply(FeedMessages(1, 7, "t", 1, False, tuple((number, b"") for number in range(1, 1000)), 0, 1))
    assert fold.lapsed == 999
    Dump(fold)
    assert children() == before
    fold.apply(CommitTransaction(1, 7, 1, (), (Outgoing("q", (("t", b""),) * 1000),)))
    dump = Dump(fold)
    assert children() != before
    assert bytes(await dump.data()) == State(fold).dump()


async def test_a_discarded_dump_leaves_no_process_and_no_file() -> None:
    fold, open_before, before = fold_of(20_000), descriptors(), children()
    Dump(fold).discard()
    assert children() == before
    dump = Dump(fold)
    waiting = asyncio.ensure_future(dump.data())
    await asyncio.sleep(0)
    dump.discard()
    with pytest.raises(StorageFailed):
        await asyncio.wait_for(waiting, 5)
    assert children() == before
    assert descriptors() == open_before


async def test_a_large_state_is_dumped_beside_the_loop() -> None:
    """Far less of the loop's processor time than the dump itself takes: 12 instead of 200 ms for a million tasks."""
    fold = fold_of(300_000)
    began = time.process_time()
    whole = State(fold).dump()
    direct = time.process_time() - began
    began = time.process_time()
    dump = Dump(fold)
    held_up = time.process_time() - began
    assert bytes(await dump.data()) == whole
    assert held_up < direct / 2, f"{held_up * 1000:.1f} ms instead of {direct * 1000:.1f} ms"
