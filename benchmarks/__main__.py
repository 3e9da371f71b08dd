"""`python -m benchmarks [pubsub|cost|moves|failover|workqueue|recorded|file|churn]`: all without an argument; and `at-scale`.

Progress on stderr, Markdown tables on stdout. With Spark, and by themselves: `python -m benchmarks.shuffle`,
`benchmarks.shuffle.spark` and `benchmarks.spark_queue`; by themselves, too, `benchmarks.wakeups`,
`benchmarks.fan_in`, `benchmarks.subscribers`, `benchmarks.overhead`, `benchmarks.shards` and `benchmarks.elastic`; with Docker,
`benchmarks.elastic.day` and `benchmarks.scale`. Of recorded queues: `benchmarks.recorded.groups`, `.slow_group`,
`.behind`, `.sustained`, `.transactions`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from benchmarks import servers
from benchmarks.at_scale.command import at_scale
from benchmarks.at_scale.run import ScaleFound
from benchmarks.churn import study as churn_study
from benchmarks.contenders import contenders
from benchmarks.cost import Cost, cost, cost_rows
from benchmarks.durable import report as durable_report
from benchmarks.durable.run import Measured as DurableMeasured
from benchmarks.durable.run import measure as measure_durable
from benchmarks.durable.systems import present as durable_systems
from benchmarks.durable.workload import CLIENTS, Mode, Workload
from benchmarks.failover import PARTS, Failover, failover, failover_rows
from benchmarks.file_queue import BIG_COLUMNS, COMPARED_COLUMNS, FileQueueFound, big_rows, compared_rows, file_queue
from benchmarks.machine import disk_of
from benchmarks.measure import Measured, measure
from benchmarks.moves import Moves, moves, moves_rows
from benchmarks.recorded import report as recorded_report
from benchmarks.recorded.run import Measured as RecordedMeasured
from benchmarks.recorded.run import measure as measure_recorded
from benchmarks.recorded.systems import present as recorded_systems
from benchmarks.recorded.workload import FULL, QUICK, Scenario
from benchmarks.report import full, markdown, spread
from benchmarks.scenarios import SCENARIOS

Lists = list[Measured] | list[DurableMeasured] | list[RecordedMeasured]
Results = Lists | Cost | Moves | Failover | FileQueueFound | churn_study.Study | ScaleFound
RUN_SECONDS, QUICK_RUN_SECONDS = 3.0, 1.0
LATENCY_SECONDS, QUICK_LATENCY_SECONDS = 8.0, 2.0
RUNS, FAIL_OVER_RUNS = 3, 20
TASKS, QUICK_TASKS, WINDOW_TASKS = 10_000, 300, 100_000  # per client
FILE_ROUNDS, FILE_TASKS, BIG_TASKS = 5, 1000, 1_000_000
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
        found.append(await measure(scenario, present, arguments.runs or RUNS, seconds, repeats, tell))
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


async def fail_over_times(arguments: argparse.Namespace) -> Failover:
    """Everything killed in turn; the report goes to standard output."""
    runs, outage_seconds = (1, 10.0) if arguments.quick else (arguments.runs or FAIL_OVER_RUNS, 60.0)
    found = await failover(runs, outage_seconds, [part for part in arguments.only or PARTS if part in PARTS], tell)
    before, after = found.load_average
    print(
        f"Medians of {runs}; sessions of {found.session_seconds:g} s; the machine's load average {before:.1f} to {after:.1f}\n"
    )
    print(markdown(("what", "median", "slowest", "target", "verdict", "messages"), failover_rows(found)))
    return found


async def work_queues(arguments: argparse.Namespace) -> list[DurableMeasured]:
    """RDSQ's Figure 2 and windows, durable; the report goes to standard output."""
    there, absent = await durable_systems(arguments.systems)
    for name, reason in absent.items():
        tell(f"not taking part: {name} ({reason})")
    tasks = arguments.messages or (QUICK_TASKS if arguments.quick else TASKS)
    loads = [Workload(Mode.ONE_BY_ONE, clients, tasks) for clients in CLIENTS]
    loads += [Workload(Mode.WINDOW, clients, WINDOW_TASKS // (10 if arguments.quick else 1)) for clients in (1, 4)]
    wanted = arguments.only or [""]
    loads = [load for load in loads if any(part in f"{load.mode}, {load.clients} clients" for part in wanted)]
    found = [await measure_durable(load, list(there), arguments.runs or RUNS, tell) for load in loads]
    print(durable_report.full(found, absent))
    if arguments.charts and any(measured.work.mode is Mode.ONE_BY_ONE for measured in found):
        durable_report.save(found, arguments.charts)
    return found


async def recorded_queues(arguments: argparse.Namespace) -> list[RecordedMeasured]:
    """Recorded queues beside other logs; the report goes to standard output."""
    disk = disk_of(Path(tempfile.gettempdir()))
    there, absent = await recorded_systems(arguments.systems)
    for name, reason in absent.items():
        tell(f"not taking part: {name} ({reason})")
    size, wanted = QUICK if arguments.quick else FULL, arguments.only or [""]
    scenarios = [scenario for scenario in Scenario if any(part in scenario for part in wanted)]
    found = [await measure_recorded(one, list(there), arguments.runs or RUNS, size, tell) for one in scenarios]
    kinds = {servers.PROGRAMS[system.server]: system.server for system in there.values() if system.server}
    print(recorded_report.full(found, absent, disk, [await servers.version(kind) for kind in kinds.values()]))
    return found


def file_queues(arguments: argparse.Namespace) -> FileQueueFound:
    """The file queue beside python-task-queue, and with many tasks; the report goes to standard output."""
    rounds, tasks, many = (1, 300, 5000) if arguments.quick else (arguments.runs or FILE_ROUNDS, FILE_TASKS, BIG_TASKS)
    found = file_queue(rounds, tasks, many, tell)
    print(markdown(COMPARED_COLUMNS, compared_rows(found)))
    print(f"\nRoQ leases and acks by the hundred: {spread(found.batch_rates)} tasks/s")
    print(f"{found.big.tasks:,} tasks in one queue, put at {found.big.put_rate:,.0f}/s:\n")
    print(markdown(BIG_COLUMNS, big_rows(found.big)))
    return found


async def node_churn(arguments: argparse.Namespace) -> churn_study.Study:
    """Blizzard's evaluation on a virtual clock; the report goes to standard output, the charts to --charts."""
    quick = arguments.quick
    operations = churn_study.QUICK_OPERATIONS if quick else churn_study.OPERATIONS
    hours, values, seeds = (0.5, 50, 1) if quick else (7.0, 100, 5)
    found = await asyncio.to_thread(churn_study.study, operations, hours, values, seeds, tell)
    print(markdown(churn_study.COLUMNS, churn_study.rows(found)))
    if arguments.charts:
        churn_study.save(found, arguments.charts)
    return found


async def clusters_at_scale(arguments: argparse.Namespace) -> ScaleFound:
    """Many hosts and queues, of which only the processes are not there; the report goes to standard output."""
    sizes = [(hosts, queues) for hosts, _, queues in (size.partition("x") for size in arguments.size or ())]
    numbers = [(int(hosts), int(queues)) for hosts, queues in sizes]
    return await at_scale(numbers, arguments.only or [], arguments.quick, arguments.charts, tell)


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        choices=("pubsub", "cost", "moves", "failover", "workqueue", "recorded", "file", "churn", "at-scale", "all"),
        default="all",
    )
    parser.add_argument("--quick", action="store_true", help="short runs, to see that all works; the numbers mean little")
    parser.add_argument(
        "--runs", type=int, help="runs of each system in each scenario (3), of each fail-over (20); medians count"
    )
    parser.add_argument(
        "--only", action="append", help="scenarios whose name contains this, or these fail-overs; may be repeated"
    )
    parser.add_argument("--systems", action="append", help="only these systems; may be repeated")
    parser.add_argument("--size", action="append", help="at-scale: a cluster of HOSTSxQUEUES, as 100x1000; may be repeated")
    parser.add_argument("--json", type=Path, help="write every run's result to this file")
    parser.add_argument("--charts", type=Path, help="workqueue, churn, at-scale: write their charts to this folder")
    parser.add_argument("--messages", type=int, help=f"workqueue: of each client that writes them one by one ({TASKS:,})")
    return parser.parse_args(words)


async def main(arguments: argparse.Namespace) -> None:
    """Do what was asked."""
    results: dict[str, Results] = {}
    if arguments.what in ("pubsub", "all"):
        results["pubsub"] = await pubsub(arguments)
    if arguments.what in ("cost", "all"):
        results["cost"] = await idle_cost(arguments)
    if arguments.what in ("moves", "all"):
        results["moves"] = await planned_moves(arguments)
    if arguments.what in ("failover", "all"):
        results["failover"] = await fail_over_times(arguments)
    if arguments.what in ("workqueue", "all"):
        results["workqueue"] = await work_queues(arguments)
    if arguments.what in ("recorded", "all"):
        results["recorded"] = await recorded_queues(arguments)
    if arguments.what in ("file", "all"):
        results["file"] = file_queues(arguments)
    if arguments.what in ("churn", "all"):
        results["churn"] = await node_churn(arguments)
    if arguments.what == "at-scale":  # by itself only: it wants the whole machine
        results["at-scale"] = await clusters_at_scale(arguments)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    uvloop.run(main(parse(sys.argv[1:])))
