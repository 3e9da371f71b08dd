"""`roq demo`: everything at once on this machine, told step by step.

A cluster, real `roq pub` and `roq sub` processes, a planned move of the publisher in the middle, a comparison byte for byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import sysconfig
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Annotated

import typer
import uvloop

from roq.cli.address import TERMINATED
from roq.cli.local import stop_signals
from roq.client.cluster import Cluster, connect
from roq.errors import ProcessFailed, RoqError
from roq.tools.local import leftovers
from roq.tools.local.cluster import JAVA, LocalCluster

LINES = 120_000
SUBSCRIBERS = 2
QUEUE, TOPIC = "demo", "source.python"
CHUNK_LINES = 200
CHUNK_SECONDS = 0.002  # pace of the lines that are sent while the publisher moves
STEP_SECONDS = 30.0  # no step takes longer, or something is wrong
READY_LINE = b"roq sub: ready"


class _Narrator:
    """Says what happens, with the time since the start."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.2f} s] {text}", flush=True)


def demo(
    zookeeper: Annotated[
        str | None, typer.Option(help='"java": on a real ZooKeeper in place of RoQ\'s coordinator.', show_default=False)
    ] = None,
) -> None:
    """See RoQ work on this machine: about 10 seconds, nothing is left behind."""
    if zookeeper not in (None, JAVA):
        raise typer.BadParameter(f'"{JAVA}" is all it takes: the demo starts a cluster of its own', param_hint="--zookeeper")
    directory = Path(tempfile.mkdtemp(prefix="roq-demo-"))
    narrator = _Narrator()
    passed = False
    try:
        passed = uvloop.run(_demo(directory, narrator, zookeeper))
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None
    finally:
        if passed:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            narrator.say(f"logs are kept in {directory}")
    narrator.say("PASSED" if passed else "FAILED")
    raise typer.Exit(0 if passed else 1)


async def _demo(directory: Path, narrator: _Narrator, zookeeper: str | None) -> bool:
    task = asyncio.current_task()
    assert task is not None
    for number in stop_signals():  # a cancelled demo stops its cluster, too
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    cluster = LocalCluster(directory, gcms=2, hosts=2, zookeeper=zookeeper, command="roq demo")
    keeper = cluster.zookeeper_name
    narrator.say(f"starting a {keeper}, 2 GCMs and 2 hosts, each on a loopback address of its own")
    async with cluster:
        pids = [daemon.pid for daemon in (*cluster.gcms.values(), *cluster.hosts.values())]
        zookeeper_pid = cluster.zookeeper_pid
        narrator.say(f"cluster {cluster.zookeeper} is ready: {keeper} pid {zookeeper_pid}, daemons {', '.join(map(str, pids))}")
        async with connect(cluster.zookeeper) as connected:
            arrived = await _messages_flow(directory, narrator, connected, cluster)
        narrator.say(f"stopping hosts, GCMs and the {keeper}")
    for process in cluster.leftovers:
        narrator.say(f"had to kill {process.command}, pid {process.pid}, of {process.owner}")
    left = [pid for pid in (*pids, zookeeper_pid) if leftovers.alive(pid)]
    clean = not cluster.leftovers and not left and not cluster.processes()
    narrator.say("no process is left" if clean else f"processes were left behind: {left or 'see above'}")
    return arrived and clean


async def _messages_flow(directory: Path, narrator: _Narrator, connected: Cluster, cluster: LocalCluster) -> bool:
    started = time.monotonic()
    await connected.create_queue(QUEUE, overflow="block", host="host-1")
    narrator.say(f"queue {QUEUE!r} (overflow block) serves on host-1 after {1000 * (time.monotonic() - started):.0f} ms")
    lines = _source_lines(LINES)
    source = b"\n".join(lines) + b"\n"
    outputs = [directory / f"received-{number + 1}.txt" for number in range(SUBSCRIBERS)]
    async with contextlib.AsyncExitStack() as stack:
        subscribers = []
        for output in outputs:
            file = stack.enter_context(output.open("wb"))
            arguments = ("sub", "-c", cluster.zookeeper, QUEUE, "--count", str(len(lines)))
            environment = cluster.environment(output.stem)
            subscribers.append(await stack.enter_async_context(_roq(environment, *arguments, stdin=DEVNULL, stdout=file)))
        for process in subscribers:
            await _line_on_stderr(process, READY_LINE)
        narrator.say(f"{SUBSCRIBERS} `roq sub {QUEUE}` processes are ready")
        publisher = await stack.enter_async_context(
            _roq(cluster.environment("pub"), "pub", "-c", cluster.zookeeper, QUEUE, TOPIC, stdin=PIPE, stdout=DEVNULL)
        )
        narrator.say(
            f"piping {len(lines):,} lines ({len(source) / 1e6:.1f} MB of Python source) through `roq pub {QUEUE} {TOPIC}`"
        )
        await _publish_with_move(publisher, lines, narrator, connected)
        await _ended(publisher, "roq pub")
        for process in subscribers:
            await _ended(process, "roq sub")
    return _compare(source, outputs, narrator)


