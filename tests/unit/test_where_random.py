"""Random conditions over random messages: Where selects what a second, naive reading of docs/filters.md selects.

An expression is its text and what it is of a message: a function over plain dictionaries. NOT is missing, None is null or
unknown.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from roq.errors import InvalidFilter
from roq.pubsub.subscription import Message
from roq.wire.where import Where

NOT = object()


class Naive(NamedTuple):
    """A message as the evaluator has it; body None: no JSON object."""

    body: dict[str, Any] | None
    headers: dict[str, str | bytes]


class Expression(NamedTuple):
    text: str
    value: Callable[[Naive], Any]


def kind_of(value: Any) -> str:
    """Of what can be compared."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else ""


def looked_up(message: Naive, name: str) -> Any:
    if name in message.headers:
        value = message.headers[name]
        return value if isinstance(value, str) else value.decode(errors="replace") if b"\xff" not in value else value
    return (message.body or {}).get(name, NOT)


def at(value: Any, key: str | int) -> Any:
    if isinstance(key, str):
        return value.get(key, NOT) if isinstance(value, dict) else NOT
    return value[key] if isinstance(value, list) and key < len(value) else NOT


NAMES = ["a", "b", "c", "h"]
FIELDS = st.one_of(
    st.sampled_from(NAMES).map(lambda name: Expression(name, lambda m: looked_up(m, name))),
    st.sampled_from(NAMES).map(lambda name: Expression(f"body.{name}", lambda m: (m.body or {}).get(name, NOT))),
    st.sampled_from(NAMES).map(
        lambda name: Expression(f"headers[{name!r}]", lambda m: looked_up(m, name) if name in m.headers else NOT)
    ),
    st.sampled_from(NAMES).map(lambda name: Expression(f"{name}.a", lambda m: at((m.body or {}).get(name, NOT), "a"))),
    st.sampled_from(NAMES).map(lambda name: Expression(f"{name}[1]", lambda m: at((m.body or {}).get(name, NOT), 1))),
)
NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([0.5, 2**62, 2**63 - 1, 1e308, 120]))
TEXTS = st.sampled_from(["", "a", "A", "eu", "12", "1.5", "ab"])
NUMBER = NUMBERS.map(lambda number: Expression(f"({number!r})", lambda m: number))
TEXT = TEXTS.map(lambda text: Expression(repr(text), lambda m: text))
BOOLEAN = st.booleans().map(lambda value: Expression(str(value).lower(), lambda m: value))
Sign = dict[str, Callable[[Any, Any], Any]]
ARITHMETIC: Sign = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod}
ORDER: Sign = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
EQUALITY: Sign = {"==": operator.eq, "!=": operator.ne}


def arithmetic(left: Expression, sign: str, right: Expression) -> Expression:
    def value(m: Naive) -> Any:
        one, other = left.value(m), right.value(m)
        if kind_of(one) != "number" or kind_of(other) != "number":
            return None
        try:
            result = ARITHMETIC[sign](*(float(each) if abs(each) > 2**63 else each for each in (one, other)))
        except (ZeroDivisionError, OverflowError):
            return None
        return result if math.isfinite(result) else None

    return Expression(f"({left.text} {sign} {right.text})", value)


def compared(left: Expression, sign: str, right: Expression) -> Expression:
    def value(m: Naive) -> Any:
        one, other = left.value(m), right.value(m)
        kind = kind_of(one)
        if not kind or kind != kind_of(other) or (kind == "boolean" and sign in ORDER):
            return None
        return (ORDER | EQUALITY)[sign](one, other)

    return Expression(f"({left.text} {sign} {right.text})", value)


def among(left: Expression, constants: list[Any], wanted: bool) -> Expression:
    def value(m: Naive) -> Any:
        one = left.value(m)
        return any(one == each for each in constants) is wanted if kind_of(one) == kind_of(constants[0]) else None

    return Expression(f"({left.text} {'in' if wanted else 'not in'} {constants!r})", value)


def null(left: Expression, wanted: bool) -> Expression:
    return Expression(
        f"({left.text} is {'' if wanted else 'not '}None)", lambda m: (left.value(m) is None or left.value(m) is NOT) is wanted
    )


