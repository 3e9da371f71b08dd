"""What conditions (where.py) are made of when they are evaluated: closures over a Subject, each of which gives a value.

A value is a bool, a number, a text, a list or an object of JSON; None, which is null or unknown; MISSING, which differs from
None for exists() alone. Unlike types, a division by zero and what is no number give None. Nothing here raises, whatever is in
a message, and each costs what the value's length says at most.

Not covered: which of them fit together, see where.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from roq.wire.decoding import UNDECODABLE

INTEGER_MAX = 2**63  # arithmetic goes on in floating point beyond it, so that no product grows without bound
NUMERAL_MAX = 64  # characters of a text that number() reads

Kind = Literal["boolean", "number", "text", "field"]  # field: known when a message is there
MISSING = msgspec.UNSET


class Selectable(Protocol):
    """What conditions are asked about; roq.Message is one. timestamp: nanoseconds since 1970."""

    @property
    def topic(self) -> str: ...  # noqa: D102
    @property
    def payload(self) -> bytes: ...  # noqa: D102
    @property
    def publisher(self) -> int: ...  # noqa: D102
    @property
    def timestamp(self) -> int: ...  # noqa: D102
    @property
    def headers(self) -> Mapping[str, str | bytes]: ...  # noqa: D102


class Loose(NamedTuple):
    """The same in parts; None is unknown."""

    topic: str | None
    payload: bytes
    headers: Mapping[str, str | bytes]
    publisher: int | None
    timestamp: int | None


class Subject:
    """The message that is looked at, and its body once a field of it was asked for. Set both for the next one."""

    __slots__ = ("_decode", "_nothing", "body", "message")
    message: Selectable | Loose
    body: msgspec.Struct | None

    def __init__(self, decode: Callable[[bytes], msgspec.Struct], nothing: msgspec.Struct) -> None:
        self._decode, self._nothing = decode, nothing

    def read(self) -> msgspec.Struct:
        """The fields of the body that the condition names; none if the payload is no JSON object."""
        try:
            self.body = self._decode(self.message.payload)
        except (*UNDECODABLE, RecursionError):
            self.body = self._nothing
        return self.body


Get = Callable[[Subject], Any]


class Operand(NamedTuple):
    """What gives a value of this kind. constant: without looking at the subject. attribute: it is this one of the body."""

    kind: Kind
    get: Get
    constant: bool = False
    attribute: str = ""


# --- arithmetic and functions -------------------------------------------------------------------------------------------

KINDS: dict[type, Kind] = {bool: "boolean", int: "number", float: "number", str: "text"}
ORDERED: dict[type, Kind] = {int: "number", float: "number", str: "text"}
CLASSES: dict[Kind, tuple[type, ...]] = {"boolean": (bool,), "number": (int, float), "text": (str,)}


def computed(compute: Callable[[Any, Any], Any], left: Any, right: Any) -> int | float | None:
    """A sum, product … of two numbers that is finite."""
    if ORDERED.get(left.__class__) != "number" or ORDERED.get(right.__class__) != "number":
        return None
    try:
        found: int | float = compute(_bounded(left), _bounded(right))
    except ArithmeticError:
        return None
    return found if math.isfinite(found) else None


def _bounded(number: int | float) -> int | float:
    return number if -INTEGER_MAX <= number <= INTEGER_MAX else float(number)


_numeral = msgspec.json.Decoder(int | float).decode


def _number(value: Any) -> int | float | None:
    if value.__class__ is not str:
        return value if ORDERED.get(value.__class__) == "number" else None
    try:
        return _numeral(value) if len(value) <= NUMERAL_MAX else None
    except (*UNDECODABLE, UnicodeEncodeError):  # the latter for lone surrogates
        return None


def _contains(value: Any, part: Any) -> bool | None:
    kind = KINDS.get(part.__class__)
    if value.__class__ is list and kind is not None:
        return any(one == part and KINDS.get(one.__class__) == kind for one in value)
    return part in value if value.__class__ is part.__class__ is str else None


def _startswith(value: Any, part: Any) -> bool | None:
    return value.startswith(part) if value.__class__ is part.__class__ is str else None


def _endswith(value: Any, part: Any) -> bool | None:
    return value.endswith(part) if value.__class__ is part.__class__ is str else None


def _length(value: Any) -> int | None:
    return len(value) if value.__class__ in (str, list, dict) else None


def _lower(value: Any) -> str | None:
    return value.lower() if value.__class__ is str else None


def _upper(value: Any) -> str | None:
    return value.upper() if value.__class__ is str else None


class Builtin(NamedTuple):
    """takes: of each argument, the kinds that it may have; "field" alone is what a message has or has not."""

    takes: tuple[tuple[Kind, ...], ...]
    kind: Kind
    call: Callable[..., Any]


FUNCTIONS = {
    "contains": Builtin((("field", "text"), ("field", "text", "number", "boolean")), "boolean", _contains),
    "endswith": Builtin((("field", "text"), ("field", "text")), "boolean", _endswith),
    "exists": Builtin((("field",),), "boolean", lambda value: value is not MISSING),
    "len": Builtin((("field", "text"),), "number", _length),
    "lower": Builtin((("field", "text"),), "text", _lower),
    "number": Builtin((("field", "text", "number"),), "number", _number),
    "startswith": Builtin((("field", "text"), ("field", "text")), "boolean", _startswith),
    "upper": Builtin((("field", "text"),), "text", _upper),
}


def call(function: Callable[..., Any], gets: list[Get]) -> Get:
    """The function of these values."""
    if len(gets) == 1:
        of = gets[0]
        return lambda subject: function(of(subject))
    left, right = gets
    return lambda subject: function(left(subject), right(subject))


# --- names ------------------------------------------------------------------------------------------------------------


def _publisher(subject: Subject) -> str | None:
    publisher = subject.message.publisher
    return None if publisher is None else f"{publisher:016x}"


def _timestamp(subject: Subject) -> float | None:
    timestamp = subject.message.timestamp
    return None if timestamp is None else timestamp / 1e9


OWN: dict[str, Operand] = {
    "topic": Operand("text", lambda subject: subject.message.topic),
    "publisher": Operand("text", _publisher),
    "size": Operand("number", lambda subject: len(subject.message.payload)),
    "timestamp": Operand("number", _timestamp),
}


def _text(value: str | bytes) -> str | bytes:
    """Bytes are a text if they are UTF-8, and nothing that can be compared otherwise."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def header(name: str) -> Get:
    """The header of this name."""

    def get(subject: Subject) -> Any:
        value = subject.message.headers.get(name)
        return MISSING if value is None else _text(value)

    return get


