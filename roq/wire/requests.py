"""Requests and their answers: ordinary messages of a queue on private topics, told apart by headers.

    request  topic _serve.<server>  roq-request number   roq-reply topic of the answer   roq-topic what it is about
                                    roq-timeout-ms how long its caller waits for the answer
    answer   topic _reply.<caller>  roq-request number   roq-outcome, unless it is DONE: then the payload is text

Server and caller are the ids of subscribers, in 16 hexadecimal digits. The other headers are the application's. Private topics
reach only subscribers whose filter names them: one that begins with a wildcard does not match them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from roq.errors import FrameError, InvalidConfiguration, InvalidTopic
from roq.ids import topic_bytes
from roq.wire.headers import OWN_PREFIX, Headers, OwnHeaders, check_headers

SERVE_PREFIX, REPLY_PREFIX = "_serve.", "_reply."
PRIVATE_PREFIXES = (SERVE_PREFIX, REPLY_PREFIX)
NUMBER, REPLY_TO, ABOUT, TIMEOUT, OUTCOME = ("roq-request", "roq-reply", "roq-topic", "roq-timeout-ms", "roq-outcome")
ANSWERS = re.compile(re.escape(REPLY_PREFIX) + "[0-9a-f]{16}")
DIGITS_MAX = 18
FILTERS_BYTES_MAX = 4096  # of one server, together: every caller gets every server's
SECONDS_MAX = 1e9  # what nobody waits for


class RequestOutcome(StrEnum):
    """What became of a request."""

    DONE = "done"
    FAILED = "failed"  # by the application of the server
    REFUSED = "refused"  # nobody has looked at it, nor will: another server may do it
    LOST = "lost"  # the server ends, and its application had the request


class RequestHead(NamedTuple):
    """What a request says beside its payload."""

    number: int
    reply_to: str
    topic: str
    seconds: float
    headers: dict[str, str | bytes]


def serve_topic(server: int) -> str:
    """Where a server gets its requests."""
    return f"{SERVE_PREFIX}{server:016x}"


def reply_topic(caller: int) -> str:
    """Where a caller gets its answers."""
    return f"{REPLY_PREFIX}{caller:016x}"


def check_filters(topics: tuple[str, ...]) -> None:
    """What a server serves, filters that are well-formed. Raises InvalidConfiguration: they are too long together."""
    size = sum(len(one.encode()) for one in topics)
    if size > FILTERS_BYTES_MAX:
        raise InvalidConfiguration(f"filters of {size} bytes; one server has at most {FILTERS_BYTES_MAX}: use wildcards")


def request_headers(head: RequestHead) -> OwnHeaders:
    """All headers of a request. `head.headers` were checked."""
    milliseconds = max(1, int(min(head.seconds, SECONDS_MAX) * 1000))
    own = {NUMBER: str(head.number), REPLY_TO: head.reply_to, ABOUT: head.topic, TIMEOUT: str(milliseconds)}
    return OwnHeaders({**head.headers, **own})


def request_head(headers: Mapping[str, str | bytes]) -> RequestHead:
    """Of a message on a server's topic, where everybody who publishes can write. Raises FrameError: it is no request."""
    reply_to, about = headers.get(REPLY_TO), headers.get(ABOUT)
    if not isinstance(reply_to, str) or not ANSWERS.fullmatch(reply_to) or not isinstance(about, str):
        raise FrameError("a message on a server's topic that is no request")
    try:
        topic_bytes(about)
    except InvalidTopic as error:
        raise FrameError(f"a request about no topic: {error}") from None
    return RequestHead(_number(headers, NUMBER), reply_to, about, _number(headers, TIMEOUT) / 1000, _foreign(headers))


def answer_headers(number: int, outcome: RequestOutcome, headers: Headers | None = None) -> OwnHeaders:
    """All headers of an answer. Raises InvalidHeaders."""
    own = OwnHeaders(check_headers(headers)[0] if headers else {})
    own[NUMBER] = str(number)
    if outcome is not RequestOutcome.DONE:
        own[OUTCOME] = str(outcome)
    return own


def answer_head(headers: Mapping[str, str | bytes]) -> tuple[int, RequestOutcome, dict[str, str | bytes]]:
    """Number, outcome and the application's headers of an answer. Raises FrameError: it is none."""
    try:
        outcome = RequestOutcome(str(headers.get(OUTCOME, RequestOutcome.DONE)))
    except ValueError:
        raise FrameError(f"an answer with an unknown outcome {headers[OUTCOME]!r:.40}") from None
    return _number(headers, NUMBER), outcome, _foreign(headers)


def _number(headers: Mapping[str, str | bytes], name: str) -> int:
    value = headers.get(name)
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > DIGITS_MAX:
        raise FrameError(f"header {name} is no number: {value!r:.40}")
    return int(value)


def _foreign(headers: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
    return {name: value for name, value in headers.items() if not name.startswith(OWN_PREFIX)}