def joined(word: str, parts: list[Expression]) -> Expression:
    def value(m: Naive) -> Any:
        found = [each.value(m) if isinstance(each.value(m), bool) else None for each in parts]
        decisive = word == "or"
        return decisive if decisive in found else None if None in found else not decisive

    return Expression("(" + f" {word} ".join(each.text for each in parts) + ")", value)


def opposite(part: Expression) -> Expression:
    return Expression(f"(not {part.text})", lambda m: not part.value(m) if isinstance(part.value(m), bool) else None)


def called(name: str, *parts: Expression) -> Expression:
    def value(m: Naive) -> Any:
        first, second = parts[0].value(m), parts[-1].value(m)
        match name:
            case "exists":
                return first is not NOT
            case "len":
                return len(first) if isinstance(first, str | list | dict) else None
            case "lower" | "upper":
                return getattr(first, name)() if isinstance(first, str) else None
            case "number":
                return numeral(first)
            case "contains" if isinstance(first, list):
                kind = kind_of(second)
                return any(kind_of(each) == kind and each == second for each in first) if kind else None
        both = isinstance(first, str) and isinstance(second, str)
        return (second in first if name == "contains" else getattr(first, name)(second)) if both else None

    return Expression(f"{name}({', '.join(each.text for each in parts)})", value)


def numeral(value: Any) -> Any:
    if kind_of(value) == "number":
        return value
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if kind_of(found) == "number" else None


def signs(table: Iterable[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(table))


def conditions(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    """One level more."""
    textual = FIELDS | TEXT | st.builds(called, st.sampled_from(["lower", "upper"]), FIELDS | TEXT)
    plain = (
        FIELDS | NUMBER | st.builds(called, st.just("len"), FIELDS | TEXT) | st.builds(called, st.just("number"), FIELDS | TEXT)
    )
    numeric = plain | st.builds(arithmetic, plain, signs(ARITHMETIC), plain)
    numeric |= st.builds(arithmetic, numeric, signs(ARITHMETIC), numeric)
    lists = st.one_of(*(st.lists(each, min_size=1, max_size=3) for each in (NUMBERS, TEXTS)))
    return st.one_of(
        st.builds(compared, numeric, signs(ORDER | EQUALITY), numeric),
        st.builds(compared, textual, signs(ORDER | EQUALITY), textual),
        st.builds(compared, FIELDS | BOOLEAN | parts, signs(EQUALITY), FIELDS | BOOLEAN | parts),
        st.builds(among, FIELDS, lists, st.booleans()),
        st.builds(null, FIELDS | numeric | parts, st.booleans()),
        st.builds(called, st.just("exists"), FIELDS),
        st.builds(called, st.sampled_from(["contains", "startswith", "endswith"]), textual, textual),
        st.builds(joined, st.sampled_from(["and", "or"]), st.lists(parts | FIELDS, min_size=2, max_size=4)),
        st.builds(opposite, parts | FIELDS),
    )


CONDITIONS = st.recursive(st.builds(null, FIELDS, st.booleans()), conditions, max_leaves=8)
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans(), st.none(), st.just(2**70))
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), SCALARS, max_size=2)
MESSAGES = st.builds(
    Naive,
    st.none() | st.dictionaries(st.sampled_from(NAMES), VALUES),
    st.dictionaries(st.sampled_from(["b", "h"]), TEXTS | st.sampled_from([b"eu", b"\xff"])),
)


@given(CONDITIONS, st.lists(MESSAGES, min_size=1, max_size=6))
@settings(deadline=None, max_examples=1500)
def test_random_conditions_select_what_the_naive_evaluator_does(condition: Expression, naive: list[Naive]) -> None:
    try:
        where = Where(condition.text)
    except InvalidFilter as refused:
        assume("no value" not in str(refused) and "same for every" not in str(refused))  # constants alone
        raise
    messages = [
        Message("t", b"no object" if one.body is None else json.dumps(one.body).encode(), 1, number, 1, one.headers)
        for number, one in enumerate(naive)
    ]
    expected = [number for number, one in enumerate(naive) if condition.value(one) is True]
    assert [one.sequence for one in where.select(messages)] == expected
