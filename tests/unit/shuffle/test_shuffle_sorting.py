"""The order of encoded keys is that of their bytes, and finding it takes work in proportion to them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pytest

from roq.shuffle.keys import WORD, KeyEncoder, Keys, Rows, Words, order

SCHEMA = pa.schema([("k", pa.binary())])


def encoded(plain: list[bytes]) -> Keys:
    return KeyEncoder(SCHEMA, ["k"]).encode(pa.record_batch([pa.array(plain, pa.binary())], schema=SCHEMA))


def zeros(draw: random.Random) -> bytes:
    return bytes(draw.randrange(200)) + draw.choice([b"", b"\0", b"\1"]) + bytes(draw.choice([0, 0, 1, 7, 8, 9, 300]))


def few(draw: random.Random) -> bytes:
    return draw.choice([b"ab" * 40, b"ab" * 40 + b"\0", b"ab" * 100, b"a", b"", b"ab" * 39 + b"ac"])


def short(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(4))


@pytest.mark.parametrize("key", [zeros, few, short])
@pytest.mark.parametrize("prefix", [b"", b"p", b"prefix of eight and more"])
def test_the_order_is_that_of_the_bytes_and_stable(key: Callable[[random.Random], bytes], prefix: bytes) -> None:
    draw = random.Random(f"{key.__name__}{prefix!r}")
    for count in (0, 1, 2, 30, 3000):
        plain = [prefix + key(draw) for _ in range(count)]
        assert order(encoded(plain)).tolist() == sorted(range(count), key=plain.__getitem__)


def test_one_long_key_makes_no_work_for_many_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    plain = Keys.words

    def noting(self: Keys, at: int, rows: Rows | None = None) -> Words:
        nonlocal looked_at
        found = plain(self, at, rows)
        looked_at += len(found)
        return found

    monkeypatch.setattr(Keys, "words", noting)
    keys = [b"same"] * 5000 + [b"long" * 15_000] * 2 + [b"other"] * 5000
    assert order(encoded(keys)).tolist() == sorted(range(len(keys)), key=keys.__getitem__)
    assert looked_at <= 20 * len(keys) + 2 * 60_000 // WORD + 100
