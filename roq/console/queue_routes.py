"""Queues, what is recorded of them, and their scaling policies: /v1/queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from roq.cli.policy import FIELDS, ReplayedDecision, beside
from roq.cli.quantities import start_of
from roq.cli.recorded_names import DurableRow, ProducerRow, durable_row, producer_row
from roq.cli.tapes import TapeRow, tape_row
from roq.client.history import QueueHistory, past_decisions, past_kpis, read_history
from roq.client.overview import QueueDetail, QueueRow, policy_tables, read_queue, read_rows, with_groups
from roq.console.answers import QUIET, EventStream, answer, body_of, done, event, gives, streams, takes, with_quiet
from roq.console.context import Reader, Visit, Writer, until_ended
from roq.console.identity import names_shown
from roq.console.outlet import FAILED
from roq.console.summary import PAGE_MAX, chosen_queues, page
from roq.errors import InvalidConfiguration, RoqError, Unavailable
from roq.ids import new_token
from roq.pubsub.scaling.what_if import WhatIf
from roq.runtime.observe import logger
from roq.wire import gcm, monitor
from roq.wire.assignment import QueueSettings
from roq.wire.card import Right
from roq.wire.kpi import HISTORY_DECISIONS, HISTORY_KPIS, Decision, ExchangeKpi, QueueKpi
from roq.wire.policy import Policy

T = TypeVar("T")
HISTORY_SECONDS = 30.0  # of a history: it is read from the stores
RECORDS_MAX = 200_000  # KPI records of one what-if: 55 hours
DECISIONS_MAX = 1000
log = logger(__name__)
router = APIRouter()


class ListedQueue(QueueRow, frozen=True, kw_only=True):
    """A queue, and whether it is recorded now."""

    recorded: bool


class QueuePage(msgspec.Struct, frozen=True):
    """total: of all that match; rows: from `offset` on."""

    total: int
    offset: int
    rows: tuple[ListedQueue, ...]


class KpiSample(msgspec.Struct, frozen=True):
    """One second of a queue; publishers, subscribers: how many; lag and latency are the worst of any subscriber."""

    time: float
    messages_per_second: float
    bytes_per_second: float
    delivered_per_second: float
    lost: int
    exchanges: tuple[ExchangeKpi, ...]
    publishers: int
    subscribers: int
    lag_seconds: float
    latency_p99_seconds: float


class PolicyField(msgspec.Struct, frozen=True):
    """name: table and field, as `exchange.max_bytes_per_second`. sample: a sensible value."""

    name: str
    unit: str
    meaning: str
    sample: float


class PolicyView(msgspec.Struct, frozen=True):
    """policy: its tables; None: the rule is off."""

    policy: dict[str, dict[str, float | None]]
    fields: tuple[PolicyField, ...]


class NewPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """policy: its tables; None: back to the default, which never scales by itself."""

    policy: Policy | None


class ProposedPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """since: from when on the history is read; 1d is so long ago."""

    policy: Policy
    since: str = "1d"


class WhatIfView(msgspec.Struct, frozen=True):
    """What a policy would have decided on the recorded KPIs if its decisions had taken effect, beside what was decided;
    roq/pubsub/scaling/what_if.py says what is assumed. begin, end: of the records, None if there are none. taken, would, same:
    how many; `decisions` are the newest of them. over_seconds: how long a limit of this policy would have been exceeded;
    recorded_over_seconds: was, by what happened."""

    begin: float | None
    end: float | None
    records: int
    taken: int
    would: int
    same: int
    decisions: tuple[ReplayedDecision, ...]
    over_seconds: int
    recorded_over_seconds: int
    exchanges_most: int
    recorded_exchanges_most: int


class NewQueue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `roq queue create` takes it."""

    name: str
    replication: int = 1
    overflow: str = "drop"
    host: str | None = None


