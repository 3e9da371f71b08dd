"""Where log lines go, and what every one of them says of who wrote it."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq.errors import InvalidConfiguration
from roq.runtime.log_output import LOG_BYTES_MAX, JsonLines, set_up_logging
from roq.runtime.observe import logger

log = logger("roq.test_log_output")
PROGRAM = """
import sys
from roq.runtime.log_output import set_up_logging
from roq.runtime.observe import logger
set_up_logging("gcm", log_format=sys.argv[1])
logger("roq.example").warning("host is lost", extra={"fields": {"reason": "its session ended"}})
print("rich.logging" in sys.modules)
"""


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers and isinstance(handler, logging.StreamHandler):
            handler.stream.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_says_who_wrote_it_and_the_fields_stand_beside(tmp_path: Path) -> None:
    before = time.time()
    set_up_logging("exchange/orders/3f", path=tmp_path / "log", host="host-2", queue="orders")
    log.warning("tape waits", extra={"fields": {"reason": "no store", "stores": 2}})
    (line,) = written(tmp_path / "log")
    assert before - 1 <= float(str(line.pop("t"))) <= time.time()
    assert line == {
        "level": "warning",
        "logger": "roq.test_log_output",
        "pid": os.getpid(),
        "message": "tape waits",
        "host": "host-2",
        "process": "exchange/orders/3f",
        "queue": "orders",
        "reason": "no store",
        "stores": 2,
    }


def test_what_a_line_tells_of_somebody_else_does_not_hide_who_wrote_it(tmp_path: Path) -> None:
    set_up_logging("monitor/orders", path=tmp_path / "log", host="host-1", queue="orders")
    log.warning("fenced", extra={"fields": {"host": "host-2", "process": "exchange/orders/7", "queue": "orders"}})
    (line,) = written(tmp_path / "log")
    assert (line["host"], line["about_host"]) == ("host-1", "host-2")
    assert (line["process"], line["about_process"]) == ("monitor/orders", "exchange/orders/7")
    assert line["queue"] == "orders"
    assert "about_queue" not in line, "the same is said once"


def test_a_process_of_no_queue_has_none_until_a_line_is_about_one(tmp_path: Path) -> None:
    set_up_logging("gcm", path=tmp_path / "log")
    log.info("this GCM leads")
    log.error("queue was not recovered", extra={"fields": {"queue": "orders"}})
    first, second = written(tmp_path / "log")
    assert first["host"] == os.uname().nodename
    assert "queue" not in first
    assert second["queue"] == "orders"


def test_a_line_about_a_queues_process_is_found_by_the_queue(tmp_path: Path) -> None:
    set_up_logging("hcm/h1", path=tmp_path / "log", host="h1")
    for process in ("exchange/orders/3f2a", "master/orders@billing", "store"):
        log.info("process ended", extra={"fields": {"process": process}})
    lines = written(tmp_path / "log")
    assert [line.get("queue") for line in lines] == ["orders", "orders@billing", None]
    assert {line["process"] for line in lines} == {"hcm/h1"}


def test_an_error_keeps_its_traceback_on_the_one_line(tmp_path: Path) -> None:
    set_up_logging("gcm", path=tmp_path / "log")
    try:
        raise KeyError("orders")
    except KeyError:
        log.exception("a request could not be decided")
    (line,) = written(tmp_path / "log")
    assert str(line["exception"]).splitlines()[-1] == "KeyError: 'orders'"


@pytest.mark.parametrize("value", [Path("/data"), b"\xff", {1, 2}, "\udcff", 2**70, float("inf"), object()])
def test_no_value_costs_its_line(value: object) -> None:
    record = logging.makeLogRecord({"msg": "x", "fields": {"value": value}})
    assert json.loads(JsonLines({}).format(record))["message"] == "x"


def test_a_large_file_is_begun_anew_and_one_older_half_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (LOG_BYTES_MAX + 1))
    set_up_logging("gcm", path=path)
    log.warning("after")
    assert [line["message"] for line in written(path)] == ["after"]
    assert (tmp_path / "log.1").stat().st_size == LOG_BYTES_MAX + 1


def run(log_format: str, errors: int) -> str:
    """PROGRAM's output with these standard errors; what it wrote there is the caller's to read."""
    program = [sys.executable, "-c", PROGRAM, log_format]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    return subprocess.run(program, stdout=subprocess.PIPE, stderr=errors, env=environment, check=True, text=True).stdout.strip()


@pytest.mark.parametrize(("log_format", "people"), [("auto", True), ("console", True), ("json", False)])
def test_on_a_terminal_people_read_it_unless_json_is_asked_for(log_format: str, people: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        assert run(log_format, theirs) == str(people)
        text = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    if people:
        assert "WARNING" in text
        assert "host is lost" in text
        assert "\x1b[" in text, "by rich, with colours"
        assert "{" not in text
    else:
        assert json.loads(text)["reason"] == "its session ended"


@pytest.mark.parametrize(("log_format", "people"), [("auto", False), ("json", False), ("console", True)])
def test_into_a_pipe_it_is_json_unless_the_console_is_asked_for(log_format: str, people: bool, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        assert run(log_format, errors.fileno()) == str(people)
    text = (tmp_path / "errors").read_text()
    if people:
        assert "host is lost: reason=its session ended" in text
    else:
        assert json.loads(text)["message"] == "host is lost"


@pytest.mark.parametrize(
    ("level", "log_format", "named"), [("LOUD", "json", "log level 'LOUD'"), ("INFO", "xml", "log format 'xml'")]
)
def test_what_does_not_exist_is_refused_by_name(level: str, log_format: str, named: str) -> None:
    with pytest.raises(InvalidConfiguration, match=named):
        set_up_logging("gcm", level, log_format=log_format)


def test_nothing_in_a_line_is_obeyed_by_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    set_up_logging("gcm", log_format="console")
    try:
        raise ValueError("\x1b[2J[bold]:smile:")
    except ValueError:
        log.exception("refused %s", "\x1b]0;title\x07", extra={"fields": {"name": "[red]\r"}})
    text = capsys.readouterr().err
    assert r"refused \x1b]0;title\x07: name=[red]\r" in text
    assert r"ValueError: \x1b[2J[bold]:smile:" in text
    assert "\x1b" not in text
