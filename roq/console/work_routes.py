"""Work queues, groups, and the desk for their dead letters: /v1/work-queues."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from roq.console.answers import answer, body_of, gives, takes
from roq.console.context import Reader, Visit, Writer
from roq.console.desk import (
    Desk,
    DeskOutcome,
    DeskView,
    LetterAct,
    WorkQueueView,
    in_pattern,
    original_headers,
    work_queue_views,
)
from roq.console.identity import names_shown
from roq.console.letters import EditedPayload, ShownTask, is_beginning, shown_task
from roq.console.summary import PAGE_MAX, chosen_work_queues, page
from roq.errors import InvalidConfiguration
from roq.pubsub.publisher import STORED
from roq.wire import master, monitor
from roq.wire.card import Right
from roq.wire.headers import split_headers
from roq.wire.task import PayloadReference, TaskState
from roq.wire.work_queue import GroupSource

TASKS_MAX = 200
IDS_MAX = 10_000
router = APIRouter()


class WorkQueuePage(msgspec.Struct, frozen=True):
    """total: of all that match; rows: from `offset` on."""

    total: int
    offset: int
    rows: tuple[WorkQueueView, ...]


class ChosenLetters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dead letters by id, of a pattern, or all; one of them."""

    ids: tuple[str, ...] | None = None
    pattern: str | None = None
    all: bool = False

    def check(self) -> ChosenLetters:
        """Itself. Raises InvalidConfiguration."""
        if (self.ids is not None) + (self.pattern is not None) + self.all != 1:
            raise InvalidConfiguration('choose by one of "ids", "pattern" and "all": true')
        if self.ids is not None and len(self.ids) > IDS_MAX:
            raise InvalidConfiguration(f"at most {IDS_MAX} ids at once, got {len(self.ids)}")
        return self

    def __str__(self) -> str:
        if self.ids is not None:
            return f"{len(self.ids)} by id" if len(self.ids) != 1 else self.ids[0]
        return f"pattern {self.pattern}" if self.pattern is not None else "all"


class EditedLetter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to redrive instead of a dead letter. payload, headers: None: as they were; where stores keep them, an edited one has
    both. republish: of a group's message, that may be published to its queue again: every group and subscriber gets it."""

    payload: EditedPayload | None = None
    headers: dict[str, str] | None = None
    republish: bool = False


class RedrivenLetter(msgspec.Struct, frozen=True):
    """id: of the task from now on, "" if it was published."""

    id: str
    edited: bool


class RequeueDeadLetters(msgspec.Struct, frozen=True):
    """For the audit. reason: which."""

    name: str
    reason: str


class RemoveDeadLetters(msgspec.Struct, frozen=True):
    """For the audit. reason: which."""

    name: str
    reason: str


class EditDeadLetter(msgspec.Struct, frozen=True):
    """For the audit. reason: which."""

    name: str
    reason: str


@router.get("/v1/work-queues", responses=gives(WorkQueuePage, "A page of work queues"))
async def list_work_queues(
    visit: Reader,
    search: Annotated[str, Query(max_length=200)] = "",
    kind: Literal["all", "work", "group"] = "all",
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 50,
) -> Response:
    """Work queues and groups, by name. Only masters of this page are asked."""
    view = await visit.source.view()
    found = chosen_work_queues(view.work_queues, search, kind, names_shown(visit.person, Right.DESCRIBE))
    rows = await work_queue_views(visit.source, page(found, offset, limit))
    return answer(WorkQueuePage(len(found), offset, tuple(rows)))


@router.get("/v1/work-queues/{name}", responses=gives(WorkQueueView, "A work queue or group"))
async def show_work_queue(visit: Reader, name: str) -> Response:
    """One of them; a group by `queue@group`."""
    visit.may_at_master(name, master.GetStatus())
    desk = await Desk.of(visit.source, name)
    return answer((await work_queue_views(visit.source, [desk.info]))[0])


@router.get("/v1/work-queues/{name}/tasks", responses=gives(list[ShownTask], "The first tasks of a state"))
async def list_tasks(
    visit: Reader, name: str, state: TaskState = TaskState.READY, count: Annotated[int, Query(ge=1, le=TASKS_MAX)] = 50
) -> Response:
    """Without leasing them."""
    visit.may_at_master(name, master.Peek(str(state), count))
    desk = await Desk.of(visit.source, name)
    return answer([shown_task(one) for one in await desk.peek(state, count)])


