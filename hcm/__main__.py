"""`roq-hcm`: parse flags, load the configuration, run."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from hcm.process import serve
from roq.config import HcmConfig, load
from roq.errors import InvalidConfiguration, InvalidName
from roq.ids import check_name
from roq.runtime.notify import EXIT_FOR_GOOD, managed
from roq.runtime.observe import set_up_logging
from roq.runtime.run import run, set_process_name

USAGE_ERROR = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roq-hcm", description="RoQ's Host Configuration Manager: one per host.")
    parser.add_argument("--config", type=Path, help="TOML file; ROQ_* variables and flags go before it")
    parser.add_argument("--zookeeper", help='"zk1:2181,zk2:2181[/chroot]"')
    parser.add_argument("--host", help="name of this host in the cluster")
    parser.add_argument("--address", help="address to bind and to be reached at")
    parser.add_argument("--state-dir", type=Path, help="directory for state, heartbeats and logs")
    parser.add_argument("--port", type=int, help="port of the HCM's own interface (0: any)")
    parser.add_argument("--control-port", type=int, help="port of its Shutdown Monitor (0: any)")
    parser.add_argument("--port-base", type=int, help="first port given to processes")
    parser.add_argument("--port-count", type=int, help="number of ports given to processes")
    parser.add_argument("--exchanges-max", type=int, help="Exchanges placed on this host at most")
    parser.add_argument("--session-seconds", type=float, help="ZooKeeper session time-out")
    parser.add_argument(
        "--keep-children",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="leave the processes running when only the HCM is stopped, by a signal (`roq host stop` ends them too)",
    )
    parser.add_argument("--process-module", help=argparse.SUPPRESS)
    parser.add_argument("--log-path", type=Path, help="log file (standard error if not given)")
    parser.add_argument("--log-level")
    return parser


def main() -> None:
    """Entry of the console script. Exit codes: 0 stopped, 1 gave up (the log says why), 2 wrong configuration, 90 stopped for
    good by `roq host stop` under a service manager."""
    flags = vars(_parser().parse_args())
    path = flags.pop("config")
    try:
        config = load(HcmConfig, path, os.environ, flags)
        check_name(config.host, "host")
    except (InvalidConfiguration, InvalidName) as error:
        sys.stderr.write(f"roq-hcm: {error}\n")
        sys.exit(USAGE_ERROR)
    set_process_name("roq-hcm")
    set_up_logging(f"hcm/{config.host}", config.log_level, config.log_path)
    for_good = False

    async def body(stop: asyncio.Event) -> None:
        nonlocal for_good
        for_good = await serve(config, stop)

    code = run(body)
    sys.exit(EXIT_FOR_GOOD if for_good and managed() else code)


if __name__ == "__main__":
    main()
