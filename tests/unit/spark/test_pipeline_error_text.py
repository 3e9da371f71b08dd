"""Classes and patterns of error texts."""

from __future__ import annotations

import pytest

from roq.spark.pipeline.dead_letters import NO_CLASS, NO_ERROR, PATTERN_CHARACTERS_MAX, error_class, error_pattern


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("", NO_ERROR, NO_ERROR),
        (" \n", NO_ERROR, NO_ERROR),
        ("ValueError: bad", "ValueError", "ValueError: bad"),
        ("ValueError", "ValueError", "ValueError"),
        ("requests.Timeout: 3.5 s\n\nTraceback …", "requests.Timeout", "requests.Timeout: # s"),
        ("the disk is full", NO_CLASS, "the disk is full"),
        ("KeyError: 'customer-17'", "KeyError", "KeyError: <text>"),
        ("can't read 'a' and can't write 'b'", NO_CLASS, "can't read <text> and can't write <text>"),
        ("OSError: [Errno 28] /data/in/17.csv: no space", "OSError", "OSError: [Errno #] <path>: no space"),
        ("no answer of 10.1.2.3:4410 in 5e3 ms", NO_CLASS, "no answer of <address> in # ms"),
        ("http://x.org/a?b=1 said 503", NO_CLASS, "<address> said #"),
        ("task 3f2b8a90c1d2e4f5 at 2026-01-02T03:04:05Z", NO_CLASS, "task <id> at <time>"),
        ("id 123e4567-e89b-12d3-a456-426614174000 again", NO_CLASS, "id <id> again"),
        ("object at 0x7f00deadbeef", NO_CLASS, "object at <id>"),
        ("utf8 is no number", NO_CLASS, "utf8 is no number"),
    ],
)
def test_texts(text: str, kind: str, pattern: str) -> None:
    assert (error_class(text), error_pattern(text)) == (kind, pattern)


def test_a_long_text_is_cut_and_takes_no_time() -> None:
    assert len(error_pattern("x" * 100_000)) == PATTERN_CHARACTERS_MAX
    assert error_pattern("'" * 4001).startswith("<text>")
    assert error_pattern("/a" * 2000) == "<path>"
