"""Functions on partitions that make Spark's tasks fail, and a hand that kills its Python workers while a job runs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

Batches = Iterator[pa.RecordBatch]
Function = Callable[[Batches], Batches]


def attempt_of_task() -> int:
    task = TaskContext.get()
    assert task is not None
    return int(task.attemptNumber())


def raising(attempts: int) -> Function:
    """The first so many attempts of each task fail after two batches."""

    def run(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            if number == 2 and attempt_of_task() < attempts:
                raise RuntimeError("this attempt fails on purpose")
            yield batch

    return run


def dying(attempts: int) -> Function:
    """The first so many attempts of each task die after two batches, as of a kill -9."""

    def run(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            if number == 2 and attempt_of_task() < attempts:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    return run


def slowly(seconds: float) -> Function:
    """So many seconds for each batch."""

    def run(batches: Batches) -> Batches:
        for batch in batches:
            time.sleep(seconds)
            yield batch

    return run


def workers(spark: SparkSession) -> list[psutil.Process]:
    """Python processes that run Spark's tasks just now or wait for the next one: forks of a daemon."""
    found = []
    for process in psutil.Process(spark.sparkContext._gateway.proc.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile, or is a zombie
            parent = process.parent()
            if parent and process.cmdline()[-1:] == ["pyspark.worker"] and "pyspark.daemon" in parent.cmdline():
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


@contextmanager
def kills(spark: SparkSession, count: int, pause_seconds: float, seed: int) -> Iterator[list[int]]:
    """While this is open: kill -9 at most `count` workers, chosen by `seed`, one after the other. What is given: their pids.

    Fewer than a task may fail (spark.task.maxFailures), so that the job must succeed.
    """
    killed: list[int] = []
    over, choice = threading.Event(), random.Random(seed)

    def run() -> None:
        while len(killed) < count and not over.wait(pause_seconds):
            with suppress(psutil.NoSuchProcess):
                if found := workers(spark):
                    victim = choice.choice(found)
                    victim.kill()
                    killed.append(victim.pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