def field(attribute: str) -> Operand:
    """What the decoded body calls so."""
    of = operator.attrgetter(attribute)
    return Operand("field", lambda subject: of(subject.body or subject.read()), attribute=attribute)


def header_or_field(name: str, attribute: str) -> Get:
    """The header if there is one."""
    of = operator.attrgetter(attribute)

    def get(subject: Subject) -> Any:
        value = subject.message.headers.get(name)
        return of(subject.body or subject.read()) if value is None else _text(value)

    return get


def within(get: Get, keys: list[str | int]) -> Get:
    """What lies there in objects and lists."""

    def inner(subject: Subject) -> Any:
        value = get(subject)
        for key in keys:
            if isinstance(key, str):
                value = value.get(key, MISSING) if value.__class__ is dict else MISSING
            else:
                value = value[key] if value.__class__ is list and key < len(value) else MISSING
        return value

    return inner


# --- conditions -------------------------------------------------------------------------------------------------------


def all_of(gets: list[Get]) -> Get:
    """False if one is false, else unknown if one is neither."""
    if len(gets) == 2:
        return _both(*gets)

    def all_true(subject: Subject) -> bool | None:
        found: bool | None = True
        for get in gets:
            value = get(subject)
            if value is False:
                return False
            if value is not True:
                found = None
        return found

    return all_true


def _both(first: Get, second: Get) -> Get:
    """Most conditions have two parts: this costs half."""

    def both(subject: Subject) -> bool | None:
        one = first(subject)
        if one is False:
            return False
        other = second(subject)
        if other is False:
            return False
        return True if one is True and other is True else None

    return both


def any_of(gets: list[Get]) -> Get:
    """True if one is true, else unknown if one is neither."""

    def either(subject: Subject) -> bool | None:
        found: bool | None = False
        for get in gets:
            value = get(subject)
            if value is True:
                return True
            if value is not False:
                found = None
        return found

    return either


def negated(get: Get) -> Get:
    """Unknown stays unknown."""

    def opposite(subject: Subject) -> bool | None:
        value = get(subject)
        return not value if value.__class__ is bool else None

    return opposite


def is_null(get: Get, wanted: bool) -> Get:
    """Whether it is null, missing or unknown, or `wanted` is not."""

    def null(subject: Subject) -> bool:
        value = get(subject)
        return (value is None or value is MISSING) is wanted

    return null


def member(get: Get, kind: Kind, constants: frozenset[Any], wanted: bool) -> Get:
    """Whether it is one of these, all of one kind."""
    classes = CLASSES[kind]

    def among(subject: Subject) -> bool | None:
        value = get(subject)
        return (value in constants) is wanted if value.__class__ in classes else None

    return among


Compare = Callable[[Any, Any], bool]
_MIRRORED: dict[Compare, Compare] = {
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
}


def compared(compare: Compare, left: Operand, right: Operand) -> Get:
    """left < right, and so on: for two values of one kind, which is number or text unless `compare` is == or !=."""
    if left.constant and not right.constant:
        return compared(_MIRRORED.get(compare, compare), right, left)
    kinds = KINDS if compare in (operator.eq, operator.ne) else ORDERED
    if right.constant:
        return _with_constant(compare, left, right)
    of, other = left.get, right.get

    def relation(subject: Subject) -> bool | None:
        value, against = of(subject), other(subject)
        kind = kinds.get(value.__class__)
        return compare(value, against) if kind is not None and kinds.get(against.__class__) == kind else None

    return relation


def _with_constant(compare: Compare, left: Operand, right: Operand) -> Get:
    classes, constant, of = CLASSES[right.kind], right.get(NO_SUBJECT), left.get

    def relation(subject: Subject) -> bool | None:
        value = of(subject)
        return compare(value, constant) if value.__class__ in classes else None

    if not left.attribute:
        return relation
    attribute = operator.attrgetter(left.attribute)

    def of_body(subject: Subject) -> bool | None:  # the same, a call less: the commonest of all
        value = attribute(subject.body or subject.read())
        return compare(value, constant) if value.__class__ in classes else None

    return of_body


NO_SUBJECT = Subject(lambda payload: msgspec.Struct(), msgspec.Struct())  # for constants
