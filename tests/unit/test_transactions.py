"""Transactions in the fold, at their master, at its forwarder's side and in a client: each alone.

Not covered: every interleaving (tests/model/test_transactions.py), a real cluster (tests/integration/test_transactions.py).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from gcm import transactions, work_queues
from roq.errors import (
    AccessDenied,
    InvalidConfiguration,
    InvalidName,
    NotLeader,
    NotReady,
    QueueNotFound,
    TransactionTooLarge,
    UnknownFormat,
)
from roq.wire import gcm, master, rights
from roq.wire import master as wire
from roq.wire.card import CardRole, Grant, Right
from roq.wire.producers import KeepProducer, OpenProducer
from roq.wire.store import ENTRY_BYTES_MAX
from roq.wire.task import ACK, Settlement
from roq.wire.work_queue import TaskSettings
from roq.workqueue import outbox as fold_outbox
from roq.workqueue.fold import Known, RecordRefused
from roq.workqueue.master import committing
from roq.workqueue.master.outgoing import OutgoingOutbox
from roq.workqueue.outbox import MESSAGE_COST, Destination
from roq.workqueue.records import BlobRef, CommitTransaction, Complete, FeedMessages, OutboxForwarded, Outgoing, Push, encode
from roq.workqueue.state import OUTBOX_VERSION, VERSION, State
from roq.workqueue.transaction import CollectedTransaction
from tests.unit.test_master_service import Rig
from tests.unit.test_placement import cluster_of, host
from tests.unit.test_rights import card
from tests.unit.test_workqueue_state import DONE, LOST, Log, W

TX = 77


def out(queue: str, *payloads: bytes) -> Outgoing:
    return Outgoing(queue, tuple(("t", payload) for payload in payloads))


# --- the fold ---------------------------------------------------------------------------------------------------------


def test_a_commit_does_all_of_it_once() -> None:
    log = Log()
    log.push(b"a")
    log.push(b"b")
    first, second = log.pop(count=2)
    both = ((first.delivery, W), (second.delivery, W))
    assert log.apply(CommitTransaction(0, TX, 1, both, (out("q", b"1", b"2"), out("r", b"3")))) == DONE
    fold = log.state.fold
    assert (fold.completed, len(fold.leased), fold.outbox.bytes) == (2, 0, 6 + 3 * MESSAGE_COST)
    assert [one.last for one in fold.outbox.destinations.values()] == [2, 1]
    assert log.apply(CommitTransaction(0, TX, 1, both, (out("q", b"1", b"2"), out("r", b"3")))) == [Known((TX, 1))]
    assert fold.outbox.bytes == 6 + 3 * MESSAGE_COST, "written twice, it takes effect once"


def test_one_lost_lease_and_nothing_happens() -> None:
    log = Log()
    log.push(b"a")
    log.push(b"b")
    first, second = log.pop(count=2)
    log.apply(Complete(0, first.delivery, W))
    assert log.apply(CommitTransaction(0, TX, 1, ((second.delivery, W), (first.delivery, W)), (out("q", b"1"),))) == LOST
    fold = log.state.fold
    assert (list(fold.leased), bool(fold.outbox)) == ([second.delivery], False)
    assert log.apply(CommitTransaction(0, TX, 1, ((second.delivery, W),), (out("q", b"1"),))) == DONE, "its number was not used"


def test_what_is_known_of_a_number_that_was_forgotten() -> None:
    log = Log()
    for number in range(2, 600, 2):
        log.apply(CommitTransaction(0, TX, number, (), ()))
    assert log.apply(CommitTransaction(0, TX, 1, (), (out("q", b"1"),))) == [RecordRefused()]
    assert not log.state.fold.outbox


def test_a_task_whose_payload_is_elsewhere_is_dropped_with_its_ack() -> None:
    log, blob = Log(), BlobRef("b", 9, 1, ("h",))
    log.apply(Push(0, 5, 1, blob))
    (one,) = log.pop()
    effects = log.apply(CommitTransaction(0, TX, 1, ((one.delivery, W),), ()))
    assert [getattr(effect, "blob", None) for effect in effects] == [None, blob]


def test_what_was_forwarded_is_forgotten() -> None:
    log = Log()
    log.apply(CommitTransaction(0, TX, 1, (), (out("q", b"1", b"22", b"333"),)))
    there = log.state.fold.outbox.destinations["q"]
    assert log.apply(OutboxForwarded(0, "q", "tapes", 2, 9)) == DONE
    assert log.state.fold.status(0).outgoing == 1
    assert (there.sent, there.stored, there.tapes, there.first(5), there.bytes) == (
        2,
        9,
        "tapes",
        [("t", b"333")],
        4 + MESSAGE_COST,
    )
    for wrong in (
        OutboxForwarded(0, "q", "tapes", 1, 8),
        OutboxForwarded(0, "q", "tapes", 4, 11),
        OutboxForwarded(0, "other", "tapes", 1, 1),
    ):
        assert log.apply(wrong) != DONE
    assert log.apply(OutboxForwarded(0, "q", "", 3, 0)) == DONE, "it is gone"
    assert not log.state.fold.outbox
    log.apply(CommitTransaction(0, TX, 2, (), (out("q", b"4"),)))
    log.apply(OutboxForwarded(0, "q", "", 0, 0))
    assert log.state.fold.outbox.destinations["q"].last == 1, "what came behind its end stays"


@pytest.mark.parametrize(
    ("there", "tapes", "stored", "found"),
    [
        (("", 0, 0), "x", 0, (0, False)),
        (("x", 0, 0), "x", 0, (0, True)),
        (("x", 5, 5), "x", 7, (7, True)),  # two were stored and not written down
        (("x", 5, 2), "x", 3, (6, True)),
        (("x", 5, 5), "y", 0, (5, False)),  # the queue was created anew
        (("x", 5, 5), "x", 0, (5, False)),  # the producer was forgotten
        (("x", 5, 5), "x", 9, (5, False)),  # it has stored what is not here
    ],
)
def test_where_a_producer_goes_on(there: tuple[str, int, int], tapes: str, stored: int, found: tuple[int, bool]) -> None:
    waiting = [("t", b"")] * 3
    assert Destination(*there, waiting).attached(tapes, stored, there[1] + 3) == found


def test_a_dump_has_the_outbox_and_programs_of_before_refuse_it() -> None:
    log = Log()
    log.push(b"a")
    assert log.state.dump()[0] == VERSION
    log.apply(CommitTransaction(0, TX, 1, (), (out("q", b"1", b"2"), out("a", b"3"))))
    log.apply(OutboxForwarded(0, "q", "tapes", 1, 4))
    data = log.state.dump()
    assert data[0] == OUTBOX_VERSION
    again = State.load(data)
    again.check()
    assert again.dump() == data
    assert again.fold.outbox.destinations["q"].first(9) == [("t", b"2")]
    with pytest.raises(UnknownFormat, match="this program reads 1 to"):
        State.load(bytes((99,)) + data[1:])


# --- the master -------------------------------------------------------------------------------------------------------


def transaction(number: int, *tokens: str, **queues: list[bytes]) -> wire.TransactionToCommit:
    outgoing = [wire.OutgoingMessages(queue, [("t", one) for one in payloads]) for queue, payloads in queues.items()]
    return wire.TransactionToCommit(TX, number, list(tokens), outgoing)


def commit(rig: Rig, *transactions: wire.TransactionToCommit) -> list[wire.TransactionOutcome]:
    answer = rig.answer(wire.CommitAll(list(transactions)))
    assert isinstance(answer, wire.Committed)
    return answer.outcomes


def error_of(outcome: wire.TransactionOutcome) -> str:
    assert not outcome.lost
    return outcome.error[0]


def test_each_transaction_has_its_own_outcome() -> None:
    rig = Rig()
    rig.put(b"a", b"b")
    first, second = rig.lease(2).tasks
    outcomes = commit(
        rig,
        transaction(1, first.token, q=[b"1"]),
        transaction(2, first.token, second.token, q=[b"2"]),
        transaction(3, second.token, q=[b"3"]),
        transaction(1, first.token, q=[b"1"]),
    )
    assert outcomes == [
        wire.TransactionOutcome(),
        wire.TransactionOutcome(lost=[0]),
        wire.TransactionOutcome(),
        wire.TransactionOutcome(repeated=True),
    ]
    assert rig.service.fold.outbox.destinations["q"].first(9) == [("t", b"1"), ("t", b"3")]
    assert rig.follower().digest() == State(rig.service.fold).digest()


def test_a_lost_lease_is_told_by_one_who_owns_the_log() -> None:
    rig = Rig()
    entries = len(rig.entries)
    assert commit(rig, transaction(1, "1.0.0000000000000009"))[0].lost == [0]
    assert len(rig.entries) == entries + 1


def test_what_a_commit_makes_ready_goes_to_who_waits() -> None:
    """Of an ordered group the next message is ready once the one before is acked."""
    rig = Rig()
    rig.service.feed([FeedMessages(rig.now, 5, "t", 0, True, ((1, b"1"), (2, b"2")))], rig.now)
    (task,) = rig.lease().tasks
    waiting = rig.ask(wire.Lease(9, 2, 0, 1000, 2, 5000, []))
    assert waiting not in rig.commit()
    rig.ask(wire.CommitAll([transaction(1, task.token)]))
    answer = rig.commit()[waiting]
    assert isinstance(answer, wire.Leases)
    assert [one.payload for one in answer.tasks] == [b"2"]


@pytest.mark.parametrize(
    ("one", "error"),
    [
        (transaction(0, q=[b""]), "InvalidConfiguration"),
        (wire.TransactionToCommit(0, 1, [], []), "InvalidConfiguration"),
        (transaction(1, "nonsense"), "CallError"),
        (transaction(1, *["1.0.0000000000000009"] * 2), "TransactionTooLarge"),
        (transaction(1, q=[]), "InvalidConfiguration"),
        (transaction(1, q=[b""] * (wire.TRANSACTION_MESSAGES_MAX + 1)), "TransactionTooLarge"),
        (transaction(1, q=[bytes(wire.TRANSACTION_BYTES_MAX)]), "TransactionTooLarge"),
        (transaction(1, **{f"q{n}": [b""] for n in range(wire.TRANSACTION_QUEUES_MAX + 1)}), "TransactionTooLarge"),
        (transaction(1, **{"a/b": [b""]}), "InvalidName"),
        (wire.TransactionToCommit(TX, 1, [], [wire.OutgoingMessages("q", [("", b"")])]), "InvalidTopic"),
        (wire.TransactionToCommit(TX, 1, [], [wire.OutgoingMessages("q", [("t", b"")])] * 2), "TransactionTooLarge"),
    ],
)
def test_what_no_client_of_ours_sends_is_refused(one: wire.TransactionToCommit, error: str) -> None:
    rig = Rig()
    assert error_of(commit(rig, one)[0]) == error
    assert not rig.service.fold.outbox


def test_a_queue_that_takes_nothing_fills_its_own_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_outbox, "MESSAGE_COST", 0)
    monkeypatch.setattr(committing, "DESTINATION_BYTES_MAX", 10)
    monkeypatch.setattr(committing, "DESTINATIONS_MAX", 2)
    monkeypatch.setattr(committing, "OUTBOX_BYTES_MAX", 30)
    rig = Rig()
    outcomes = commit(rig, *(transaction(number, q=[b"12345"]) for number in (1, 2, 3)), transaction(4, r=[bytes(20)]))
    assert [error_of(one) for one in outcomes] == ["", "", "Overloaded", ""]
    assert "wait for queue 'q'" in outcomes[2].error[1]
    refused = commit(rig, transaction(5, s=[b""]))[0]
    assert error_of(refused) == "Overloaded"
    assert "on their way to 2 other queues" in refused.error[1]
    rig.service.forwarded("q", "x", 2, 2, 0)
    assert [error_of(one) for one in commit(rig, transaction(3, q=[b"1234567"]), transaction(6, q=[b""]))] == ["", ""]
    assert rig.service.fold.outbox.bytes == 30
    assert "bytes of transactions wait to be published" in commit(rig, transaction(7, q=[b""]))[0].error[1]


def test_the_rights_are_those_of_who_commits() -> None:
    allow = rights.allow_at_master("orders@billing")
    worker, writer = Grant(Right.LEASE, "orders@billing"), Grant(Right.PUBLISH, "invoices")
    request = wire.CommitAll([transaction(1, "1.0.0000000000000009", invoices=[b""])])
    allow(card(worker, writer), request)
    with pytest.raises(AccessDenied, match="`publish` to 'invoices'"):
        allow(card(worker), request)
    with pytest.raises(AccessDenied, match="`lease` to 'orders@billing'"):
        allow(card(writer), request)
    with pytest.raises(AccessDenied, match="`publish` to 'secret'"):
        allow(card(worker, writer), wire.CommitAll([*request.transactions, transaction(2, secret=[b""])]))
    with pytest.raises(AccessDenied):
        allow(card(writer), wire.Hello())


def test_who_may_publish_may_use_the_clusters_work_queue_of_transactions() -> None:
    at_master, at_gcm = rights.allow_at_master(master.TRANSACTIONS), rights.for_names(rights.GCM)
    writer, reader = card(Grant(Right.PUBLISH, "q*")), card(Grant(Right.SUBSCRIBE, "q*"))
    create = gcm.CreateWorkQueue(master.TRANSACTIONS, "t")
    at_master(writer, wire.Hello())
    at_master(writer, wire.CommitAll([transaction(1, q=[b""])]))
    for request in (create, gcm.DescribeWorkQueue(master.TRANSACTIONS)):
        at_gcm(writer, request)
        with pytest.raises(AccessDenied):
            at_gcm(reader, request)
    for exists in (True, False):
        rights.check_creation(writer, create, exists)
        with pytest.raises(AccessDenied):
            rights.check_creation(reader, create, exists)
    for denied in (wire.Put(1, 1, []), wire.PurgeQueue(), wire.Peek("ready", 1), wire.CommitAll([transaction(1, other=[b""])])):
        with pytest.raises(AccessDenied):
            at_master(writer, denied)
    with pytest.raises(AccessDenied):
        at_master(reader, wire.Hello())
    with pytest.raises(AccessDenied):
        at_gcm(writer, gcm.RemoveWorkQueue(master.TRANSACTIONS, "t"))
    assert rights.publishes(card(role=CardRole.HOST))


def test_nobody_else_publishes_under_a_masters_name() -> None:
    at_gcm, writer = rights.for_names(rights.GCM), card(Grant(Right.PUBLISH, "*"))
    at_gcm(writer, OpenProducer("q", "mine", "h"))
    at_gcm(card(role=CardRole.HOST), OpenProducer("q", "_roq.outbox.l", "h"))
    for request in (OpenProducer("q", "_roq.outbox.l", "h"), KeepProducer("q", "_roq.outbox.l", "h", 1, 9, True, 1)):
        with pytest.raises(AccessDenied, match="no host of this cluster"):
            at_gcm(writer, request)


TOPIC = "\u20ac" * 85  # 255 bytes, 85 characters


def leased_tokens(rig: Rig, count: int) -> list[str]:
    for first in range(0, count, 500):
        rig.put(*[b""] * 500, sequence=first + 1)
    return [one.token for nonce in range(count // 500) for one in rig.lease(500, nonce=nonce + 1).tasks]


def worst_requests(tokens: list[str]) -> list[wire.TransactionToCommit]:
    """All limits at once."""
    acks = wire.TRANSACTION_ACKS_MAX
    messages = [(TOPIC, b"")] * 8_000 + [("t", b"")] * 1_998
    rest = wire.TRANSACTION_BYTES_MAX - sum(len(topic.encode()) for topic, _ in messages) - 2
    messages += [("t", bytes(rest // 2)), ("t", bytes(rest // 2))]
    parts = [wire.OutgoingMessages("\u20ac" * 97 + f"{n:03}", messages[n::100]) for n in range(wire.TRANSACTION_QUEUES_MAX)]
    return [
        wire.TransactionToCommit((1 << 64) - 1, (1 << 61) + n, tokens[n * acks :][:acks], parts)
        for n in range(len(tokens) // acks)
    ]


def test_what_is_put_into_one_entry_is_no_more_than_a_log_takes() -> None:
    rig = Rig()
    requests = worst_requests(leased_tokens(rig, 4_000))
    assert [error_of(one) for one in commit(rig, *requests)] == [""] * 4
    assert max(map(len, rig.entries)) > wire.TRANSACTION_BYTES_MAX, "they were the largest there are"
    assert max(map(len, rig.entries)) <= ENTRY_BYTES_MAX
    assert len(rig.service.fold.transactions.known) == 1


def test_a_client_counts_as_the_master_does() -> None:
    fits = wire.TRANSACTION_BYTES_MAX // len(TOPIC.encode())
    collected = CollectedTransaction()
    for _ in range(fits):
        collected.publish("q", TOPIC, b"")
    with pytest.raises(TransactionTooLarge):
        collected.publish("q", TOPIC, b"")
    rig = Rig()
    parts = [wire.OutgoingMessages("q", collected.outgoing["q"])]
    assert error_of(commit(rig, wire.TransactionToCommit(TX, 1, [], parts))[0]) == ""
    parts = [wire.OutgoingMessages("q", [*collected.outgoing["q"], (TOPIC, b"")])]
    assert error_of(commit(rig, wire.TransactionToCommit(TX, 2, [], parts))[0]) == "TransactionTooLarge"


def test_acks_alone_are_counted_too() -> None:
    rig = Rig()
    tokens = leased_tokens(rig, 1_000)
    rig.ask(wire.CommitAll([wire.TransactionToCommit(TX, 1, tokens, [])]))
    (batch,) = rig.cut()
    assert 6_000 < len(encode(batch.records)) <= batch.size
    rig.service.feed_position({"e" * 16: 9}, rig.now)  # a group's master knows a shorter record
    rig.cut()
    rig.ask(wire.SettleAll(9, 0, [Settlement(ACK, f"9.{place}.{9:016x}") for place in range(0, 1_000, 2)]))
    (batch,) = rig.cut()
    assert 2_000 < len(encode(batch.records)) <= batch.size


def test_the_numbers_of_transactions_are_not_those_of_publishers() -> None:
    """Who may lease from a group must not end what it gets of a publisher."""
    rig = Rig()
    commit(rig, wire.TransactionToCommit(5, (1 << 62) - 1, [], [wire.OutgoingMessages("q", [("t", b"")])]))
    rig.service.feed([FeedMessages(rig.now, 5, "t", 0, True, ((1, b"1"),))], rig.now)
    assert rig.service.fold.ready.count == 1
    again = State.load(State(rig.service.fold).dump())
    assert (set(again.fold.transactions.known), set(again.fold.producers.known)) == ({5}, {5})


# --- the forwarder's side ---------------------------------------------------------------------------------------------


class Term:
    """A log that is durable when it is told."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.ended = rig, False

    def turn(self) -> None:
        """See MasterTerm."""

    async def barrier(self) -> None:
        """See MasterTerm."""
        if self.ended:
            raise NotLeader
        self.rig.commit()


