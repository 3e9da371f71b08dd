"""Where our own processes write their log lines, and in which form: JSON by python-json-logger, for people by rich.

Every JSON line says who wrote it: host, process, pid and, where there is one, queue. Imported by what is a process of its own
(the daemons, the command line); a user's program has its own logging, see roq/runtime/observe.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import platform
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from roq.errors import InvalidConfiguration

LOG_BYTES_MAX = 16 * 1024 * 1024  # a log file is cut in two at this size, one older half is kept

LogFormat = Literal["auto", "json", "console"]
"""auto: console if standard error is a terminal and no file is named, else json."""


def _queue_of(process: str) -> str:
    """`orders` of `exchange/orders/3f2a`, as roq.wire.assignment names processes; "" of one that serves no queue."""
    return (*process.split("/"), "")[1]


class JsonLines(JsonFormatter):
    """{"t": seconds since 1970, "level", "logger", "pid", "message", …origin, …fields, "exception"}

    origin: who writes, e.g. host and process. A field that has the name of one of these, and another value, is about somebody
    else: `about_host` is a host that a line tells of, `host` the one that tells. A line about a process of a queue has its
    `queue`.
    """

    def __init__(self, origin: Mapping[str, str]) -> None:
        super().__init__(
            ["created", "levelname", "name", "process", "message"],
            rename_fields={
                "created": "t",
                "levelname": "level",
                "name": "logger",
                "process": "pid",
                "exc_info": "exception",
            },
            reserved_attrs=[*RESERVED_ATTRS, "what", "fields"],
            json_default=str,
        )
        self._origin = origin

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """What one record says, into log_data."""
        super().add_fields(log_data, record, message_dict)
        log_data["t"] = round(record.created, 6)
        log_data["level"] = record.levelname.lower()
        log_data["message"] = getattr(record, "what", None) or record.getMessage()
        log_data |= self._origin
        for name, value in getattr(record, "fields", {}).items():
            if log_data.setdefault(name, value) != value:
                log_data[f"about_{name}"] = value
        if queue := _queue_of(str(log_data.get("about_process", ""))):
            log_data.setdefault("queue", queue)


class _CappedFile(logging.StreamHandler):  # type: ignore[type-arg]
    """Appends to a file and starts over once it is large; keeps one older half beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path.open("a", buffering=1))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream.closed or self.stream.tell() > LOG_BYTES_MAX:
                self._begin_anew()
        except OSError:  # tell() writes what is left: on a full disk the record is dropped, and the program goes on
            return
        super().emit(record)

    def _begin_anew(self) -> None:
        self.stream.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
        self.stream = self.path.open("a", buffering=1)


def visible(text: str) -> str:
    """What a terminal would obey instead of showing it (escape sequences, carriage returns) as Python writes it."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


class _Visible(logging.Formatter):
    """The message and the traceback, with nothing in them that a terminal obeys: names and errors come from anybody."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Terminal(logging.Handler):
    """Lines for people on standard error. rich is imported with the first one: a command that logs none starts without it."""

    def emit(self, record: logging.LogRecord) -> None:
        self._rich.emit(record)

    @cached_property
    def _rich(self) -> logging.Handler:
        console = importlib.import_module("rich.console").Console(stderr=True, markup=False, emoji=False)
        made: logging.Handler = importlib.import_module("rich.logging").RichHandler(
            console=console, show_path=False, omit_repeated_times=False
        )
        made.setFormatter(_Visible("%(message)s", "%H:%M:%S"))
        return made


def set_up_logging(
    process: str,
    level: str = "INFO",
    path: Path | None = None,
    *,
    log_format: str = "auto",
    host: str = "",
    queue: str = "",
) -> None:
    """Send this process's records to `path`, or to standard error. host: its name in the cluster (default: the machine's).
    queue: the one it works for, if it is one. Raises InvalidConfiguration: no such level, or no such `LogFormat`."""
    if log_format not in get_args(LogFormat):
        raise InvalidConfiguration(f"log format {log_format!r}: one of {', '.join(get_args(LogFormat))}")
    if not isinstance(logging.getLevelName(level), int):
        raise InvalidConfiguration(f"log level {level!r}: DEBUG, INFO, WARNING, ERROR or CRITICAL")
    if log_format == "console" or (log_format == "auto" and path is None and sys.stderr and sys.stderr.isatty()):
        handler: logging.Handler = _Terminal()
    else:
        handler = _CappedFile(path) if path else logging.StreamHandler(sys.stderr)
        origin = {"host": host or platform.node(), "process": process}
        handler.setFormatter(JsonLines({**origin, "queue": queue} if queue else origin))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("kazoo").setLevel(logging.ERROR)
