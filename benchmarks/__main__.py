"""`python -m benchmarks [pubsub|cost|moves]`: all without an argument. Progress on stderr, Markdown tables on stdout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import uvloop

from benchmarks.contenders import contenders
from benchmarks.cost import Cost, cost, cost_rows
from benchmarks.measure import Measured, measure
from benchmarks.moves import Moves, moves, moves_rows
from benchmarks.report import full, markdown
from benchmarks.scenarios import SCENARIOS

RUN_SECONDS, QUICK_RUN_SECONDS = 3.0, 1.0
LATENCY_SECONDS, QUICK_LATENCY_SECONDS = 8.0, 2.0
REPEATS = 2  # of a disturbed run


def tell(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


async def pubsub(arguments: argparse.Namespace) -> list[Measured]:
    """All wanted scenarios; the report goes to standard output."""
    present, absent = contenders()
    if arguments.systems:
        present = {name: run for name, run in present.items() if name in arguments.systems}
    for name, reason in absent.items():
        tell(f"not taking part: {name} ({reason})")
    found = []
    for scenario in SCENARIOS.values():
        if arguments.only and not any(part in scenario.name for part in arguments.only):
            continue
        if scenario.load.rate:
            seconds = QUICK_LATENCY_SECONDS if arguments.quick else LATENCY_SECONDS
        else:
            seconds = QUICK_RUN_SECONDS if arguments.quick else RUN_SECONDS
        repeats = 0 if arguments.quick else REPEATS
        found.append(await measure(scenario, present, arguments.runs, seconds, repeats, tell))
    print(full(found, absent))
    return found


async def idle_cost(arguments: argparse.Namespace) -> Cost:
    """What queues cost; the report goes to standard output."""
    many, crowd, seconds = (5, 10, 5.0) if arguments.quick else (50, 200, 20.0)
    found = await cost(many, crowd, seconds, tell)
    print(markdown(("what", "measured", "target", "verdict"), cost_rows(found)))
    return found


async def planned_moves(arguments: argparse.Namespace) -> Moves:
    """Moves under load; the report goes to standard output."""
    operations, seconds = (6, 10.0) if arguments.quick else (20, 60.0)
    found = await moves(operations, seconds, tell)
    print(markdown(("what", "measured", "target", "verdict"), moves_rows(found)))
    return found


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("pubsub", "cost", "moves", "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that all works; the numbers mean little")
    parser.add_argument("--runs", type=int, default=3, help="runs of each system in each scenario; medians count")
    parser.add_argument("--only", action="append", help="scenarios whose name contains this; may be repeated")
    parser.add_argument("--systems", action="append", help="only these systems; may be repeated")
    parser.add_argument("--json", type=Path, help="write every run's result to this file")
    return parser.parse_args(words)


async def main(arguments: argparse.Namespace) -> None:
    """Do what was asked."""
    results: dict[str, list[Measured] | Cost | Moves] = {}
    if arguments.what in ("pubsub", "all"):
        results["pubsub"] = await pubsub(arguments)
    if arguments.what in ("cost", "all"):
        results["cost"] = await idle_cost(arguments)
    if arguments.what in ("moves", "all"):
        results["moves"] = await planned_moves(arguments)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    uvloop.run(main(parse(sys.argv[1:])))