async def test_only_what_is_durable_is_to_be_forwarded() -> None:
    rig = Rig()
    term = Term(rig)
    outbox = OutgoingOutbox(rig.service, term, "l0g", lambda: rig.now)  # type: ignore[arg-type]
    assert outbox.producer == "_roq.outbox.l0g"
    rig.ask(wire.CommitAll([transaction(1, q=[b"1", b"2"])]))
    assert (outbox.queues(), outbox.waiting("q")) == ([], 0)
    rig.commit()
    async with asyncio.timeout(1):
        await outbox.changed()
    rig.ask(wire.CommitAll([transaction(2, q=[b"3"])]))
    assert (outbox.queues(), outbox.waiting("q"), outbox.first("q", 9)) == (["q"], 2, [("t", b"1"), ("t", b"2")])
    await outbox.attach("q", "tapes", 1)  # the barrier makes the third durable, too
    assert outbox.waiting("q") == 3, "nothing is known of a producer's number on tapes that are new here"
    outbox.sent("q", 1)
    await outbox.attach("q", "tapes", 3)
    assert outbox.first("q", 9) == [("t", b"3")]
    await outbox.give_up("q")
    assert outbox.queues() == []
    term.ended = True
    with pytest.raises(NotLeader):
        await outbox.prove()


async def test_a_new_term_knows_what_was_left() -> None:
    rig = Rig()
    commit(rig, transaction(1, q=[b"1"]))
    outbox = OutgoingOutbox(rig.service, Term(rig), "l0g", lambda: rig.now)  # type: ignore[arg-type]
    assert outbox.queues() == ["q"]
    assert outbox.gone("q") == 1
    assert (outbox.queues(), outbox.waiting("q"), outbox.gone("q")) == ([], 0, 0)
    commit(rig, transaction(2, q=[b"2"]))
    assert outbox.first("q", 9) == [("t", b"2")]


