"""The end of a log on this host, for people who are elsewhere."""

from __future__ import annotations

from pathlib import Path

from roq.errors import CallError
from roq.wire.hcm import LOG_BYTES_MAX, LogEnd


def read_end(path: Path, bytes_max: int) -> LogEnd:
    """Whole lines, at most so many bytes of them. Raises CallError."""
    wanted = min(max(bytes_max, 1), LOG_BYTES_MAX)
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            begin = log.seek(max(0, size - wanted))
            data = log.read(wanted)
    except OSError as error:
        raise CallError(f"there is no log {path} that can be read: {error.strerror}") from None
    return LogEnd(size, data if begin == 0 else data[data.find(b"\n") + 1 :])
