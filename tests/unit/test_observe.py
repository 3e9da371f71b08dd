"""What a log line says to whoever reads it: as ordinary text, and as JSON."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import gcm
import hcm
import roq
from roq.errors import MessagesLost
from roq.pubsub.subscription import log_lost
from roq.runtime.log_output import JsonLines
from roq.runtime.observe import Counters, Refusals, logger

FOLDERS = [Path(package.__file__ or "").parent for package in (roq, gcm, hcm)]
LOST = MessagesLost(0xAB, "eu.paris", 7, 12, 3)


@pytest.fixture(autouse=True)
def _ordinary_level(caplog: pytest.LogCaptureFixture) -> None:
    """A command that ran in this process before has chosen its own."""
    caplog.set_level(logging.WARNING)


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a program with ordinary logging writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def test_the_default_on_lost_says_what_is_lost_in_its_text(written: io.StringIO) -> None:
    log_lost(LOST)
    expected = "messages lost: publisher=00000000000000ab, topic=eu.paris, first=7, last=12, count=3"
    assert written.getvalue() == f"WARNING:roq.pubsub.subscription:{expected}\n"


def test_a_refusal_says_why_in_its_text(written: io.StringIO) -> None:
    Refusals(logger("roq.test"), Counters()).note("undecodable", "100% wrong %s")
    assert written.getvalue() == "WARNING:roq.test:refused input: reason=undecodable, detail=100% wrong %s, total=1\n"


def test_in_json_the_words_stay_and_the_facts_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    log_lost(LOST)
    line = json.loads(JsonLines({"process": "gcm"}).format(caplog.records[-1]))
    assert (line["message"], line["topic"], line["count"]) == ("messages lost", "eu.paris", 3)


def test_a_line_without_fields_stays_as_it_is(written: io.StringIO) -> None:
    logger("roq.test").error("%s of %s", 1, 2)
    assert written.getvalue() == "ERROR:roq.test:1 of 2\n"


def _logs_fields(tree: ast.Module) -> bool:
    """Whether a warning or an error of the module has fields, or its logger is given away to somebody who logs some."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = ("warning", "error", "exception", "critical")
    warnings = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]
    given = [argument for call in calls for argument in call.args if isinstance(argument, ast.Name)]
    return any(one.id == "log" for one in given) or any(key.arg == "extra" for call in warnings for key in call.keywords)


def test_every_module_whose_warnings_have_fields_shows_them_as_text() -> None:
    paths = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    sources = {path: path.read_text() for path in paths}
    plain = [
        str(path)
        for path, source in sources.items()
        if "log = logging.getLogger(" in source and _logs_fields(ast.parse(source))
    ]
    assert plain == []