@router.get("/v1/work-queues/{name}/dead", responses=gives(DeskView, "Dead letters by what their errors have in common"))
async def show_dead(visit: Reader, name: str) -> Response:
    """The most frequent cause first, each with an example."""
    visit.may_at_master(name, master.Peek(str(TaskState.DEAD), 1))
    return answer(await (await Desk.of(visit.source, name)).letters())


@router.post(
    "/v1/work-queues/{name}/dead/requeue", responses=gives(DeskOutcome, "They are ready"), openapi_extra=takes(ChosenLetters)
)
async def requeue_dead(request: Request, visit: Writer, name: str) -> Response:
    """Make dead letters ready again, with no attempts."""
    return await _act_on_dead(request, visit, name, RequeueDeadLetters, master.RequeueLetters)


@router.post(
    "/v1/work-queues/{name}/dead/remove", responses=gives(DeskOutcome, "They are gone"), openapi_extra=takes(ChosenLetters)
)
async def remove_dead(request: Request, visit: Writer, name: str) -> Response:
    """Forget dead letters."""
    return await _act_on_dead(request, visit, name, RemoveDeadLetters, master.RemoveLetters)


async def _act_on_dead(
    request: Request, visit: Visit, name: str, audited: type[RequeueDeadLetters | RemoveDeadLetters], act: LetterAct
) -> Response:
    chosen = (await body_of(request, ChosenLetters)).check()
    with visit.acts(audited(name, str(chosen))):
        visit.may_at_master(name, act(None))
        desk = await Desk.of(visit.source, name)
        if chosen.ids is not None:
            return answer(await desk.act_on(chosen.ids, act))
        return answer(await desk.act_on_all(in_pattern(chosen.pattern) if chosen.pattern is not None else None, act))


@router.post(
    "/v1/work-queues/{name}/dead/{id}/redrive", responses=gives(RedrivenLetter, "Done"), openapi_extra=takes(EditedLetter)
)
async def redrive(request: Request, visit: Writer, name: str, id: str) -> Response:
    """One dead letter again, edited or not. Edited, a new task with its priority takes its place, which needs the right `put`,
    too. After a 504 that says so only the letter is left to be removed."""
    told = await body_of(request, EditedLetter)
    with visit.acts(EditDeadLetter(name, id)):
        visit.may_at_master(name, master.RequeueLetters(None))
        desk = await Desk.of(visit.source, name)
        if told.payload is None and told.headers is None:
            await desk.requeue_one(id)
            return answer(RedrivenLetter(id, edited=False))
        source = desk.info.record.spec.source
        if source is None:
            visit.may_at_master(name, master.Put(0, 0, []))
        letter = await desk.letter(id)
        payload, headers = edited(told, letter)
        if source is not None:
            new = await _republish(visit, source, letter, payload, headers, allowed=told.republish)
        else:
            new = await desk.put_edited(letter, payload, headers)
        await desk.replaced(id, new)
        return answer(RedrivenLetter(new, edited=True))


def edited(told: EditedLetter, letter: master.PeekedTask) -> tuple[bytes, dict[str, str | bytes]]:
    """Payload and headers of what takes its place. Pure. Raises InvalidConfiguration: something would be lost."""
    headers = dict[str, str | bytes](told.headers) if told.headers is not None else original_headers(letter)
    if told.payload is not None:
        payload = told.payload.content()
        if is_beginning(payload, shown_task(letter).payload):
            raise InvalidConfiguration("this is the beginning of its payload, as it was shown: the rest would be lost")
        return payload, headers
    if isinstance(letter.payload, PayloadReference):
        raise InvalidConfiguration("its payload is kept by stores: headers alone can't be changed, send the payload, too")
    return split_headers(letter.payload)[0], headers


async def _republish(
    visit: Visit,
    source: GroupSource,
    letter: master.PeekedTask,
    payload: bytes,
    headers: dict[str, str | bytes],
    *,
    allowed: bool,
) -> str:
    if not allowed:
        raise InvalidConfiguration(
            f"a group gets what is published: edited, this is published to {source.queue!r} again, for every group and "
            f'subscriber; say "republish": true, or redrive it as it is'
        )
    visit.may_at_monitor(source.queue, monitor.JoinPublisher(0))
    await visit.console.publishers.publish(source.queue, letter.topic, payload, headers, STORED)
    return ""
