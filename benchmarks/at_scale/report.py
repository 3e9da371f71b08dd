"""What was measured at scale, as Markdown tables and charts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.at_scale.decisions import Decisions
from benchmarks.at_scale.run import Creation, Event, Joining, Recovery, ScaleFound, Standing
from benchmarks.at_scale.shuffles import ShuffleCost
from benchmarks.report import markdown
from roq.tools.charts import ChartLine, Panel, draw, numbers

CREATION_RATE = 200.0  # queues/s, the goal
MB, KB = 1e6, 1e3
COLOURS = ("#1f618d", "#b9770e", "#1e8449", "#943126")


def full(found: ScaleFound) -> str:
    """Every table there is something for."""
    tables = [
        ("Nothing happens", standing_table(found.standings)),
        ("Queues are created", creation_table(found.creations)),
        ("An Exchange is added", event_table(found.events)),
        ("Clients come", joining_table(found.joinings)),
        ("Something is lost", recovery_table(found.recoveries)),
        ("What the leader computes", decision_table(found.decisions)),
        ("Shuffles", shuffle_table(found.shuffles)),
    ]
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in tables if table)


def standing_table(rows: Sequence[Standing]) -> str:
    """Of clusters in which nothing happens."""
    columns = ("hosts", "queues", "GCM CPU", "GCM MB", "ZooKeeper requests/s", "watches", "nodes", "tree, MB",
               "listener, bytes/s", "the whole, MB", "in parts", "took, s", "longest part, s")  # fmt: skip
    return _table(
        columns,
        [
            (*_size(row), f"{100 * row.cpu:.1f} %", f"{row.resident_bytes / MB:.0f}", f"{row.requests:,.0f}",
             f"{row.watches:,}", f"{row.nodes:,}", f"{row.tree_bytes / MB:.2f}", f"{row.told_bytes:,.0f}",
             f"{row.view_bytes / MB:.2f}", f"{row.view_parts}", f"{row.view_seconds:.2f}", f"{row.part_seconds:.3f}")
            for row in rows
        ],
    )  # fmt: skip


def creation_table(rows: Sequence[Creation]) -> str:
    """Against the goal."""
    columns = ("hosts", "queues", "queues/s", "goal", "p50, s", "p99, s", "ZooKeeper requests", "writes", "GCM CPU, ms")
    return _table(
        columns,
        [
            (*_size(row), f"{row.rate:,.0f}", _verdict(row.rate >= CREATION_RATE, f"at least {CREATION_RATE:.0f}"),
             f"{row.p50_seconds:.2f}", f"{row.p99_seconds:.2f}", f"{row.requests:.1f}", f"{row.writes:.2f}",
             f"{row.cpu_ms:.2f}")
            for row in rows
        ],
    )  # fmt: skip


def event_table(rows: Sequence[Event]) -> str:
    """One Exchange more."""
    columns = ("hosts", "queues", "seconds", "ZooKeeper requests", "writes", "listener, KB")
    return _table(
        columns,
        [
            (*_size(row), f"{row.seconds:.3f}", f"{row.requests:.0f}", f"{row.writes:.1f}", f"{row.told_bytes / KB:,.1f}")
            for row in rows
        ],
    )


def joining_table(rows: Sequence[Joining]) -> str:
    """For each client."""
    columns = (
        "hosts", "queues", "clients", "a second", "ZooKeeper requests", "writes", "GCM CPU, ms", "GCM memory, KB",
        "asked again, p99, ms",
    )  # fmt: skip
    return _table(
        columns,
        [
            (*_size(row), f"{row.clients:,}", f"{row.rate:,.0f}", f"{row.requests:.1f}", f"{row.writes:.2f}",
             f"{row.cpu_ms:.2f}", f"{row.resident_bytes / KB:.1f}", f"{row.p99_seconds * 1000:.1f}")
            for row in rows
        ],
    )  # fmt: skip


def recovery_table(rows: Sequence[Recovery]) -> str:
    """Against the goals."""
    columns = ("what", "hosts", "queues", "seconds", "goal", "ZooKeeper requests", "of which in a second", "writes")
    return _table(
        columns,
        [
            (row.what, *_size(row), f"{row.seconds:.2f}",
             _verdict(row.seconds <= row.goal_seconds, f"at most {row.goal_seconds:g}") if row.goal_seconds else "-",
             f"{row.requests:,}", f"{row.peak:,}", f"{row.writes:,}")
            for row in rows
        ],
    )  # fmt: skip


def decision_table(rows: Sequence[Decisions]) -> str:
    """Milliseconds of one core."""
    columns = ("hosts", "queues", "create, ms", "look, ms", "begin a term, ms", "the whole told, ms", "a change told, ms",
               "the whole, MB", "a change, KB")  # fmt: skip
    return _table(
        columns,
        [
            (*_size(row), f"{row.create_ms:.2f}", f"{row.look_ms:.1f}", f"{row.begin_ms:,.0f}", f"{row.whole_ms:.1f}",
             f"{row.delta_ms:.2f}", f"{row.whole_bytes / MB:.2f}", f"{row.delta_bytes / KB:.1f}")
            for row in rows
        ],
    )  # fmt: skip


def shuffle_table(rows: Sequence[ShuffleCost]) -> str:
    """Of the leader's machine."""
    columns = ("followers", "attempts", "ranges", "reports, s", "commit to sealed, s", "requests to followers",
               "record, MB", "largest node, KB")  # fmt: skip
    return _table(
        columns,
        [
            (f"{row.followers:,}", f"{row.attempts:,}", f"{row.ranges:,}", f"{row.report_seconds:.2f}",
             f"{row.commit_seconds:.2f}", f"{row.requests:,}", f"{row.record_bytes / MB:.2f}",
             f"{row.largest_bytes / KB:.0f}")
            for row in rows
        ],
    )  # fmt: skip


def save(found: ScaleFound, folder: Path) -> None:
    """The chart, as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale-decisions.svg").write_text(chart(found))


def chart(found: ScaleFound) -> str:
    """Processor time of the leader by queues, and bytes that a change and the whole take; SVG."""
    by_hosts: dict[int, list[Decisions]] = {}
    for row in found.decisions:
        by_hosts.setdefault(row.hosts, []).append(row)

    def lines(value: Callable[[Decisions], float], suffix: str = "", dashes: str = "") -> list[ChartLine]:
        return [
            ChartLine(
                f"{hosts:,} hosts{suffix}", colour, sorted((float(row.queues), value(row)) for row in rows), dashes=dashes
            )
            for (hosts, rows), colour in zip(by_hosts.items(), COLOURS, strict=False)
        ]

    panels = [
        Panel("one queue created: processor time of the leader, ms", lines(lambda row: row.create_ms)),
        Panel("a term begins: every assignment compared, ms", lines(lambda row: row.begin_ms)),
        Panel(
            "told to who listens, bytes: the whole cluster (dashed), one Exchange more",
            [
                *lines(lambda row: float(row.whole_bytes), ", the whole", "4 3"),
                *lines(lambda row: float(row.delta_bytes), ", a change"),
            ],
            axis="logarithmic",
        ),
    ]
    last = float(max(row.queues for row in found.decisions))
    below = "by the number of queues; the leader's own code, over values in memory"
    return draw("What a change costs the leading GCM", below, panels, 0.0, last, across=numbers)


def _size(row: Standing | Creation | Event | Joining | Recovery | Decisions) -> tuple[str, str]:
    return f"{row.hosts:,}", f"{row.queues:,}"


def _verdict(met: bool, goal: str) -> str:
    return f"{goal}: {'met' if met else 'MISSED'}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(columns, rows) if rows else ""
