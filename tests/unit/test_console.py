"""`roq console` without a cluster: patterns of errors, who gets in, sessions, what is refused at the gate, pages, problems.

Not covered: routes (tests/integration/test_console*.py), the pages themselves (their browser tests).
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from hcm.logs import read_end
from roq import errors
from roq.console import errors as refusals
from roq.console.app import ROUTERS
from roq.console.gate import BODY_BYTES_MAX, ListenPolicy, check_request, is_secure, own_names
from roq.console.hub import LINE_MAX, LiveListener
from roq.console.identity import (
    ANYBODY,
    ATTEMPTS_MAX,
    ATTEMPTS_SECONDS,
    IDLE_SECONDS,
    LINK_SECONDS,
    SESSIONS_MAX,
    Attempts,
    Person,
    Sessions,
    SignInKind,
    SignInLink,
)
from roq.console.letters import SHOWN_BYTES_MAX, EditedPayload, shown_payload
from roq.console.openapi import document
from roq.console.outlet import CUT, WAITING_BYTES_MAX, ReaderBuffer
from roq.console.patterns import NO_ERROR, FailedLetter, pattern_id, pattern_of, patterns_of
from roq.console.problem import problem_of, status_of
from roq.console.serve import ServeOptions, check, networks
from roq.console.source import SharedRead
from roq.console.summary import PAGE_MAX, page
from roq.console.users import LOOKERS, read_users, user
from roq.errors import InvalidConfiguration, RoqError
from roq.wire.card import Card, CardRole, Grant, Right


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- patterns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        ("timeout after 3.5 s of order 17", "timeout after # s of order #"),
        ("timeout after 12 s of order 18", "timeout after # s of order #"),
        ("KeyError: 'sku-91'", "KeyError: 'sku-#'"),
        ("bad 5E0C1F9A-1111-2222-3333-444455556666, 0xDEADBEEF, deadbeef12", "bad «uuid», «hex», «hex»"),
        ("at 2026-11-26T10:00:01.5Z on host12:9000", "at «time» on host#:#"),
        ("a decade of facade, defaced", "a decade of facade, defaced"),
        ("\n  first line says it \n  File x.py, line 3", "first line says it"),
        ("x=-1e5 y=1,000.50", "x=# y=#"),
        ("", NO_ERROR),
        (" \n\t", NO_ERROR),
    ],
)
def test_what_differs_from_letter_to_letter_is_left_out(error: str, pattern: str) -> None:
    assert pattern_of(error) == pattern


@given(st.text())
def test_every_error_has_a_pattern_and_it_stays_the_same(error: str) -> None:
    pattern = pattern_of(error)
    assert pattern
    assert len(pattern) <= 300
    assert re.fullmatch("[0-9a-f]{16}", pattern_id(pattern))


@given(st.lists(st.sampled_from(["boom 1", "boom 2", "gone", ""]), max_size=30))
def test_each_letter_is_in_one_pattern_and_the_most_frequent_comes_first(errors_: list[str]) -> None:
    letters = [FailedLetter(str(number), error, number % 4, float(number)) for number, error in enumerate(errors_)]
    found = patterns_of(letters)
    assert sorted(id for one in found for id in one.ids) == sorted(letter.id for letter in letters)
    assert [len(one.ids) for one in found] == sorted((len(one.ids) for one in found), reverse=True)
    for one in found:
        own = [letter for letter in letters if letter.id in one.ids]
        assert {pattern_of(letter.error) for letter in own} == {one.pattern}
        assert (one.first, one.last) == (own[0].inserted, own[-1].inserted)
        assert (one.attempts_most, letters[one.example]) == (max(letter.attempts for letter in own), own[0])


# --- payloads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [(b"hello", "text", "hello"), (b'{"a": 1}', "json", '{"a": 1}'), (b"\xff\x00", "base64", "/wA="), (b"17", "text", "17")],
)
def test_bytes_are_shown_as_what_they_are_and_taken_back_unchanged(data: bytes, encoding: str, text: str) -> None:
    shown = shown_payload(data)
    assert (shown.encoding, shown.text, shown.bytes, shown.cut) == (encoding, text, len(data), False)
    assert EditedPayload(shown.text, shown.encoding).content() == data


@given(st.binary())
def test_whatever_is_shown_is_taken_back(data: bytes) -> None:
    shown = shown_payload(data)
    assert EditedPayload(shown.text, shown.encoding).content() == data


def test_a_large_payload_is_cut_between_characters() -> None:
    data = ("x" * (SHOWN_BYTES_MAX - 1) + "é" * 10).encode()
    shown = shown_payload(data)
    assert (shown.cut, shown.bytes, shown.encoding, len(shown.text)) == (True, len(data), "text", SHOWN_BYTES_MAX - 1)


@pytest.mark.parametrize(("text", "encoding"), [("{", "json"), ("***", "base64"), ("\ud800", "text")])
def test_a_payload_that_is_none_is_refused(text: str, encoding: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="the payload is no"):
        EditedPayload(text, encoding).content()


# --- the gate -------------------------------------------------------------------------------------------------------------

LOCAL = ListenPolicy(own_names("127.0.0.1", 9470, ()))
OWN = "127.0.0.1:9470"


def asked(
    method: str = "GET", path: str = "/v1/overview", peer: str = "127.0.0.1", kind: str = "http", **headers: str
) -> MutableMapping[str, Any]:
    told = {"host": OWN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode()) for name, value in told.items()]
    scope: dict[str, Any] = {"type": kind, "path": path, "headers": raw, "client": (peer, 50000)}
    return scope if kind == "websocket" else {**scope, "method": method}


@pytest.mark.parametrize(
    "scope",
    [
        asked(),
        asked(host="localhost:9470"),
        asked(host="LOCALHOST:9470"),
        asked("POST", origin="http://127.0.0.1:9470"),
        asked("POST", origin="http://localhost:9470", host="localhost:9470"),
        asked(kind="websocket", origin="http://127.0.0.1:9470"),
        asked(kind="websocket"),
        asked(path="/", sec_fetch_site="cross-site"),  # a link from elsewhere
        asked("POST", content_length=str(BODY_BYTES_MAX)),
    ],
)
def test_what_comes_from_the_consoles_own_pages_and_from_programs_passes(scope: MutableMapping[str, Any]) -> None:
    check_request(scope, LOCAL)


@pytest.mark.parametrize(
    ("scope", "error"),
    [
        (asked(host="evil.example:9470"), refusals.UnknownHost),  # DNS rebinding
        (asked(host="127.0.0.1:9471"), refusals.UnknownHost),
        (asked(host=""), refusals.UnknownHost),
        (asked("POST", origin="http://evil.example"), refusals.ForeignOrigin),
        (asked("POST", origin="null"), refusals.ForeignOrigin),  # a sandboxed frame
        (asked("DELETE", origin="http://127.0.0.1:8000"), refusals.ForeignOrigin),
        (asked(kind="websocket", origin="http://evil.example"), refusals.ForeignOrigin),
        (asked(sec_fetch_site="cross-site"), refusals.ForeignOrigin),
        (asked("POST", content_length=str(BODY_BYTES_MAX + 1)), refusals.BodyTooLarge),
        (asked("POST", content_length="-1"), refusals.BodyTooLarge),
    ],
)
def test_what_another_site_could_make_a_browser_send_is_refused(
    scope: MutableMapping[str, Any], error: type[refusals.ConsoleRefusal]
) -> None:
    with pytest.raises(error):
        check_request(scope, LOCAL)


def test_a_second_host_is_refused() -> None:
    scope = asked()
    scope["headers"].append((b"host", b"evil.example"))
    with pytest.raises(refusals.UnknownHost):
        check_request(scope, LOCAL)


def test_only_proxies_that_are_trusted_may_ask_and_say_that_there_is_tls() -> None:
    listening = ListenPolicy(own_names("0.0.0.0", 9470, ["console.example"]), networks(["10.0.0.0/8", "::1"]))
    proxied = asked(peer="10.1.2.3", host="console.example", x_forwarded_proto="https")
    check_request(proxied, listening)
    assert is_secure(proxied, listening)
    assert not is_secure(asked(peer="10.1.2.3", host="console.example"), listening)
    assert is_secure(asked(peer="::ffff:10.1.2.3", host="console.example", x_forwarded_proto="https"), listening)
    with pytest.raises(refusals.UntrustedPeer):
        check_request(asked(peer="192.168.0.1", host="console.example", x_forwarded_proto="https"), listening)
    with pytest.raises(refusals.UnknownHost):
        check_request(asked(peer="10.1.2.3", host="0.0.0.0:9470"), listening)
    assert is_secure(asked(), LOCAL)
    assert not is_secure(asked(peer="192.168.0.1", x_forwarded_proto="https"), LOCAL)


# --- who gets in ------------------------------------------------------------------------------------------------------------


def card(name: str = "alice", id: str = "1") -> Card:
    return Card(id, name, CardRole.CLIENT, b"", (Grant(Right.DESCRIBE, "*"),), 0.0, 2000.0)


def test_a_session_lasts_while_it_is_used_and_its_csrf_token_is_its_own() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    alice, bob = Person("alice", card()), Person("bob", card("bob", "2"))
    first, second = sessions.open(alice), sessions.open(bob)
    assert (sessions.person(first), sessions.person(second), sessions.person("")) == (alice, bob, None)
    assert sessions.proves(first, sessions.csrf(first))
    assert not sessions.proves(first, sessions.csrf(second))
    assert not sessions.proves(first, "")
    assert not Sessions(clock).proves(first, sessions.csrf(first))
    assert [one.name for one in sessions.cards()] == ["alice", "bob"]
    clock.now += IDLE_SECONDS - 1
    assert sessions.person(first) == alice
    clock.now += 2
    assert (sessions.person(first), sessions.person(second)) == (alice, None)
    sessions.end(first)
    assert sessions.person(first) is None


def test_sessions_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    sessions = Sessions(Clock())
    first, second = sessions.open(ANYBODY), sessions.open(ANYBODY)
    assert sessions.person(first)
    for number in range(SESSIONS_MAX - 1):
        sessions.open(Person(str(number)))
    assert (sessions.person(first), sessions.person(second)) == (ANYBODY, None)


def test_a_link_signs_in_once_and_not_for_ever() -> None:
    clock = Clock()
    link = SignInLink(ANYBODY, clock)
    with pytest.raises(refusals.LinkUsed):
        link.redeem("another")
    assert link.redeem(link.ticket) == ANYBODY
    with pytest.raises(refusals.LinkUsed):
        link.redeem(link.ticket)
    late = SignInLink(ANYBODY, clock)
    clock.now += LINK_SECONDS + 1
    with pytest.raises(refusals.LinkUsed):
        late.redeem(late.ticket)


def test_who_guesses_waits() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    for _ in range(ATTEMPTS_MAX):
        attempts.check("10.0.0.1")
        attempts.failed("10.0.0.1")
    with pytest.raises(refusals.TooManyAttempts):
        attempts.check("10.0.0.1")
    attempts.check("10.0.0.2")
    clock.now += ATTEMPTS_SECONDS + 1
    attempts.check("10.0.0.1")


def test_users_of_a_proxy_may_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.write_text('alice = ["admin orders.*", "describe *"]\n"*" = ["describe *"]\n')
    users = read_users(file)
    alice, other = user("alice", users).card, user("whoever", users).card
    assert alice is not None
    assert other is not None
    assert alice.allows(Right.ADMIN, "orders.eu")
    assert not other.allows(Right.ADMIN, "orders.eu")
    assert other.allows(Right.DESCRIBE, "orders.eu")
    for nobody in ("", "*", "a\nb", "x" * 500):
        with pytest.raises(refusals.NotSignedIn):
            user(nobody, users)
    with pytest.raises(refusals.NotSignedIn):
        user("bob", {"alice": ()})
    stranger = user("bob", LOOKERS).card
    assert stranger is not None
    assert not stranger.allows(Right.ADMIN, "x")


@pytest.mark.parametrize("text", ['alice = "describe *"', 'alice = ["fly *"]', 'alice = ["describe"]', "[", "a = 1"])
def test_a_users_file_that_says_nothing_sensible_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "users.toml").write_text(text)
    with pytest.raises(InvalidConfiguration, match="a line is"):
        read_users(tmp_path / "users.toml")


@pytest.mark.parametrize(
    ("options", "secured", "kind"),
    [
        (ServeOptions("127.0.0.1", 0), False, SignInKind.NONE),
        (ServeOptions("::1", 0), True, SignInKind.CARD),
        (ServeOptions("0.0.0.0", 0, certificate=Path("c"), key=Path("k")), True, SignInKind.CARD),
        (ServeOptions("0.0.0.0", 0, proxies=("10.0.0.1",)), True, SignInKind.CARD),
        (ServeOptions("0.0.0.0", 0, proxies=("10.0.0.1",), header="X-User"), False, SignInKind.PROXY),
    ],
)
def test_how_people_are_known(options: ServeOptions, secured: bool, kind: SignInKind) -> None:
    assert check(options, secured=secured) is kind


@pytest.mark.parametrize(
    ("options", "secured", "told"),
    [
        (ServeOptions("0.0.0.0", 0), True, "is no loopback address"),
        (ServeOptions("10.0.0.1", 0, certificate=Path("c"), key=Path("k")), False, "everybody who reaches the console"),
        (ServeOptions("0.0.0.0", 0, proxies=("10.0.0.1",)), False, "everybody who reaches the console"),
        (ServeOptions("127.0.0.1", 0, header="X-User"), False, "--trusted-proxy"),
        (ServeOptions("127.0.0.1", 0, users=Path("u")), False, "--users is for"),
        (ServeOptions("127.0.0.1", 0, key=Path("k")), False, "go together"),
    ],
)
def test_a_console_that_would_let_strangers_in_does_not_start(options: ServeOptions, secured: bool, told: str) -> None:
    with pytest.raises(InvalidConfiguration, match=told):
        check(options, secured=secured)


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="--trusted-proxy"):
        networks(["10.0.0.0/33"])


# --- bounds -----------------------------------------------------------------------------------------------------------------


def test_a_listener_that_does_not_read_is_cut_and_holds_nothing_more() -> None:
    listener = LiveListener(lambda: None)
    for _ in range(LINE_MAX + 1):
        listener.tell(("overview", b"{}"))
    assert listener.line.qsize() == 1
    assert listener.line.get_nowait()[0] == "cut"
    listener.tell(("overview", b"{}"))
    assert listener.line.empty()


async def test_what_is_read_is_read_once_for_all_who_ask_at_once() -> None:
    reads, gate = list[int](), asyncio.Event()

    async def read() -> int:
        reads.append(len(reads))
        await gate.wait()
        if reads[-1] == 1:
            raise errors.Unavailable
        return reads[-1]

    shared = SharedRead(read, 60.0)
    asking = [asyncio.create_task(shared.get()) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()  # whoever goes takes nobody along
    gate.set()
    assert await asyncio.gather(*asking[1:]) == [0, 0, 0, 0]
    assert await shared.get() == 0
    shared.drop()
    with pytest.raises(errors.Unavailable):
        await shared.get()
    assert await shared.get() == 2  # a failure is not kept
    assert reads == [0, 1, 2]
    await shared.close()


async def test_what_a_slow_reader_of_live_messages_leaves_is_bounded_and_it_is_told_why() -> None:
    outlet, piece = ReaderBuffer(), ("message", b"x" * 1024 * 1024)
    for _ in range(WAITING_BYTES_MAX // len(piece[1])):
        outlet.offer(piece)
    assert not outlet.ended
    outlet.offer(piece)
    assert outlet.ended
    outlet.offer(piece)
    name, data = await outlet.next()
    assert name == CUT
    assert "were not read in time" in json.loads(data)["reason"]


def test_pages_have_what_lies_there() -> None:
    rows = list(range(10_000))
    assert page(rows, 9_990, 50) == rows[9_990:]
    assert page(rows, 20_000, 50) == []
    assert page(rows, -5, 2) == [0, 1]
    assert len(page(rows, 0, 10_000)) == PAGE_MAX


# --- problems and the document ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.QueueNotFound("x"), 404),
        (errors.GroupNotFound("x"), 404),
        (errors.QueueConflict("x"), 409),
        (errors.NotRecorded("x"), 409),
        (errors.InvalidTopic("x"), 400),
        (errors.AccessDenied("x"), 403),
        (errors.PayloadTooLarge("x"), 413),
        (errors.ZooKeeperUnavailable("x"), 503),
        (errors.ClusterNotFound("x"), 503),
        (errors.NotReady("x"), 503),
        (errors.DeadlineExceeded("x"), 504),
        (errors.IncompatibleVersion("x"), 501),
        (errors.DataLost("x"), 500),
        (refusals.NotSignedIn(), 401),
        (refusals.UnknownHost(), 421),
        (refusals.TooManyStreams(), 429),
    ],
)
def test_each_error_has_its_status(error: RoqError, status: int) -> None:
    assert status_of(error) == status


def every(kind: type[RoqError]) -> list[type[RoqError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in every(child))]


def test_every_error_says_what_to_do() -> None:
    for kind in every(RoqError):
        if kind is errors.MessagesLost:
            continue
        problem = problem_of(kind.__new__(kind, "x"), "/v1/x")
        assert (problem.title, problem.instance) == (kind.__name__, "/v1/x")
        assert problem.advice
        assert 400 <= problem.status < 600


def test_the_document_names_no_shape_that_it_has_not() -> None:
    app = FastAPI()
    for module in ROUTERS:
        app.include_router(module.router)
    found = json.dumps(document(app))
    paths = json.loads(found)["paths"]
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', found))
    assert named - json.loads(found)["components"]["schemas"].keys() == set()
    assert {"/v1/queues/{queue}/messages", "/v1/overview", "/v1/session"} <= paths.keys()
    operations = [one for path in paths.values() for one in path.values()]
    assert all("default" in one["responses"] and "422" not in one["responses"] for one in operations)
    streams = [
        one["responses"]["200"]["content"] for one in operations if "text/event-stream" in str(one["responses"].get("200"))
    ]
    assert [list(content) for content in streams] == [["text/event-stream"]] * 4
    takes_a_body = [one for path in paths.values() for method, one in path.items() if method == "put"]
    assert takes_a_body
    assert all("requestBody" in one for one in takes_a_body)


def test_without_its_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv = ['roq', 'console']; from roq.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == 'roq: CallError: roq console needs uvicorn: pip install "roq-messaging[console]"\n'


def test_the_command_line_does_not_wait_for_the_consoles_libraries() -> None:
    names = "[name for name in ('fastapi', 'starlette', 'uvicorn') if name in sys.modules]"
    code = f"import sys; from roq.cli.main import command; command('console'); print({names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_end_of_a_log_is_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"first\nsecond\nthird\n")
    assert read_end(log, 1000).data == b"first\nsecond\nthird\n"
    assert (read_end(log, 10).size, read_end(log, 10).data) == (19, b"third\n")
    assert read_end(log, 3).data == b""
    with pytest.raises(errors.CallError, match="there is no log"):
        read_end(tmp_path / "y.log", 10)
