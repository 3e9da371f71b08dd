"""How `roq queue show` looks for people."""

from __future__ import annotations

from roq.cli.output import console, moment, percent, rate, seconds, size, table, yes
from roq.cli.status import exchange_table, queue_state
from roq.client.overview import MemberRow, QueueDetail
from roq.wire.kpi import Decision


def print_detail(detail: QueueDetail) -> None:
    """Everything about one queue."""
    out, row = console(), detail.summary
    out.print(
        f"{row.queue}: {queue_state(row)}, overflow {row.overflow}, replication {row.replication}, "
        f"frames up to {size(detail.max_frame_bytes)}, created {moment(detail.created)}",
    )
    out.print(f"Monitors (term {detail.term}): {', '.join(detail.monitors) or 'none'}")
    out.print(
        f"now: {rate(row.messages_per_second)} msg/s in ({size(row.bytes_per_second)}/s), "
        f"{rate(row.delivered_per_second)} msg/s delivered, lag {seconds(row.lag_seconds)}, lost {row.lost}",
    )
    rules = [
        f"{name}.{field} = {value}"
        for name, fields in detail.policy.items()
        for field, value in fields.items()
        if value is not None
    ]
    scales = any(not rule.startswith("bounds.") for rule in rules)
    out.print(f"policy: {', '.join(rules) if scales else 'never scales by itself'}")
    for part in (exchange_table(detail.exchanges), _member_table(detail.members), _decision_table(detail.decisions)):
        out.print()
        out.print(part)


def _member_table(members: tuple[MemberRow, ...]) -> object:
    rows = [
        (
            row.id,
            row.role,
            ", ".join(row.exchanges),
            yes(row.ready),
            rate(row.messages_per_second),
            size(row.bytes_per_second),
            percent(row.blocked_fraction) if row.role == "publisher" else seconds(row.lag_seconds),
            str(row.dropped if row.role == "publisher" else row.lost),
        )
        for row in members
    ]
    columns = ("MEMBER", "ROLE", "EXCHANGES", "READY", ">MSG/s", ">BYTES/s", ">BLOCKED OR LAG", ">LOST")
    return table("Members", columns, rows)


def _decision_table(decisions: tuple[Decision, ...]) -> object:
    rows = [
        (
            moment(one.time),
            one.action,
            one.cause,
            one.exchange,
            one.host,
            ", ".join(f"{publisher:016x} → {exchange}" for publisher, exchange in one.moves),
            one.outcome or "under way",
        )
        for one in decisions
    ]
    return table("Scaling decisions", ("WHEN", "ACTION", "CAUSE", "EXCHANGE", "HOST", "MOVES", "OUTCOME"), rows)