def since_of(text: str) -> Any:
    """Where to begin, as on the command line. Raises InvalidConfiguration."""
    try:
        return start_of(text)
    except typer.BadParameter as error:
        raise InvalidConfiguration(str(error)) from None


async def slowly(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """What takes longer to read than a look at the leader. Raises Unavailable."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Unavailable(f"the cluster did not answer within {seconds:.0f} s") from None


# --- looking --------------------------------------------------------------------------------------------------------------


@router.get("/v1/queues", responses=gives(QueuePage, "A page of queues"))
async def list_queues(
    visit: Reader,
    search: Annotated[str, Query(max_length=100)] = "",
    state: Literal["all", "problem", "stopped", "recorded", "own"] = "all",
    sort: Literal["queue", "-messages_per_second"] = "queue",
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 50,
) -> Response:
    """Queues by name, or the busiest first as they were at the last overview; the cluster's own by state=own alone. Only
    Monitors of this page are asked."""
    view = await visit.source.view()
    live = visit.source.live
    rates = {row.queue: row.messages_per_second for row in live.queues} if live is not None and sort != "queue" else None
    found = chosen_queues(view.queues, search, state, rates, names_shown(visit.person, Right.DESCRIBE))
    shown = page(found, offset, limit)
    rows = await read_rows(visit.source.cluster, shown)
    recorded = [info.record.recorded for info in shown]
    listed = (ListedQueue(**msgspec.structs.asdict(row), recorded=kept) for row, kept in zip(rows, recorded, strict=True))
    return answer(QueuePage(len(found), offset, tuple(listed)))


@router.get("/v1/queues/{queue}", responses=gives(QueueDetail, "Everything about a queue"))
async def show_queue(visit: Reader, queue: str) -> Response:
    """Exchanges, members, decisions with their causes, policy, groups; as `roq queue show --json`."""
    visit.may_at_monitor(queue, monitor.Describe())
    detail = await visit.source.read(read_queue(visit.source.cluster, queue))
    return answer(await with_groups(visit.source.cluster, detail))


@router.get("/v1/queues/{queue}/kpis", response_class=Response, responses=streams("One event `kpi` a second"))
async def stream_kpis(request: Request, visit: Reader, queue: str) -> Response:
    """A queue's KPIs as they come: server-sent events."""
    visit.may_at_monitor(queue, monitor.Describe())
    await visit.source.read(visit.source.cluster.queue(queue))
    return EventStream(_samples(visit, queue), visit.console.streams)


async def _samples(visit: Visit, queue: str) -> AsyncGenerator[bytes, None]:
    line: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    async def cut(reason: str) -> None:
        await line.put(event("cut", msgspec.json.encode({"reason": reason})))
        await line.put(None)

    async def pump() -> None:
        try:
            async with aclosing(visit.source.cluster.kpis(queue)) as kpis:
                async for kpi in kpis:
                    await line.put(event("kpi", msgspec.json.encode(sample_of(kpi))))
        except RoqError as error:
            await cut(str(error))
        except Exception:
            log.exception("a stream of KPIs failed", extra={"fields": {"queue": queue}})
            await cut(FAILED)

    async def end() -> None:
        try:
            await cut(await until_ended(visit))
        except Exception:
            log.exception("whether a stream may go on is not known", extra={"fields": {"queue": queue}})
            await cut(FAILED)

    tasks = [asyncio.create_task(work()) for work in (pump, end)]
    try:
        yield QUIET
        async for piece in with_quiet(line):
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sample_of(kpi: QueueKpi) -> KpiSample:
    """Members counted instead of listed: they may be thousands."""
    return KpiSample(
        kpi.time,
        kpi.messages_per_second,
        kpi.bytes_per_second,
        kpi.delivered_per_second,
        kpi.lost,
        kpi.exchanges,
        len(kpi.publishers),
        len(kpi.subscribers),
        max((one.lag_seconds for one in kpi.subscribers), default=0.0),
        max((one.latency_p99_seconds for one in kpi.subscribers), default=0.0),
    )


def may_read_history(visit: Visit, queue: str) -> None:
    """As for `roq history show`. Raises AccessDenied."""
    visit.may_at_monitor(queue, monitor.Describe())
    for kept in (HISTORY_KPIS, HISTORY_DECISIONS):
        visit.may_read(kept)


@router.get("/v1/queues/{queue}/history", responses=gives(QueueHistory, "What was kept of a queue's past"))
async def show_history(visit: Reader, queue: str, since: str = "1d") -> Response:
    """Its KPIs over time and what was decided, where `roq history` is on."""
    may_read_history(visit, queue)
    begin = since_of(since)
    await visit.source.view()
    return answer(await slowly(read_history(visit.source.cluster, queue, begin), HISTORY_SECONDS))


@router.get("/v1/queues/{queue}/tapes", responses=gives(list[TapeRow], "Tapes of a recorded queue"))
async def list_tapes(visit: Reader, queue: str) -> Response:
    """As `roq queue tapes --json`."""
    visit.may(gcm.DescribeTapes(queue))
    found = await visit.source.read(visit.source.cluster.tapes(queue))
    return answer([tape_row(view) for view in found.views])


@router.get("/v1/queues/{queue}/producers", responses=gives(list[ProducerRow], "Producers of a recorded queue"))
async def list_producers(visit: Reader, queue: str) -> Response:
    """As `roq queue producers --json`."""
    visit.may_at_monitor(queue, monitor.Describe())
    return answer([producer_row(view) for view in await visit.source.read(visit.source.cluster.producers(queue))])


@router.get("/v1/queues/{queue}/durables", responses=gives(list[DurableRow], "Durable subscribers of a recorded queue"))
async def list_durables(visit: Reader, queue: str) -> Response:
    """As `roq queue durables --json`."""
    visit.may_at_monitor(queue, monitor.Describe())
    return answer([durable_row(view) for view in await visit.source.read(visit.source.cluster.durables(queue))])


# --- policies -------------------------------------------------------------------------------------------------------------


def policy_view(policy: Policy) -> PolicyView:
    """With what each field means."""
    fields = (PolicyField(name, one.unit, one.meaning, one.sample) for name, one in FIELDS.items())
    return PolicyView(policy_tables(policy), tuple(fields))


@router.get("/v1/queues/{queue}/policy", responses=gives(PolicyView, "The scaling policy"))
async def show_policy(visit: Reader, queue: str) -> Response:
    """The scaling policy of a queue."""
    visit.may(gcm.GetPolicy(queue))
    return answer(policy_view(await visit.source.read(visit.source.cluster.get_policy(queue))))


@router.put("/v1/queues/{queue}/policy", responses=gives(PolicyView, "It is so now"), openapi_extra=takes(NewPolicy))
async def set_policy(request: Request, visit: Writer, queue: str) -> Response:
    """Another scaling policy from now on."""
    told = (await body_of(request, NewPolicy)).policy
    asked = gcm.SetPolicy(queue, told, new_token())
    with visit.acts(asked):
        visit.may(asked)
        await visit.source.change(visit.source.cluster.set_policy(queue, told))
    return answer(policy_view(told or Policy()))


@router.post(
    "/v1/queues/{queue}/policy/what-if", responses=gives(WhatIfView, "What it would do"), openapi_extra=takes(ProposedPolicy)
)
async def replay_policy(request: Request, visit: Reader, queue: str) -> Response:
    """What a policy would have done on the queue's history; nothing is changed."""
    may_read_history(visit, queue)
    told = await body_of(request, ProposedPolicy)
    await visit.source.view()
    return answer(await slowly(replayed(visit, queue, told.policy.check(), since_of(told.since)), HISTORY_SECONDS))


async def replayed(visit: Visit, queue: str, policy: Policy, since: str | datetime | timedelta) -> WhatIfView:
    """Raises NotRecorded."""
    course, cluster = WhatIfTally(policy), visit.source.cluster
    async for kpi in past_kpis(cluster, queue, since):
        course.see(kpi)
        if course.records > RECORDS_MAX:
            raise InvalidConfiguration(f"more than {RECORDS_MAX} seconds of history: begin later")
    return course.view(beside(await past_decisions(cluster, queue, since), course.decisions))


class WhatIfTally:
    """What is told of a course, record by record: a day of them need not be held. Pure."""

    def __init__(self, policy: Policy) -> None:
        self._course = WhatIf(policy)
        self.decisions: list[Decision] = []  # of the course, each with its effect on what follows
        self.records = 0
        self._begin: float | None = None
        self._end: float | None = None
        self._over = self._recorded_over = self._most = self._recorded_most = 0

    def see(self, kpi: QueueKpi) -> None:
        """The next record."""
        self._begin = kpi.time if self._begin is None else self._begin
        self._end = kpi.time
        self.records += 1
        self._recorded_most = max(self._recorded_most, len(kpi.exchanges))
        step = self._course.see(kpi)
        if step is not None:
            self.decisions += step.decisions
            self._over += step.over
            self._recorded_over += step.recorded_over
            self._most = max(self._most, len(step.kpi.exchanges))

    def view(self, rows: list[ReplayedDecision]) -> WhatIfView:
        """rows: what was decided, and would have been."""
        return WhatIfView(
            begin=self._begin,
            end=self._end,
            records=self.records,
            taken=sum(row.taken for row in rows),
            would=sum(row.would for row in rows),
            same=sum(row.taken and row.would for row in rows),
            decisions=tuple(rows[-DECISIONS_MAX:]),
            over_seconds=self._over,
            recorded_over_seconds=self._recorded_over,
            exchanges_most=self._most,
            recorded_exchanges_most=self._recorded_most,
        )


# --- changing -------------------------------------------------------------------------------------------------------------


@router.post("/v1/queues", responses=gives(QueueRow, "It serves", 201), status_code=201, openapi_extra=takes(NewQueue))
async def create_queue(request: Request, visit: Writer) -> Response:
    """Create a queue; answered when it serves."""
    told = await body_of(request, NewQueue)
    asked = gcm.CreateQueue(told.name, new_token(), QueueSettings(), told.host or "")
    with visit.acts(asked):
        visit.may(asked)
        cluster = visit.source.cluster
        work = cluster.create_queue(told.name, replication=told.replication, overflow=told.overflow, host=told.host)
        info = await visit.source.change(work)
    return answer((await read_rows(visit.source.cluster, [info]))[0], 201)


async def _change(visit: Visit, asked: msgspec.Struct, make: Callable[[], Coroutine[Any, Any, object]]) -> Response:
    """What is asked, written down and, if it may be, done."""
    with visit.acts(asked):
        visit.may(asked)
        await visit.source.change(make())
    return done()


@router.delete("/v1/queues/{queue}", responses=gives(None, "It is gone", 204), status_code=204)
async def remove_queue(visit: Writer, queue: str) -> Response:
    """Stop and forget a queue, with what was recorded of it and its groups."""
    return await _change(visit, gcm.RemoveQueue(queue, new_token()), lambda: visit.source.cluster.remove_queue(queue))


@router.post("/v1/queues/{queue}/start", responses=gives(None, "It runs", 204), status_code=204)
async def start_queue(visit: Writer, queue: str) -> Response:
    """Run a stopped queue again."""
    return await _change(visit, gcm.StartQueue(queue, new_token()), lambda: visit.source.cluster.start_queue(queue))


@router.post("/v1/queues/{queue}/stop", responses=gives(None, "It is stopped", 204), status_code=204)
async def stop_queue(visit: Writer, queue: str) -> Response:
    """Stop a queue's processes, keep what is known of it."""
    return await _change(visit, gcm.StopQueue(queue, new_token()), lambda: visit.source.cluster.stop_queue(queue))
