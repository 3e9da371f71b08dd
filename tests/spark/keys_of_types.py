"""Key columns of every type a shuffle accepts from Spark: values at the edges of each, others drawn at random, many equal ones.

Values are made as what Arrow stores (bits, days, microseconds, bytes), so that nothing is left out that Python can't say: NaNs
with payloads, strings that are no UTF-8, dates and timestamps outside the years 1 to 9999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

Draw = Callable[[Random], Any]  # one stored value

DAY_NANOSECONDS = 86_400_000_000_000
RANDOM_VALUES = 40  # beside the edges


@dataclass(frozen=True)
class KeyType:
    """A type of key columns. spark: as in a DDL schema. stored: the Arrow type of its values as given, to be viewed as `arrow`.
    edges, draw, alike: in terms of `stored`."""

    name: str
    spark: str
    arrow: pa.DataType
    stored: pa.DataType
    edges: tuple[Any, ...]
    draw: Draw
    alike: tuple[Any, ...] = ()  # some of the edges that Spark's comparison does not tell apart from others of them

    def pool(self, chance: Random) -> list[Any]:
        """All the edges and some random values."""
        return [*self.edges, *(self.draw(chance) for _ in range(RANDOM_VALUES if self.edges else 0))]

    def many(self, rows: int, chance: Random) -> list[Any]:
        """So many values or None, in any order: all of the pool, a few of them often. rows: more than the pool has."""
        pool = self.pool(chance)
        if not pool:
            return [None] * rows
        often = [None, *self.alike, *chance.sample(pool, min(3, len(pool)))]
        found = [*pool, *(chance.choice(often if chance.random() < 0.5 else pool) for _ in range(rows - len(pool)))]
        chance.shuffle(found)
        return found

    def few(self, rows: int, chance: Random) -> list[Any]:
        """So many values or None, of a handful of different ones."""
        pool = self.pool(chance)
        different = [None, *self.alike, *chance.sample(pool, min(6, len(pool)))]
        return [chance.choice(different) for _ in range(rows)]

    def column(self, values: Iterable[Any]) -> pa.Array:
        """An array of stored values or None."""
        return pa.array(values, self.stored).view(self.arrow)


def _whole(name: str, bits: int, arrow: pa.DataType, spark: str = "", *more: int) -> KeyType:
    """A type that is a signed number of so many bits."""
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    near = (least, least + 1, -256, -255, -129, -128, -1, 0, 1, 127, 128, 255, 256, 65_535, most - 1, most, *more)
    edges = tuple(sorted({value for value in near if least <= value <= most}))
    stored = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    return KeyType(name, spark or name, arrow, stored, edges, lambda chance: chance.getrandbits(bits) + least)


def _floating(name: str, bits: int) -> KeyType:
    """IEEE numbers, given by their bits."""
    mantissa = {32: 23, 64: 52}[bits]
    infinity = (1 << (bits - 1)) - (1 << mantissa)
    positive = (
        *(0, 1, 2, (1 << mantissa) - 1, 1 << mantissa),  # zero, the least and the greatest subnormal, the least normal
        *(_bits_of(1.0, bits), _bits_of(1.0, bits) + 1, _bits_of(0.5, bits), infinity - 1, infinity),
        *(infinity + 1, infinity + (1 << (mantissa - 1)), infinity + (1 << (mantissa - 1)) + 5, (1 << (bits - 1)) - 1),  # NaNs
    )
    edges = (*positive, *(value | 1 << (bits - 1) for value in positive))
    stored, arrow = (pa.uint32(), pa.float32()) if bits == 32 else (pa.uint64(), pa.float64())
    alike = (0, 1 << (bits - 1), infinity + 1, (1 << bits) - 1)  # both zeros, two NaNs
    return KeyType(name, name, arrow, stored, edges, lambda chance: chance.getrandbits(bits), alike)


def _bits_of(value: float, bits: int) -> int:
    return int(np.array(value, f"f{bits // 8}").view(f"u{bits // 8}"))


def _decimal(precision: int, scale: int) -> KeyType:
    def of(unscaled: int) -> Decimal:
        return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))

    most = 10**precision - 1
    near = {0, 1, 9, 255, 256, 2**31, 2**63 - 1, 2**63, 2**64, 10**scale, 10**scale + 1, 10 ** (precision - 1), most - 1}
    positive = [*sorted(value for value in near if value < most), most]
    edges = tuple(of(value * sign) for sign in (-1, 1) for value in positive)
    arrow = pa.decimal128(precision, scale)

    def draw(chance: Random) -> Decimal:
        return of(chance.randrange(10 ** chance.randint(1, precision)) * chance.choice((-1, 1)))

    return KeyType(f"decimal_{precision}_{scale}", f"decimal({precision},{scale})", arrow, arrow, edges, draw)


# Around the ends of UTF-8's lengths, and of what UTF-16 writes as surrogates: there UTF-16's order is another one than UTF-8's.
CHARACTERS = "\0\x01\x7f\x80\u07ff\u0800\ud7ff\ue000\ufffd\uffff\U00010000\U0001f600\U0010ffff"
WORDS = (
    "aA",
    "bB",
    "é",
    "e\u0301",
    "ß",
    "ss",
    "İ",
    "i\u0307",
    "ǆ",
    "a\u200db",
    "aaaaaaab",
    *("a" * size for size in (8, 9, 17)),
)
NO_UTF8 = (b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xff", b"\xc3", b"\xc0\x80", b"a\xf4\x90\x80\x80")  # Spark's strings may be so
ZEROS = (b"", b"\0", b"\0\0", b"\0a", b"\0\x01", b"a", b"a\0", b"a\0\0", b"a\0b", b"a\x01", b"\0" * 8, b"\0" * 9, b"aaaaaaaa\0")
RAW = (b"\0\xff", b"a\0\xff", b"a\xff", b"\x01", b"\x7f", b"\x80", b"\xfe", b"\xff", b"\xff\0", b"\xff\xff", b"\xff" * 8)


def _text(chance: Random) -> bytes:
    return "".join(chance.choices(CHARACTERS + "ab", k=chance.choice((1, 2, 3, 9, 30)))).encode()


def _raw(chance: Random) -> bytes:
    return bytes(chance.choices((0, 1, 0x7F, 0x80, 0xFF, *b"a"), k=chance.choice((1, 2, 3, 8, 9, 30))))


TEXTS = (*ZEROS, *NO_UTF8, *(one.encode() for one in CHARACTERS), *(one.encode() for one in WORDS))
# 0001-01-01, the day before the Gregorian calendar, 1900-01-01, 2020-03-29 (summer time begins), 9999-12-31
DAYS = (-719_162, -141_428, -25_567, 18_350, 2_932_896)
MOMENTS = tuple(day * 86_400_000_000 + second * 1_000_000 for day in DAYS for second in (-1, 0, 3_600, 5_400, 86_399))

KEY_TYPES = (
    KeyType("boolean", "boolean", pa.bool_(), pa.bool_(), (False, True), lambda chance: chance.random() < 0.5),
    _whole("byte", 8, pa.int8()),
    _whole("short", 16, pa.int16()),
    _whole("int", 32, pa.int32()),
    _whole("long", 64, pa.int64()),
    _floating("float", 32),
    _floating("double", 64),
    *(_decimal(*each) for each in ((3, 2), (9, 0), (18, 18), (19, 2), (38, 0), (38, 38))),
    KeyType("string", "string", pa.string(), pa.binary(), TEXTS, _text),
    KeyType("binary", "binary", pa.binary(), pa.binary(), (*ZEROS, *RAW), _raw),
    _whole("date", 32, pa.date32(), "date", *DAYS),
    _whole("timestamp", 64, pa.timestamp("us", "UTC"), "timestamp", *MOMENTS),
    _whole("timestamp_ntz", 64, pa.timestamp("us"), "timestamp_ntz", *MOMENTS),
    KeyType("time", "time(6)", pa.time64("ns"), pa.int64(), (0, 1_000, DAY_NANOSECONDS // 2, DAY_NANOSECONDS - 1_000),
            lambda chance: chance.randrange(DAY_NANOSECONDS // 1_000) * 1_000),
    _whole("interval", 64, pa.duration("us"), "interval day to second"),
    KeyType("void", "void", pa.null(), pa.null(), (), lambda _: None),
)  # fmt: skip
BY_NAME = {each.name: each for each in KEY_TYPES}


def stored(column: pa.ChunkedArray) -> list[Any]:
    """The values to the bit, as Python objects that are equal if and only if they are the same."""
    kind = column.type
    if pa.types.is_null(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return list(column.to_pylist())
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return list(column.combine_chunks().view(pa.binary()).to_pylist())
    bits = {1: pa.int8(), 2: pa.int16(), 4: pa.int32(), 8: pa.int64()}[kind.byte_width]
    return list(column.combine_chunks().view(bits).to_pylist())


def comparable(column: pa.ChunkedArray) -> list[Any]:
    """The values as Spark's comparison tells them apart: NaN is NaN, minus zero is zero."""
    if not pa.types.is_floating(column.type):
        return stored(column)
    return ["NaN" if value != value else None if value is None else value + 0.0 for value in column.to_pylist()]  # noqa: PLR0124
