"""`roq-hcm`: parse flags, load the configuration, run."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from pathlib import Path

from hcm.process import ServeMetrics, serve
from roq.config import HcmConfig, load
from roq.errors import AccessDenied, InvalidConfiguration, InvalidName
from roq.ids import check_name
from roq.runtime.log_output import set_up_logging
from roq.runtime.run import EXIT_FOR_GOOD, managed, run, set_process_name
from roq.runtime.security import use_daemon_card
from roq.wire.card import CardRole, SecurityMode

USAGE_ERROR = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roq-hcm",
        description="RoQ's Host Configuration Manager: one per host.",
        epilog="Flags win over ROQ_* variables over the file.",
    )
    parser.add_argument("--config", type=Path, help="TOML file; its keys are the flags' names with underscores")
    parser.add_argument("--zookeeper", help="h1:port,h2:port[/chroot]; chroot /RoQ if none is given (default 127.0.0.1:2181)")
    parser.add_argument("--host", help="name of this host in the cluster (default: its own)")
    parser.add_argument("--address", help="address to bind and to be reached at (default 127.0.0.1)")
    parser.add_argument("--state-dir", type=Path, help="directory for state, heartbeats and logs (default /var/lib/roq)")
    parser.add_argument("--port", type=int, help="of the HCM's own interface (default 0: any free one)")
    parser.add_argument("--control-port", type=int, help="of its Shutdown Monitor (default 0)")
    parser.add_argument("--port-base", type=int, help="first port given to processes (default 7000)")
    parser.add_argument("--port-count", type=int, help="number of ports given to processes (default 10000)")
    parser.add_argument("--exchanges-max", type=int, help="Exchanges placed on this host at most (default 8)")
    parser.add_argument("--session-seconds", type=float, help="ZooKeeper session time-out (default 6)")
    parser.add_argument(
        "--keep-children",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="leave the processes running when only the HCM is stopped, by a signal (default; `roq host stop` ends them too)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        help="a signal that ends the processes, too, lets other hosts take over first, for so long at most (default 0)",
    )
    parser.add_argument("--process-module", help=argparse.SUPPRESS)
    parser.add_argument("--card", type=Path, help="this host's card, from `roq ca sign`")
    parser.add_argument(
        "--security",
        choices=("cards", "none", "mixed"),
        metavar="SECURITY",
        help="cards; none: everybody is let in; mixed: both, while a cluster is being given cards (default cards)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve metrics of this host for Prometheus there, without a HOST everywhere (default: nowhere; extra `metrics`)",
    )
    parser.add_argument("--log-path", type=Path, help="log file (default: standard error)")
    parser.add_argument("--log-format", help="json, console, or auto: console on a terminal, else json (default auto)")
    parser.add_argument("--log-level", help="DEBUG, INFO, WARNING, ERROR or CRITICAL (default INFO)")
    return parser


def _serve_metrics(config: HcmConfig) -> ServeMetrics | None:
    """What it needs is imported, and has to be installed, only where it is asked for. Raises ModuleNotFoundError."""
    if config.metrics is None:
        return None
    serving: ServeMetrics = importlib.import_module("hcm.metrics").serving_host
    return serving


def main() -> None:
    """Entry of the console script. Exit codes: 0 stopped, 1 gave up (the log says why), 2 wrong configuration, 90 stopped for
    good by `roq host stop` under a service manager."""
    flags = vars(_parser().parse_args())
    path = flags.pop("config")
    try:
        config = load(HcmConfig, path, os.environ, flags)
        check_name(config.host, "host")
        use_daemon_card(config.card, SecurityMode(config.security), CardRole.HOST, config.host)
        serve_metrics = _serve_metrics(config)
    except (AccessDenied, InvalidConfiguration, InvalidName, ModuleNotFoundError) as error:
        sys.stderr.write(f"roq-hcm: {error}\n")
        sys.exit(USAGE_ERROR)
    set_process_name("roq-hcm")
    set_up_logging(f"hcm/{config.host}", config.log_level, config.log_path, log_format=config.log_format, host=config.host)
    for_good = False

    async def body(stop: asyncio.Event) -> None:
        nonlocal for_good
        for_good = await serve(config, stop, serve_metrics)

    code = run(body)
    sys.exit(EXIT_FOR_GOOD if for_good and managed() else code)


if __name__ == "__main__":
    main()