async def test_a_queue_that_nothing_waits_for_leaves_its_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "DESTINATIONS_MAX", 2)
    rig = Rig()
    outbox = OutgoingOutbox(rig.service, Term(rig), "l0g", lambda: rig.now)  # type: ignore[arg-type]
    commit(rig, transaction(1, q=[b"1"], r=[b"1"]))
    await outbox.attach("q", "tapes", 7)
    outbox.sent("q", 1)
    outbox.idle("r")
    assert outbox.queues() == ["r"], "what waits is not forgotten"
    assert error_of(commit(rig, transaction(2, s=[b"1"]))[0]) == "Overloaded"
    outbox.idle("q")
    assert [error_of(one) for one in commit(rig, transaction(2, s=[b"1"]))] == [""]
    outbox.gone("s")
    commit(rig, transaction(3, q=[b"2"]))
    assert (outbox.queues(), outbox.first("q", 9)) == (["r", "q"], [("t", b"2")]), "numbers begin anew"
    entries = len(rig.entries)
    await outbox.attach("q", "tapes", 8)
    assert len(rig.entries) == entries + 1, "from where on they count is certain before anything is published"
    assert outbox.first("q", 9) == [("t", b"2")]
    outbox.sent("q", 1)
    later = OutgoingOutbox(rig.service, Term(rig), "l0g", lambda: rig.now)  # type: ignore[arg-type]
    assert (list(rig.service.fold.outbox.destinations), later.queues()) == (["r"], ["r"]), "nor does the next term keep it"