async def _publish_with_move(publisher: Process, lines: list[bytes], narrator: _Narrator, connected: Cluster) -> None:
    """Half of the lines, then a move while more of them flow, then the rest."""
    assert publisher.stdin is not None
    half, reserve = len(lines) // 2, len(lines) * 9 // 10
    await _feed(publisher, lines[:half])
    narrator.say(f"{half:,} lines are sent; adding an Exchange on host-2")
    created = await connected.create_exchange(QUEUE, host="host-2")
    await connected.exchange_active(QUEUE, created.exchange)
    view = await connected.inspect(QUEUE)
    member = next((one for one in view.members if one.role == "publisher"), None)
    if member is None:
        raise RoqError("the Monitor does not know the publisher")
    narrator.say(f"Exchange {created.exchange} runs; moving publisher {member.id:016x} there while it publishes")
    moving = asyncio.ensure_future(connected.move(QUEUE, [(member.id, created.exchange)]))
    at, started = half, time.monotonic()
    while not moving.done() and at < reserve:
        await _feed(publisher, lines[at : at + CHUNK_LINES])
        at = min(at + CHUNK_LINES, len(lines))
        await asyncio.sleep(CHUNK_SECONDS)
    moved = await moving
    if moved.moved != 1:
        raise RoqError(f"the publisher did not move: {'; '.join(moved.refused)}")
    milliseconds = 1000 * (time.monotonic() - started)
    narrator.say(f"moved in {milliseconds:.0f} ms with {at - half:,} lines on the way; sending the other {len(lines) - at:,}")
    await _feed(publisher, lines[at:])
    publisher.stdin.close()


async def _feed(publisher: Process, lines: list[bytes]) -> None:
    assert publisher.stdin is not None
    async with asyncio.timeout(STEP_SECONDS):
        publisher.stdin.write(b"\n".join(lines) + b"\n" if lines else b"")
        await publisher.stdin.drain()


@contextlib.asynccontextmanager
async def _roq(environment: dict[str, str], *arguments: str, stdin: int, stdout: int | IO[bytes]) -> AsyncIterator[Process]:
    """A real `roq` process; killed if it still runs at the end."""
    command = (sys.executable, "-m", "roq.cli", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=stdin, stdout=stdout, stderr=PIPE, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _line_on_stderr(process: Process, wanted: bytes) -> None:
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(STEP_SECONDS):
        while line := await process.stderr.readline():
            if line.startswith(wanted):
                return
            said += line
    raise ProcessFailed(f"a roq process ended early: {said.decode(errors='replace').strip()}")


async def _ended(process: Process, name: str) -> None:
    """Wait for a clean end."""
    assert process.stderr is not None
    try:
        async with asyncio.timeout(STEP_SECONDS):
            said = await process.stderr.read()
            code = await process.wait()
    except TimeoutError:
        raise ProcessFailed(f"`{name}` did not end within {STEP_SECONDS:g} s") from None
    if code != 0:
        raise ProcessFailed(f"`{name}` ended with code {code}: {said.decode(errors='replace').strip()}")


def _source_lines(wanted: int) -> list[bytes]:
    """Real text: the first lines of Python's own standard library."""
    lines: list[bytes] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        lines += path.read_bytes().splitlines()
        if len(lines) >= wanted:
            return lines[:wanted]
    while len(lines) < wanted:  # a stripped-down installation: over again
        lines += lines or [b"RoQ"]
    return lines[:wanted]


def _compare(source: bytes, outputs: list[Path], narrator: _Narrator) -> bool:
    same = True
    for number, output in enumerate(outputs):
        received = output.read_bytes()
        if received == source:
            narrator.say(f"subscriber {number + 1} has all {len(source):,} bytes, in order, identical")
        else:
            same = False
            at = next(
                (i for i, (a, b) in enumerate(zip(source, received, strict=False)) if a != b), min(len(source), len(received))
            )
            narrator.say(f"subscriber {number + 1} differs at byte {at:,}: {len(received):,} bytes instead of {len(source):,}")
    return same
