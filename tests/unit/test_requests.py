"""Requests: what travels, which server is chosen, and the Monitor's list of who serves. With processes: tests/integration."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.client.responders import LATE_MAX, LATE_SECONDS, ResponderTable
from roq.errors import (
    AccessDenied,
    FrameError,
    InvalidConfiguration,
    InvalidHeaders,
    InvalidName,
    InvalidTopic,
    NoResponder,
    Overloaded,
    RequestFailed,
    ResponderLost,
    TemporaryError,
    from_wire,
)
from roq.pubsub.monitor.records import Instruction, Notify
from roq.pubsub.monitor.responders import (
    DOUBTED_SECONDS,
    GONE_SECONDS,
    LIST_BYTES_MAX,
    RETURN_SECONDS,
    TOLD_AT_ONCE,
    ResponderList,
)
from roq.pubsub.subscription import SERVICE_TOPICS_MAX, TopicFilter
from roq.wire import monitor as wire
from roq.wire.card import CardRole, Grant, Right, new_card
from roq.wire.headers import HEADERS_BYTES_MAX, check_headers
from roq.wire.requests import (
    FILTERS_BYTES_MAX,
    RequestHead,
    RequestOutcome,
    answer_head,
    answer_headers,
    reply_topic,
    request_head,
    request_headers,
    serve_topic,
)
from roq.wire.rights import allow_at_monitor
from tests.unit.small_queue import Queue, notices

# --- what travels -----------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer_travel_as_headers() -> None:
    head = RequestHead(7, reply_topic(1), "eu.paris", 1.5, {"traceparent": "00", "n": b"\x00"})
    headers = request_headers(head)
    assert check_headers(headers)[0] == headers, "the publisher takes them as they are"
    assert request_head(headers) == head
    assert answer_head(answer_headers(7, RequestOutcome.DONE, {"a": "b"})) == (7, RequestOutcome.DONE, {"a": "b"})
    for outcome in RequestOutcome:
        assert answer_head(answer_headers(7, outcome)) == (7, outcome, {})


def test_our_own_headers_do_not_use_up_the_applications_room() -> None:
    full: dict[str, str | bytes] = {"a": "x" * (HEADERS_BYTES_MAX - 1)}
    headers, size = check_headers(request_headers(RequestHead(7, reply_topic(1), "t" * 255, 1.0, check_headers(full)[0])))
    assert size == sum(len(name) + len(value) for name, value in headers.items())
    with pytest.raises(InvalidHeaders):
        answer_headers(7, RequestOutcome.DONE, {"a": "x" * HEADERS_BYTES_MAX})
    with pytest.raises(InvalidHeaders, match="RoQ's own"):
        answer_headers(7, RequestOutcome.DONE, {"roq-request": "8"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"roq-request": b"7"}, {"roq-request": "-7"}, {"roq-request": "\u0667"}, {"roq-request": "1" * 19}, {"roq-request": ""},
        {"roq-reply": "orders"}, {"roq-reply": b"_reply.1"}, {"roq-topic": b"t"}, {"roq-timeout-ms": "soon"},
        {"roq-reply": "_reply." + "0" * 300}, {"roq-reply": "_reply.000000000000000G"}, {"roq-reply": reply_topic(1) + "\n"},
        {"roq-topic": ""}, {"roq-topic": "a\x00b"}, {"roq-topic": "t" * 256},
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(wrong: dict[str, str | bytes]) -> None:
    """Nobody can have a server publish elsewhere than on a topic of answers, or give it what is no topic."""
    headers = dict(request_headers(RequestHead(7, reply_topic(1), "t", 1.0, {})))
    with pytest.raises(FrameError):
        request_head({**headers, **wrong})
    with pytest.raises(FrameError):
        request_head({name: value for name, value in headers.items() if name not in wrong})


@given(st.dictionaries(st.sampled_from(["roq-request", "roq-outcome", "roq-reply", "roq-topic", "x"]), st.text() | st.binary()))
def test_foreign_headers_are_read_or_refused(headers: dict[str, str | bytes]) -> None:
    for read in (request_head, answer_head):
        try:
            read(headers)
        except FrameError:
            continue
        assert "roq-request" in headers


@pytest.mark.parametrize("filters", [(">",), ("*.*",), ("*.0000000000000001",), ("_",), ("*", "_reply")])
def test_filters_that_do_not_name_private_topics_do_not_match_them(filters: tuple[str, ...]) -> None:
    one = TopicFilter(filters)
    assert not one.wants(serve_topic(1).encode())
    assert not one.wants(reply_topic(1).encode())


def test_filters_that_name_private_topics_match_them() -> None:
    assert TopicFilter(("_serve.>",)).wants(serve_topic(1).encode())
    assert TopicFilter((reply_topic(1),)).wants(reply_topic(1).encode())
    assert not TopicFilter((reply_topic(1),)).wants(reply_topic(2).encode())
    assert TopicFilter((">",)).wants(b"_serve"), "these alone are private"
    assert TopicFilter((">",)).wants(b"_debug.x")


def test_errors_say_what_can_be_done() -> None:
    assert issubclass(NoResponder, TemporaryError)
    assert issubclass(ResponderLost, TemporaryError)
    assert not issubclass(RequestFailed, TemporaryError)
    assert type(from_wire("ResponderLost", "x")) is ResponderLost


def test_who_serves_needs_the_right_to_answer() -> None:
    """Else whoever may read could have requests sent into the void."""
    allow, join = allow_at_monitor("q"), wire.JoinSubscriber(1, ("_serve.1",), service=wire.Service("", (">",)))
    reads, both = ((Right.SUBSCRIBE,), (Right.SUBSCRIBE, Right.PUBLISH))
    cards = [
        new_card("alice", CardRole.CLIENT, bytes(32), tuple(Grant(right, "q") for right in rights), 0.0, 1e12)
        for rights in (reads, both)
    ]
    with pytest.raises(AccessDenied, match="`publish`"):
        allow(cards[0], join)
    allow(cards[1], join)
    allow(cards[0], wire.JoinSubscriber(1, (">",)))


# --- which server is chosen -------------------------------------------------------------------------------------------


def listed(*servers: wire.ResponderView, complete: bool = True) -> wire.Responders:
    return wire.Responders(1, 1, complete, servers)


def view(id: int, *topics: str, group: str = "g", doubted: bool = False) -> wire.ResponderView:
    return wire.ResponderView(id, wire.Service(group, topics or (">",)), doubted)


def chosen(table: ResponderTable, number: int, topic: str = "t", group: str | None = None, now: float = 0.0) -> int | None:
    """The one that gets this request."""
    server = table.choose(topic, group)
    if server is not None:
        table.begin(number, server, now)
    table.check()
    return server


def test_the_fewest_under_way_then_the_longest_not_asked() -> None:
    table = ResponderTable()
    assert chosen(table, 1) is None
    table.told(listed(view(1), view(2), view(3)))
    assert [chosen(table, number) for number in range(1, 7)] == [1, 2, 3, 1, 2, 3]
    assert (table.end(2), table.end(5), table.end(4)) == (2, 2, 1)
    assert [chosen(table, number) for number in range(7, 10)] == [2, 1, 2]
    assert table.end(2) is None, "answered before"


def test_topics_groups_doubt_and_refusals() -> None:
    table = ResponderTable()
    table.told(listed(view(1, "eu.*", group="a"), view(2, "eu.>", group="b"), view(3, group="b", doubted=True)))
    assert {table.choose("eu.paris", None), table.choose("eu.paris", "a")} == {1}
    assert table.choose("eu.paris", "b") == 2
    assert table.choose("us", None) == 3, "there is no other"
    assert table.choose("us", "a") is None
    assert table.choose("eu.paris", "") is None, "another group"
    assert table.choose("eu.paris", None, [1]) == 2
    assert table.choose("eu.paris", None, [1, 2]) == 3
    assert table.choose("eu.paris", None, [1, 2, 3]) is None
    for number in range(5):
        table.begin(number, 2, 0.0)
    assert table.choose("eu.paris", "b") == 2, "a doubted one only if there is no other"


def test_a_server_that_is_gone_loses_its_requests() -> None:
    table = ResponderTable()
    table.told(listed(view(1), view(2)))
    assert [chosen(table, number) for number in range(1, 5)] == [1, 2, 1, 2]
    assert table.told(listed(view(2), complete=False)) == [], "only not known yet"
    assert table.told(listed(view(2))) == [1]
    assert chosen(table, 5) == 2
    table.end(1)  # an answer that was on its way
    assert table.lose(1) == [3]
    assert table.lose(1) == []
    table.check()
    assert table.told(listed(view(1), view(2))) == []


def test_a_server_that_is_back_in_time_has_lost_nothing() -> None:
    table = ResponderTable()
    table.told(listed(view(1)))
    chosen(table, 1)
    assert table.told(listed()) == [1]
    assert table.choose("t", None) is None
    table.told(listed(view(1, doubted=True)))
    assert table.lose(1) == []
    assert table.end(1) == 1
    table.told(listed(view(1, "a")))
    assert chosen(table, 2, "a") == 1
    table.told(listed(view(1, "b")))
    assert (table.choose("a", None), table.choose("b", None)) == (None, 1), "what it says now counts"
    assert table.end(2) == 1
    table.check()


def test_what_was_given_up_counts_for_a_while() -> None:
    table = ResponderTable()
    table.told(listed(view(1), view(2)))
    chosen(table, 1)
    table.give_up(1, 0.0)
    assert [chosen(table, 2, now=1.0), table.end(2), chosen(table, 3, now=1.0), table.end(3)] == [2, 2, 2, 2]
    assert chosen(table, 4, now=LATE_SECONDS + 1.0) == 2, "1 counted until now"
    assert chosen(table, 5, now=LATE_SECONDS + 1.0) == 1
    table.give_up(99, 0.0)
    table.check()


def test_what_was_given_up_is_bounded() -> None:
    table = ResponderTable()
    table.told(listed(view(1)))
    for number in range(LATE_MAX + 10):
        table.begin(number, 1, 0.0)
        table.give_up(number, 0.0)
    assert len(table._at) == LATE_MAX
    table.check()


@given(st.lists(st.tuples(st.sampled_from("baegclo"), st.integers(0, 12), st.integers(1, 3))))
def test_whatever_happens_the_counts_are_right(steps: list[tuple[str, int, int]]) -> None:
    table, next_number = ResponderTable(), iter(range(1000))
    lists = [listed(), listed(view(1)), listed(view(1, "x"), view(2)), listed(view(2, doubted=True), view(3), complete=False)]
    for now, (step, number, server) in enumerate(steps):
        match step:
            case "b" | "a":
                chosen(table, next(next_number), now=float(now * 10))
            case "e":
                table.end(number)
            case "g":
                table.give_up(number, float(now * 10))
            case "c":
                table.told(lists[number % len(lists)])
            case _:
                table.lose(server)
        for gone in [one for one in table._servers.values() if not one.listed and step == "l"]:
            table.lose(gone.id)
        table.check()


# --- the Monitor's list -----------------------------------------------------------------------------------------------

SERVER, CALLER = 31, 41
SERVICE = wire.Service("g", ("eu.*",))


class Listing:
    """The list of a small queue with one Exchange, and who is connected."""

    def __init__(self, begun: float | None = None) -> None:
        self.queue = Queue("A")
        self.queue.machine.takeover.begun = begun
        self.list = ResponderList(self.queue.machine)
        self.away = set[bytes]()

    def join(self, member: int, service: wire.Service | None = None, *, returning: bool = False) -> None:
        request = wire.JoinSubscriber(member, (">",), returning, wire.PROTOCOL, service)
        self.queue.machine.join_subscriber(request, b"s%d" % member, self.queue.now)
        self.list.joins(request)

    def report(self, member: int, *, responders: int = -1, serving: bool = True) -> list[wire.Responders]:
        report = wire.SubscriberReport(member, 99, ("A/1",), 0, 0, 0, 0, 0.0, 0.0, 0.0, serving=serving, responders=responders)
        self.queue.machine.subscriber_report(report, b"s%d" % member, self.queue.now)
        return self.told(self.list.reported(report, self.queue.now))

    def told(self, instructions: list[Instruction]) -> list[wire.Responders]:
        self.list.check()
        assert all(isinstance(one, Notify) and one.peer == b"s%d" % CALLER for one in instructions), "nobody else is told"
        return [one for one in notices(instructions, wire.Responders) if isinstance(one, wire.Responders)]

    def pass_seconds(self, seconds: float) -> list[wire.Responders]:
        self.queue.tick(seconds, "A")
        return self.told(self.list.tick(lambda peer: peer not in self.away, self.queue.now))

    def leave(self, member: int) -> list[wire.Responders]:
        self.queue.machine.leave(member, self.queue.now)
        return self.told(self.list.left(member, self.queue.now))


@pytest.fixture
def listing() -> Listing:
    """A caller that knows the list, and a server on it."""
    made = Listing()
    made.join(CALLER)
    made.report(CALLER, responders=0)
    made.join(SERVER, SERVICE)
    (notice,) = made.report(SERVER)
    assert notice.responders == (wire.ResponderView(SERVER, SERVICE),)
    assert notice.complete
    assert made.report(CALLER, responders=notice.version) == []
    return made


def test_members_that_neither_serve_nor_call_hear_nothing() -> None:
    made = Listing()
    made.join(CALLER + 1)
    assert made.report(CALLER + 1) == []
    made.join(SERVER, SERVICE)
    assert made.report(SERVER) == []
    assert made.pass_seconds(1.0) == []
    assert made.list.notice().responders == (wire.ResponderView(SERVER, SERVICE),)


def test_a_server_is_listed_once_it_says_that_it_serves(listing: Listing) -> None:
    listing.join(SERVER + 1, SERVICE)
    assert listing.report(SERVER + 1, serving=False) == []
    (notice,) = listing.report(SERVER + 1)
    assert {one.subscriber for one in notice.responders} == {SERVER, SERVER + 1}
    assert listing.report(SERVER + 1) == []
    listing.join(SERVER + 2)
    assert listing.report(SERVER + 2) == [], "one without a service"


def test_a_caller_that_missed_it_is_told_again(listing: Listing) -> None:
    version = listing.list.notice().version
    (again,) = listing.report(CALLER, responders=version - 1)
    assert again.version == version
    assert listing.report(CALLER, responders=version) == []
    (hostile,) = listing.report(CALLER, responders=version + 7)
    assert hostile.version == version


def test_who_leaves_is_taken_out_at_once(listing: Listing) -> None:
    (notice,) = listing.report(SERVER, serving=False)
    assert notice.responders == ()
    assert listing.report(SERVER, serving=False) == []
    assert listing.leave(SERVER) == []
    listing.join(SERVER, SERVICE)
    assert listing.report(SERVER)[0].responders != ()
    (notice,) = listing.leave(SERVER)
    assert notice.responders == ()


def test_who_dies_is_doubted_and_then_taken_out(listing: Listing) -> None:
    listing.away.add(b"s%d" % SERVER)
    listing.report(CALLER)
    (doubted,) = listing.pass_seconds(1.0)
    assert [one.doubted for one in doubted.responders] == [True]
    (gone,) = listing.pass_seconds(RETURN_SECONDS)
    assert gone.responders == ()


def test_who_comes_back_is_not_doubted_any_more(listing: Listing) -> None:
    listing.away.add(b"s%d" % SERVER)
    assert listing.pass_seconds(1.0)
    listing.away.clear()  # its report comes over another connection
    (back,) = listing.report(SERVER)
    assert [one.doubted for one in back.responders] == [False]


def test_one_that_an_exchange_may_pass_by_is_doubted(listing: Listing) -> None:
    listing.queue.exchange("B")
    listing.pass_seconds(1.0)
    listing.queue.tick(10.5, "A", "B")  # it is active without the proof of a server that only reads A
    (doubted,) = listing.report(SERVER)
    assert [one.doubted for one in doubted.responders] == [True]


def test_one_that_is_silent_is_doubted_and_taken_out_later(listing: Listing) -> None:
    (doubted,) = listing.pass_seconds(DOUBTED_SECONDS + 0.1)
    assert [one.doubted for one in doubted.responders] == [True]
    assert listing.pass_seconds(1.0) == []
    (gone,) = listing.pass_seconds(GONE_SECONDS)
    assert gone.responders == ()
    (back,) = listing.report(SERVER)
    assert back.responders == (wire.ResponderView(SERVER, SERVICE),)


def test_a_monitor_that_stood_still_takes_nobody_out(listing: Listing) -> None:
    listing.queue.now += GONE_SECONDS + 1
    listing.queue.machine.stood_still(GONE_SECONDS + 1, listing.queue.now)
    assert listing.told(listing.list.tick(lambda peer: True, listing.queue.now)) == []


def test_a_caller_that_left_is_forgotten(listing: Listing) -> None:
    listing.leave(CALLER)
    assert listing.told(listing.list.left(SERVER, listing.queue.now)) == []
    assert listing.list._callers == set()


def test_members_that_are_evicted_are_forgotten(listing: Listing) -> None:
    for _ in range(40):
        listing.pass_seconds(1.0)
    assert (listing.list._callers, listing.list._services, listing.list._listed) == (set(), {}, {})


def test_the_list_of_a_monitor_that_takes_over_is_complete_when_all_may_be_back() -> None:
    made = Listing(begun=100.0)
    made.join(SERVER, SERVICE, returning=True)
    made.report(SERVER)
    made.join(CALLER, returning=True)
    (first,) = made.report(CALLER, responders=0)
    assert (first.complete, first.responders) == (False, (wire.ResponderView(SERVER, SERVICE),))
    seen = list[wire.Responders]()
    for _ in range(8):
        made.report(SERVER)
        made.report(CALLER)
        seen += made.pass_seconds(1.0)
    assert [one.complete for one in seen] == [True]


def test_what_callers_could_not_read_is_refused(listing: Listing) -> None:
    for service, error in (
        (wire.Service("a/b", (">",)), InvalidName),
        (wire.Service("g", ("a.>.b",)), InvalidTopic),
        (wire.Service("g", ()), InvalidConfiguration),
        (wire.Service("g", ("t",) * (SERVICE_TOPICS_MAX + 1)), InvalidConfiguration),
        (wire.Service("g", ("t" * 100,) * (FILTERS_BYTES_MAX // 100 + 1)), InvalidConfiguration),
    ):
        with pytest.raises(error):
            listing.join(SERVER + 1, service)
    assert listing.report(SERVER + 1) == []


def first_refused(listing: Listing, service: wire.Service) -> int:
    """Of servers 1000, 1001 … that join with this."""
    for number in range(1000, LIST_BYTES_MAX):
        try:
            listing.join(number, service)
        except Overloaded:
            return number
    raise AssertionError("the list has no end")


def test_the_list_is_bounded_in_bytes(listing: Listing) -> None:
    """Every caller gets all of it, in one message."""
    long = wire.Service("g", ("é" * 100,) * (FILTERS_BYTES_MAX // 200))
    number = first_refused(listing, long)
    assert 0.98 * LIST_BYTES_MAX < (number - 1000) * FILTERS_BYTES_MAX <= LIST_BYTES_MAX
    with pytest.raises(Overloaded, match="use fewer, shorter filters"):
        listing.join(number, long)
    listing.join(1000, long)  # again: it takes no more room than it had
    listing.list.check()
    assert listing.report(number) == [], "the one that was refused"
    for member in range(1000, number):
        listing.report(member)
    assert len(msgspec.msgpack.encode(listing.list.notice())) <= LIST_BYTES_MAX
    listing.leave(1000)
    listing.join(number, long)
    listing.list.check()


def test_a_list_of_short_filters_is_bounded_too(listing: Listing) -> None:
    shortest = wire.Service("", (">",))
    servers = first_refused(listing, shortest) - 1000
    assert len(msgspec.msgpack.encode(wire.ResponderView(2**64 - 1, shortest, doubted=True))) * servers <= LIST_BYTES_MAX


def test_a_long_list_goes_to_many_callers_with_their_reports() -> None:
    made = Listing()
    servers = int(TOLD_AT_ONCE**0.5) + 1
    for number in range(servers):
        made.join(1000 + number)
        made.list.reported(
            wire.SubscriberReport(1000 + number, 99, (), 0, 0, 0, 0, 0.0, 0.0, 0.0, responders=0), made.queue.now
        )
    for number in range(servers):
        made.join(5000 + number, SERVICE)
        report = wire.SubscriberReport(5000 + number, 99, ("A/1",), 0, 0, 0, 0, 0.0, 0.0, 0.0, serving=True)
        made.queue.machine.subscriber_report(report, b"x", made.queue.now)
        told = made.list.reported(report, made.queue.now)
    assert told == []
    late = wire.SubscriberReport(1000, 99, (), 0, 0, 0, 0, 0.0, 0.0, 0.0, responders=1)
    (notice,) = notices(made.list.reported(late, made.queue.now), wire.Responders)
    assert isinstance(notice, wire.Responders)
    assert len(notice.responders) == servers
