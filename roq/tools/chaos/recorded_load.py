"""A recorded queue under faults: publishers that have each message confirmed as stored, a group whose members are killed and
frozen, a durable subscriber that begins again and again, and at the end a reading of all that is on the tapes.

Everything that was confirmed is on the tapes, once and in its publisher's order; some member of the group is done with it, of
each topic one message at a time; the durable subscriber had it at least once, each of its lives in order and without repeats.
What is kept are ranges of numbers, beside the leases of the last tasks (ledger.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from random import Random

import msgspec

import roq
from roq.errors import DurableTaken, MessagesLost, RoqError, TemporaryError
from roq.tools.chaos.edn import OperationType
from roq.tools.chaos.history import GapReported, Sent, SubscriberHistory
from roq.tools.chaos.ledger import LeaseLedger
from roq.tools.chaos.loads import AGAIN_SECONDS, ClientsLoad, LoadContext, await_empty, end_tasks, is_empty, write_event
from roq.tools.chaos.schedule import LoadKind
from roq.tools.chaos.verdict import EXAMPLES, LoadVerdict, Numbers, arrivals, count, decide, judge, ranges_text
from roq.tools.chaos.worker import WorkerEvent, WorkerPlan, message_payload, message_topic

RECORDED, GROUP, DURABLE = "chaos-recorded", "members", "reader"
MESSAGES_PER_SECOND = 20.0
PUBLISHERS, MEMBERS, BURST_MAX = 2, 2, 4
MESSAGE_BYTES = len(message_payload(0, 1))
REPLICATION, EXCHANGES = 2, 2
LIFE_SECONDS = 8.0, 25.0  # of the durable subscriber
OPEN_SECONDS = 15.0
RECORD = roq.Record(days=1)


class DurableCounts(msgspec.Struct):
    """What all lives of a durable subscriber got. again: in one life; late: after a later one of its publisher, in one life;
    repeated: in a later life again, which is allowed. reported: gaps, in words; doubted: how often a later life could not know
    whether there was one, as it met a publisher in the middle."""

    got: list[Numbers]
    lives: int = 0
    again: int = 0
    late: int = 0
    repeated: int = 0
    foreign: int = 0
    doubted: int = 0
    reported: list[str] = msgspec.field(default_factory=list)

    def end_life(self, life: SubscriberHistory) -> None:
        """One more."""
        self.lives += 1
        self.foreign += life.foreign
        gaps = [one for one in life.reported if one.messages or self.lives == 1]
        self.doubted += len(life.reported) - len(gaps)
        self.reported += [
            f"{one.messages} messages of {one.first}..{one.last} of publisher {one.publisher}, in life {self.lives}"
            for one in gaps
        ]
        for numbers, runs in zip(self.got, life.runs, strict=True):
            came, again, late = arrivals(runs)
            self.again, self.late = self.again + len(again), self.late + len(late)
            self.repeated += sum(numbers.overlap(first, last) for first, last in came.ranges())
            for first, last in came.ranges():
                numbers.add(first, last)


class RecordedReading:
    """One life of a subscriber to what is stored."""

    def __init__(self, subscriber: roq.Subscriber, heard: SubscriberHistory) -> None:
        self.subscriber, self.heard = subscriber, heard
        self._task: asyncio.Task[None] | None = None

    async def read(self, seconds: float | None, stop: asyncio.Event | None) -> bool:
        """For so long, or until `stop`, or until it ends by itself; whether it did. Raises what ended it otherwise."""
        self._task = asyncio.create_task(self._take())
        waiting = asyncio.create_task(stop.wait()) if stop is not None else None
        await asyncio.wait({self._task, *([waiting] if waiting else [])}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting is not None:
            waiting.cancel()
        if not self._task.done():
            return False
        await self._task
        return True

    async def _take(self) -> None:
        async for batch in self.subscriber.batches():
            self.heard.take(((message.sequence, message.payload) for message in batch), MESSAGE_BYTES, 0.0)

    async def end(self) -> None:
        """It may have been ended before, by another one with its name, or by an error that was told."""
        with contextlib.suppress(TemporaryError, DurableTaken):
            await self.subscriber.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # whose own cancellation is not ours
            if not self._task.cancelled():
                with contextlib.suppress(TemporaryError, DurableTaken):
                    self._task.result()


class RecordedFindings(msgspec.Struct):
    """What the verdict is made of. sent: acked means stored. tape: None if it could not be read to its end; durable_ended: so
    did the subscriber. status: of the group after the drain."""

    sent: list[Sent]
    durable: DurableCounts
    status: roq.Status | None = None
    tape: SubscriberHistory | None = None
    durable_ended: bool = False


class RecordedLoad(ClientsLoad):
    """See loads.ChaosLoad."""

    def __init__(self, context: LoadContext) -> None:
        super().__init__("recorded publisher")
        self._context = context
        self._address = f"roq://{context.zookeeper}/{RECORDED}@{GROUP}"
        self._published, self._stored = [0] * PUBLISHERS, [0] * PUBLISHERS
        self.ledger = LeaseLedger(self._handed_over, ordered=True, clocks_move=context.clocks_move)
        self._findings = RecordedFindings([], DurableCounts([Numbers() for _ in range(PUBLISHERS)]))
        self._drained = asyncio.Event()  # the durable subscriber goes to the end

    async def __aenter__(self) -> RecordedLoad:
        client = self._context.client
        await client.create_queue(RECORDED, replication=REPLICATION, overflow="block", record=RECORD)
        for _ in range(1, EXCHANGES):
            await client.create_exchange(RECORDED)
        await client.create_group(RECORDED, GROUP, order="topic", standbys=1)
        for at in range(PUBLISHERS):
            self._publishers.append(await client.publisher(RECORDED, confirm="stored").open())
            self._open.push_async_callback(self._close, at)
            self._producing.append(asyncio.create_task(self._publish(at), name=f"recorded publisher {at}"))
        self._following.append(asyncio.create_task(self._read_durable(), name="durable subscriber"))
        for number in range(1, MEMBERS + 1):
            plan = WorkerPlan(self._address, f"groups/{number}", self._context.seed * 1000 + 500 + number * 100, messages=True)
            self._context.pool.add(plan, self._hear)
        return self

    def _handed_over(self, publisher: int) -> int:
        return self._published[publisher] if publisher < PUBLISHERS else 0

    def _hear(self, event: WorkerEvent) -> None:
        self.ledger.take(event)
        write_event(self._context.history, event, messages=True)

    # --- publishers -----------------------------------------------------------------------------------------------------

    async def _publish(self, at: int) -> None:
        """In bursts, the last message of which is confirmed with all before it."""
        random = Random(f"{self._context.seed} publisher {at}")
        while not self._ending.is_set():
            burst = random.randint(1, BURST_MAX)
            await self._publish_some(at, burst)
            await asyncio.sleep(random.expovariate(MESSAGES_PER_SECOND / PUBLISHERS / burst))

    async def _publish_some(self, at: int, burst: int) -> None:
        publisher, history = self._publishers[at], self._context.history
        clients = [f"recorded publisher {at}, message {place} at a time" for place in range(burst)]
        for place, client in enumerate(clients):
            self._published[at] += 1
            number = self._published[at]
            history.invoke(client, "add", [at, number], time.monotonic())
            if place < burst - 1:
                await publisher.publish(message_topic(number), message_payload(at, number))
        try:
            await publisher.publish(message_topic(number), message_payload(at, number), confirm="stored")
        except TemporaryError:  # a later one is confirmed with it
            outcome = OperationType.INFO
        else:
            outcome = OperationType.OK
            self._stored[at] = number
        for client in clients:
            history.complete(client, outcome, time.monotonic())

    # --- readers --------------------------------------------------------------------------------------------------------

    async def _read_durable(self) -> None:
        """Life after life, every other one taken over by the next; the last one reads to the end of what is stored."""
        random = Random(f"{self._context.seed} durable")
        counts, former = self._findings.durable, None
        while True:
            last = self._drained.is_set()
            life = self._life(follow=False if last else "stored", durable=DURABLE)
            try:
                await life.subscriber.open(OPEN_SECONDS)
                if former is not None:
                    await former.end()
                    counts.end_life(former.heard)
                    former = None
                ended = await life.read(None if last else random.uniform(*LIFE_SECONDS), None if last else self._drained)
                if counts.lives % 2 and not last:
                    former = life  # it has the name until the next one opens it
                    continue
            except TemporaryError:
                ended = False
                await asyncio.sleep(AGAIN_SECONDS)
            await life.end()
            counts.end_life(life.heard)
            if last and ended:
                self._findings.durable_ended = True
                return

    def _life(self, *, follow: bool | str, durable: str | None) -> RecordedReading:
        heard = SubscriberHistory(PUBLISHERS)

        def on_lost(lost: MessagesLost) -> None:
            publisher = next((at for at, one in enumerate(self._publishers) if one.id == lost.publisher), -1)
            heard.reported.append(GapReported(publisher, lost.first, lost.last, lost.count))

        options = {"start": "earliest", "on_lost": on_lost, "follow": follow, "durable": durable}
        return RecordedReading(self._context.client.subscriber(RECORDED, **options), heard)  # type: ignore[call-overload]

    async def _read_tape(self) -> None:
        """All that is stored, from the beginning."""
        history = self._context.history
        while self._findings.tape is None:
            life = self._life(follow=False, durable=None)
            history.invoke("tape reader", "read", None, time.monotonic())
            try:
                await life.subscriber.open(OPEN_SECONDS)
                if await life.read(None, None):
                    self._findings.tape = life.heard
            except TemporaryError:
                await asyncio.sleep(AGAIN_SECONDS)
            await life.end()
        if history.written:
            runs = ((at, run) for at, some in enumerate(self._findings.tape.runs) for run in some)
            read = [[at, number] for at, (first, last) in runs for number in range(first, last + 1)]
            history.complete("tape reader", OperationType.OK, time.monotonic(), read)

    # --- the end --------------------------------------------------------------------------------------------------------

    async def stop(self, timeout_seconds: float) -> None:
        """See loads.ChaosLoad."""
        self._ending.set()
        self.failures += await end_tasks(self._producing, timeout_seconds)
        for at, publisher in enumerate(self._publishers):
            published = self._published[at]
            try:
                await publisher.flush(timeout_seconds)
                self._stored[at] = published
            except RoqError as error:
                self._failed(f"recorded publisher {at}: the last flush() failed", error)

    async def drain(self, timeout_seconds: float) -> None:
        """See loads.ChaosLoad."""
        self._drained.set()
        self._following.append(asyncio.create_task(self._read_tape(), name="tape reader"))
        until = time.monotonic() + timeout_seconds

        def nothing_missing() -> bool:
            return not any(self.ledger.undone(at, 1, stored) for at, stored in enumerate(self._stored))

        self._findings.status = await await_empty(self._address, timeout_seconds, nothing_missing, group=True)
        await asyncio.wait(self._following, timeout=max(0.0, until - time.monotonic()))
        for task in self._following:
            if task.done() and (error := task.exception()) is not None:
                self.failures.append(f"{task.get_name()}: {type(error).__name__}: {error}")

    def verdict(self) -> LoadVerdict:
        """The members have ended, and everything that they wrote was heard."""
        self._findings.sent = [Sent(*pair) for pair in zip(self._published, self._stored, strict=True)]
        return recorded_verdict(self.ledger, self._findings)


def recorded_verdict(ledger: LeaseLedger, findings: RecordedFindings) -> LoadVerdict:
    """Pure."""
    problems, undecided = [f"group: {text}" for text in ledger.judge()], []
    counts = {
        "published": sum(one.published for one in findings.sent),
        "stored": sum(one.acked for one in findings.sent),
        "acked by the group": ledger.acked_count(),
        "acks without an answer": len(ledger.doubted()),
        "leases": ledger.leases,
        "leased again": ledger.again,
        "leases lost": ledger.lost,
        "lives of the durable subscriber": findings.durable.lives,
        "repeated in a later life": findings.durable.repeated,
        "gaps that may be none": findings.durable.doubted,
        "invented": ledger.invented + findings.durable.foreign,
    }
    for wrong, open_questions in (_group(ledger, findings), _durable(findings), _tape(findings)):
        problems += wrong
        undecided += open_questions
    if not counts["stored"]:
        undecided.append("nothing was confirmed as stored")
    return decide(LoadKind.GROUPS, counts, problems, undecided)


def _group(ledger: LeaseLedger, findings: RecordedFindings) -> tuple[list[str], list[str]]:
    status = findings.status
    if status is None:
        return [], ["the group gave no answer after everything was healed"]
    if not is_empty(status, group=True):
        return [], [f"the group was not done in time: {status}"]
    problems = [] if status.completed == status.inserted and not status.dead else [f"group: in the end {status}"]
    for at, one in enumerate(findings.sent):
        if undone := ledger.undone(at, 1, one.acked):
            problems.append(
                f"group: {count(undone)} stored messages of publisher {at}: {ranges_text('nobody is done with', undone)}"
            )
    return problems, []


def _durable(findings: RecordedFindings) -> tuple[list[str], list[str]]:
    durable = findings.durable
    named = (
        ("messages twice in one life", durable.again),
        ("messages out of order", durable.late),
        ("messages that nobody published", durable.foreign),
    )
    problems = [f"durable subscriber: {number} {what}" for what, number in named if number]
    problems += [f"durable subscriber: reported as lost: {gap}" for gap in durable.reported[:EXAMPLES]]
    if not findings.durable_ended:
        return problems, ["the durable subscriber did not come to the end in time"]
    return problems + _missing("durable subscriber", findings.sent, durable.got), []


def _tape(findings: RecordedFindings) -> tuple[list[str], list[str]]:
    if findings.tape is None:
        return [], ["the tapes could not be read to their end in time"]
    found = judge(findings.sent, [findings.tape])
    names = ("lost", "duplicated", "reordered", "foreign", "reported_gaps")
    problems = [f"tapes: {getattr(found, name)} messages {name}" for name in names if getattr(found, name)]
    got = [arrivals(runs)[0] for runs in findings.tape.runs]
    return problems + _missing("tapes", findings.sent, got), []


def _missing(where: str, sent: Sequence[Sent], got: Sequence[Numbers]) -> list[str]:
    found = [(at, numbers.missing(1, one.acked)) for at, (one, numbers) in enumerate(zip(sent, got, strict=True))]
    return [f"{where}: stored by publisher {at} and {ranges_text('not there', missing)}" for at, missing in found if missing]
