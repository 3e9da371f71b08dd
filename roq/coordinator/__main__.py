"""roq-coordinator: one coordinator. Parses flags, loads the configuration, runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from roq.config import CoordinatorConfig, load
from roq.coordinator.server import Coordinator
from roq.errors import RoqError
from roq.runtime.log_output import set_up_logging
from roq.runtime.run import run, set_process_name

EXIT_USAGE = 2


class CoordinatorReady(msgspec.Struct, frozen=True):
    """The line a launcher waits for."""

    ready: bool
    port: int
    pid: int


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; those not given are None."""
    parser = argparse.ArgumentParser(
        prog="python -m roq.coordinator",
        description="What RoQ uses of ZooKeeper, for one machine and without Java. kazoo and every RoQ program connect to it.",
        epilog="Flags win over ROQ_* variables over the file.",
    )
    parser.add_argument("--config", type=Path, help="TOML file; its keys are the flags' names with underscores")
    parser.add_argument("--data-dir", type=Path, help="folder of the journal (default /var/lib/roq-coordinator)")
    parser.add_argument("--address", help="address to bind (default 127.0.0.1; ACLs need passwords, connections none)")
    parser.add_argument("--port", type=int, help="port to bind (default 2181; 0: any free one)")
    parser.add_argument("--listener", type=int, metavar="N", help="descriptor of a socket that listens, instead of a port")
    parser.add_argument("--tick-seconds", type=float, help="how often it is looked which sessions are over (default 0.5)")
    parser.add_argument(
        "--force-sync",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="answer when it is on the disk (default), or when kill -9 alone can't undo it",
    )
    parser.add_argument("--session-seconds-min", type=float, help="shortest session (default 2 ticks)")
    parser.add_argument("--session-seconds-max", type=float, help="longest session (default 20 ticks)")
    parser.add_argument("--log-path", type=Path, help="log file (default: standard error)")
    parser.add_argument("--log-format", help="json, console, or auto: console on a terminal, else json (default auto)")
    parser.add_argument("--log-level", help="DEBUG, INFO, WARNING, ERROR or CRITICAL (default INFO)")
    return parser.parse_args(arguments)


async def serve(config: CoordinatorConfig, stop: asyncio.Event, listener: socket.socket | None = None) -> None:
    """Run until `stop`, or until the journal fails: raises its error."""
    coordinator = Coordinator(config, listener=listener)
    try:
        await coordinator.start()
        ready = CoordinatorReady(ready=True, port=coordinator.port, pid=os.getpid())
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        stopping = asyncio.create_task(stop.wait())
        ended = asyncio.create_task(coordinator.ended())
        await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        ended.cancel()
    finally:
        await coordinator.stop()


def main() -> int:
    """Run until SIGTERM or SIGINT. 0: stopped, 1: could not run or go on, 2: wrong configuration."""
    flags = vars(parse())
    descriptor = flags.pop("listener")
    try:
        listener = None if descriptor is None else socket.socket(fileno=descriptor)
    except OSError as error:
        sys.stderr.write(f"python -m roq.coordinator: --listener {descriptor}: {error.strerror}\n")
        return EXIT_USAGE
    try:
        config = load(CoordinatorConfig, flags.pop("config"), os.environ, flags)
    except RoqError as error:
        sys.stderr.write(f"python -m roq.coordinator: {error}\n")
        return EXIT_USAGE
    set_process_name("roq-coordinator")
    set_up_logging("coordinator", config.log_level, config.log_path, log_format=config.log_format)
    return run(lambda stop: serve(config, stop, listener))


if __name__ == "__main__":
    sys.exit(main())
