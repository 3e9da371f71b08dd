"""roq-gcm: one Global Configuration Manager. Parses flags, loads the configuration, runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gcm.process import GcmReady, serve
from roq.config import GcmConfig, load
from roq.errors import RoqError
from roq.runtime.log_output import set_up_logging
from roq.runtime.run import run, set_process_name
from roq.runtime.security import use_daemon_card
from roq.wire.card import CardRole, SecurityMode

EXIT_USAGE = 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; those not given are None."""
    parser = argparse.ArgumentParser(
        prog="roq-gcm", description="RoQ Global Configuration Manager.", epilog="Flags win over ROQ_* variables over the file."
    )
    parser.add_argument("--config", type=Path, help="TOML file; its keys are the flags' names with underscores")
    parser.add_argument("--zookeeper", help="h1:port,h2:port[/chroot]; chroot /RoQ if none is given (default 127.0.0.1:2181)")
    parser.add_argument("--name", help="in logs and in the election (default: address:port)")
    parser.add_argument("--address", help="address to bind and to be reached at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="of requests (default 0: any free one)")
    parser.add_argument("--broadcast-port", type=int, help="of the topology broadcast (default 0)")
    parser.add_argument("--control-port", type=int, help="of the Shutdown Monitor (default 0)")
    parser.add_argument("--session-seconds", type=float, help="ZooKeeper session time-out (default 6)")
    parser.add_argument("--wait-seconds", type=float, help="longest wait for hosts to do what a request needs (default 30)")
    parser.add_argument("--broadcast-seconds", type=float, help="between broadcasts when nothing changes (default 2)")
    parser.add_argument(
        "--rebalance-after-seconds",
        type=float,
        help="hosts stayed the same for so long: what runs on them is levelled (default 30)",
    )
    parser.add_argument(
        "--shuffle-abandoned-seconds",
        type=float,
        help="a shuffle that nobody writes to or commits for so long is removed (default 604800, a week)",
    )
    parser.add_argument(
        "--shard-kept-seconds",
        type=float,
        help="a closed shard of a work queue is kept for so long before it is removed (default 60)",
    )
    parser.add_argument("--fleet", type=Path, help="TOML file that says where new hosts come from (docs/elasticity.md)")
    parser.add_argument("--card", type=Path, help="this GCM's card, from `roq ca sign`")
    parser.add_argument(
        "--security",
        choices=("cards", "none", "mixed"),
        metavar="SECURITY",
        help="cards; none: everybody is let in; mixed: both, while a cluster is being given cards (default cards)",
    )
    parser.add_argument("--log-path", type=Path, help="log file (default: standard error)")
    parser.add_argument("--log-format", help="json, console, or auto: console on a terminal, else json (default auto)")
    parser.add_argument("--log-level", help="DEBUG, INFO, WARNING, ERROR or CRITICAL (default INFO)")
    return parser.parse_args(arguments)


def announce(ready: GcmReady) -> None:
    """One JSON line on standard output: launchers wait for it."""
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run until SIGTERM, SIGINT or Shutdown. 0: stopped, 1: could not run, 2: wrong configuration."""
    flags = vars(parse())
    try:
        config = load(GcmConfig, flags.pop("config"), os.environ, flags)
        use_daemon_card(config.card, SecurityMode(config.security), CardRole.GCM)
    except RoqError as error:
        sys.stderr.write(f"roq-gcm: {error}\n")
        return EXIT_USAGE
    set_process_name("roq-gcm")
    set_up_logging("gcm", config.log_level, config.log_path, log_format=config.log_format)
    return run(lambda stop: serve(config, stop, announce))


if __name__ == "__main__":
    sys.exit(main())