async def test_tapes_that_lost_messages_get_no_number_twice() -> None:
    rig = Rig()
    outbox = OutgoingOutbox(rig.service, Term(rig), "l0g", lambda: rig.now)  # type: ignore[arg-type]
    commit(rig, transaction(1, q=[b"1", b"2", b"3"]))
    await outbox.attach("q", "tapes", 0)
    outbox.sent("q", 2)
    with pytest.raises(NotReady, match="roq queue forget-producer"):
        await outbox.attach("q", "tapes", 1)
    assert outbox.first("q", 9) == [("t", b"3")]
    await outbox.attach("q", "tapes", 0)  # it was forgotten
    assert outbox.first("q", 9) == [("t", b"3")]


# --- the GCM ----------------------------------------------------------------------------------------------------------


def test_a_queue_whose_record_can_not_be_read_is_there() -> None:
    cluster = replace(cluster_of(host("h1")), unreadable=frozenset(("strange",)))
    with pytest.raises(UnknownFormat, match="'strange' is damaged"):
        transactions.record_of(cluster, "strange")
    with pytest.raises(QueueNotFound):
        transactions.record_of(cluster, "none")


def test_names_of_the_clusters_own_are_reserved() -> None:
    cluster, chance = cluster_of(host("h1"), host("h2")), random.Random(1)
    with pytest.raises(InvalidName, match="the cluster's own"):
        work_queues.create(cluster, gcm.CreateWorkQueue("_roq.mine", "t"), 0.0, chance)
    odds: tuple[dict[str, Any], ...] = ({"standbys": 0}, {"write_quorum": 1}, {"settings": TaskSettings(max_attempts=1)})
    for odd in odds:
        with pytest.raises(InvalidConfiguration, match="the first transaction makes it"):
            work_queues.create(cluster, gcm.CreateWorkQueue(master.TRANSACTIONS, "t", **odd), 0.0, chance)
    made = work_queues.create(cluster, gcm.CreateWorkQueue(master.TRANSACTIONS, "t", asked=()), 0.0, chance)
    assert master.TRANSACTIONS in made.work_queues
