"""`roq request`: ask over a queue and print the answer. `roq serve`: answer with a text, or with what a command prints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from typing import IO, Annotated

import typer

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.headers import HeaderOption, headers_of, headers_row, text_row
from roq.cli.output import print_json, say
from roq.client.cluster import Cluster
from roq.client.requests import REQUEST_SECONDS
from roq.client.responder import Request, Responder
from roq.errors import PayloadTooLarge, RoqError
from roq.ids import topic_bytes

FROM_STANDARD_INPUT = "-"
TOLD_CHARACTERS = 500  # of a command's last line on standard error


def request(
    queue: QueueArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="What the request is about.", show_default=False)],
    body: Annotated[
        str, typer.Argument(metavar="[BODY]", help="Its payload; - reads standard input.", show_default=False)
    ] = "",
    cluster: ClusterOption = None,
    header: HeaderOption = None,
    group: Annotated[str | None, typer.Option(help="Only servers of this group.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="How long to wait for the answer.")] = REQUEST_SECONDS,
    json: JsonOption = False,
) -> None:
    """Ask one of those who serve a topic, and print its answer."""
    topic_bytes(topic)
    headers = headers_of(header)
    payload = sys.stdin.buffer.read() if body == FROM_STANDARD_INPUT else os.fsencode(body)

    async def work(connected: Cluster) -> None:
        reply = await connected.request(queue, topic, payload, headers, group=group, timeout_seconds=seconds)
        if json:
            shown = {**text_row("payload", reply.payload), "responder": f"{reply.responder:016x}"}
            print_json({**shown, "headers": headers_row(reply.headers)})
        else:
            sys.stdout.buffer.write(reply.payload + b"\n")
            sys.stdout.buffer.flush()

    with_cluster(cluster, work)


def serve(
    queue: QueueArgument,
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]...", help="Topics; * is one word, > the rest. Default: all.", show_default=False),
    ] = None,
    cluster: ClusterOption = None,
    reply: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer with this.", show_default=False)] = None,
    exec: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Answer with what this shell command prints; the payload is its standard input, ROQ_TOPIC the topic.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[str, typer.Option(help="The group that this server belongs to.", show_default=False)] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=1000, help="Requests at a time.")] = 1,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many requests; 0: never.")] = 0,
) -> None:
    """Answer requests until it is stopped. Standard error says when it is ready."""
    if (reply is None) == (exec is None):
        raise typer.BadParameter("either --reply TEXT or --exec COMMAND")

    async def work(connected: Cluster) -> None:
        async with connected.serve(queue, *(topics or ()), group=group) as responder:
            say("roq serve: ready")
            left = [count or -1]
            await asyncio.gather(*(_answer_all(responder, left, reply, exec) for _ in range(jobs)))

    with_cluster(cluster, work)


async def _answer_all(responder: Responder, left: list[int], text: str | None, command: str | None) -> None:
    """left: how many requests are still to be taken by all who share it, -1: no end."""
    while left[0]:
        if (request := await responder.next_request()) is None:
            return
        left[0] -= left[0] > 0
        if not left[0]:
            responder.stop()
        try:
            await (_run(request, command) if command is not None else request.reply(os.fsencode(text or "")))
        except RoqError as error:
            say(f"roq serve: {type(error).__name__}: {error}")


def _standard_input(payload: bytes) -> IO[bytes]:
    """A file that is read from its beginning. No pipe: uvloop closes its end when the command has read nothing and is over, and
    writing to it is a RuntimeError then."""
    file = os.fdopen(os.memfd_create("roq-request", os.MFD_CLOEXEC), "w+b")
    file.write(payload)
    file.seek(0)
    return file


async def _run(request: Request, command: str) -> None:
    """The answer is what the command prints; it fails if that does, or takes longer than its caller waits."""
    variables = {**os.environ, "ROQ_TOPIC": request.topic}
    try:
        with _standard_input(request.payload) as file:
            process = await asyncio.create_subprocess_shell(
                command, stdin=file, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True
            )
    except (OSError, ValueError) as error:  # no more processes, files or memory; or what no process can be given
        await request.fail(f"the command could not be run: {error}")
        return
    try:
        async with asyncio.timeout(max(0.001, request.seconds_left)):
            output, errors = await process.communicate()
    except TimeoutError:
        await request.fail("the command took too long")
        return
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-TOLD_CHARACTERS:]
        await request.fail(f"exit code {process.returncode}" + (f": {last}" if last else ""))
        return
    try:
        await request.reply(output)
    except PayloadTooLarge as error:
        await request.fail(str(error))
