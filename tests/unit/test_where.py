"""Conditions over messages: what is selected, what is refused, and at which place.

Not covered: random conditions (test_where_random.py), where they are applied (tests/integration/test_where.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roq.errors import InvalidConfiguration, InvalidFilter
from roq.pubsub.subscription import Message
from roq.wire.where import DEPTH_MAX, NODES_MAX, TEXT_BYTES_MAX, Where

BODY: dict[str, Any] = {
    "price": 120,
    "rate": 0.5,
    "region": "eu",
    "open": True,
    "shut": False,
    "none": None,
    "tags": ["a", 1, True, None],
    "items": [{"sku": "x1", "count": 3}, {"sku": "x2"}],
    "customer": {"name": "Ada", "address": {"city": "Paris"}},
    "unit price": 7,
    "topic": "of the body",
    "headers": {"a": 1},
    "digits": "42",
    "true": "yes",
    "huge": 2**70,
    "héros": "é",
    "both": "body",
    "ones": [1],
    "truths": [True],
    "numeral": "1" * 64,
    "overlong": "1" * 65,
}
HEADERS: dict[str, str | bytes] = {
    "both": "header",
    "ce-type": "order",
    "priority": "7",
    "octets": b"\xff\x00",
    "utf8": "é".encode(),
    "price.unit": "EUR",
}
SECOND = 1_700_000_000
MESSAGE = Message("eu.paris", json.dumps(BODY).encode(), 0xAB, 9, SECOND * 10**9, HEADERS)


def holds(condition: str, message: Message = MESSAGE) -> bool:
    """select and matches agree."""
    where = Where(condition)
    parts = {"topic": message.topic, "publisher": message.publisher, "timestamp": message.timestamp}
    matched = where.matches(message.payload, message.headers, **parts)  # type: ignore[arg-type]
    assert where.select([message, message]) == ([message] * 2 if matched else [])
    return matched


TRUE = """
    price > 100 and region == 'eu'
    price == 120.0
    price * 2 + 1 == 241
    -price < 0 and +price > 0
    price / 7 > 17.1
    price % 50 == 20
    -price % 50 == 30
    100 < price <= 120 != rate
    region in ['eu', 'us']
    region in ('eu',) and region in {'eu'}
    price in [100 + 20, -1]
    price not in [1, 2]
    open in [true]
    open
    open == true and shut == false and open != shut and True
    not shut
    (price > 100) == open
    region > 'ea' and 'ez' > region and 'eu' == region
    region == "eu" and region == 'e\\u0075' and region != 'e\\'u' and region != "e\\"" and region != '' and region != r'\\n'
    none is None and none is null and missing is None
    price is not None and not (price is None)
    exists(none) and not exists(missing)
    exists(region) == true and size > 0
    (missing > 1) is None
    customer.name == 'Ada'
    customer.address.city == 'Paris'
    customer['address']['city'] == 'Paris'
    body.customer.name == 'Ada' and body['customer'].name == 'Ada'
    items[0].sku == 'x1' and items[1].sku == 'x2' and body.items[1]['sku'] == 'x2'
    items[2] is None and items.sku is None and items[1].count is None
    body['unit price'] == 7
    body.topic == 'of the body' and topic == 'eu.paris'
    body.headers.a == 1
    body.true == 'yes'
    both == 'header' and headers.both == 'header' and body.both == 'body'
    headers['ce-type'] == 'order'
    headers['price.unit'] == 'EUR'
    exists(headers.octets) and headers.octets is not None
    headers.utf8 == 'é'
    body['héros'] == 'é' and héros == 'é'
    number(headers.priority) > 3 and number(priority) == 7
    number(digits) == 42 and number(price) == 120
    startswith(topic, 'eu.') and endswith(topic, 'paris') and contains(topic, '.')
    contains(tags, 'a') and contains(tags, 1) and contains(tags, true) and not contains(tags, 'b')
    not contains(tags, 2)
    contains(region, region)
    lower(customer.name) == 'ada' and upper(region) == 'EU'
    len(region) == 2 and len(tags) == 4 and len(customer) == 2
    publisher == '00000000000000ab'
    timestamp == 1700000000 and timestamp > 1.6e9
    size > 100
    huge > 9e20 and huge == huge and huge + 1 > 9e20
    missing > 1 or open
    topic == 'x' or region == 'eu'
    7 * 24 * 3600 > price
    price>100and region=='eu'
"""
FALSE = """
    price > 120
    120 < price or 120 > price
    119 >= price
    121 <= price
    not (120 <= price and 120 >= price)
    open and shut
    shut and missing > 1
    missing > 1 and shut
    missing > 1 and open and shut
    shut and open and missing > 1
    shut or shut or shut
    shut or price == 1
    missing > 1 and shut or shut
    contains(ones, true)
    contains(truths, 1)
    price is None
    exists(missing)
    exists(headers.price)
    region in ['us', 'ap']
    startswith(topic, 'us')
    number(numeral) < 1e63
"""
UNKNOWN = """
    number(overlong) > 1
    number('\\ud800') == price
    missing > 1
    missing == missing
    missing != 1
    none == none
    none > 1
    price > region
    region == price
    price == open
    region == open
    open > shut
    customer == customer
    tags == tags
    items[0] == items[0]
    missing in [1]
    missing not in [1]
    price in ['eu']
    region not in [120]
    open in [1]
    price == number(region)
    number(none) == 1
    number(open) == 1
    price / (price - 120) > 0
    price % (price - 120) == 0
    region + 1 > 0
    open + 1 == 2
    huge * huge * huge * huge * huge * huge * huge * huge * huge * huge * huge * huge * huge * huge * huge > 1
    -region == 1
    missing
    price
    region
    none and open
    missing > 1 and open
    missing > 1 or shut
    missing > 1 or shut or shut
    open and open and missing > 1
    startswith(price, 'a')
    endswith(missing, 'a')
    contains(price, 1)
    contains(topic, price)
    contains(tags, missing)
    contains(customer, 'name')
    len(price) > 0
    len(missing) >= 0
    lower(price) == 'a'
    upper(missing) == 'A'
    headers.octets == 'a'
    len(headers.octets) > 0
    headers.missing == 'a'
    headers.price == 1
    customer.name.first == 'A'
    customer[0] == 'A'
    body.customer['name'][0] == 'A'
"""


def lines(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


@pytest.mark.filterwarnings("ignore:invalid decimal literal")  # of the one that ends `100and`, as Python takes it
@pytest.mark.parametrize("condition", lines(TRUE))
def test_what_is_true_is_selected(condition: str) -> None:
    assert holds(condition)
    assert not holds(f"not ({condition})")


@pytest.mark.parametrize("condition", lines(FALSE))
def test_of_what_is_false_the_opposite_is_selected(condition: str) -> None:
    assert not holds(condition)
    assert holds(f"not ({condition})")


@pytest.mark.parametrize("condition", lines(UNKNOWN))
def test_what_is_unknown_is_not_selected_and_neither_is_its_opposite(condition: str) -> None:
    assert not holds(condition)
    assert not holds(f"not ({condition})")


REFUSED = {
    "": (1, "empty"),
    "   ": (1, "empty"),
    "1": (1, "a number, not a condition"),
    "'a'": (1, "a text, not a condition"),
    "price + 1": (1, "a number, not a condition"),
    "topic": (1, "a text, not a condition"),
    "true": (1, "the same for every message"),
    "1 == 1": (1, "the same for every message"),
    "price > 'a' + 1": (9, "`+` is for numbers: one is needed here, got a text"),
    "price > 1 and topic > 2": (23, "a text is compared with a number"),
    "  price > 1 and topic > 2": (25, "a text is compared with a number"),
    "'é' == région and topic == 2": (28, "a text is compared with a number"),
    "size == 'a'": (9, "a number is compared with a text"),
    "size in ['a']": (9, "a number is compared with a text"),
    "open > true": (8, "no order"),
    "price == None": (10, "`is None`"),
    "price != null": (10, "`is None`"),
    "price is 1": (10, "`is` is for None"),
    "price is true": (10, "`is` is for None"),
    "region in 'eu'": (11, "a list of constants"),
    "region in []": (11, "a list of constants"),
    "region in names": (11, "a list of constants"),
    "region in ['eu', 1]": (18, "constants of one kind"),
    "region in ['eu', price]": (18, "constants of one kind"),
    "region in [null]": (12, "`is None`"),
    "region in ['eu' 'us']": (12, "a comma or an operator is missing"),
    "region == 'e' \"u\"": (11, "a comma or an operator is missing"),
    "region == '''eu'''": (11, "would be joined"),
    "price > 1 and 5": (15, "a condition is needed here, got a number"),
    "not 'a'": (5, "a condition is needed here, got a text"),
    "lenght(region) > 1": (1, "no function 'lenght': there are contains"),
    "region.lower() == 'a'": (1, "a method can't be called"),
    "(lower)(region)(1) == 'a'": (1, "a method can't be called"),
    "__import__('os').system('ls') == 0": (1, "a method can't be called"),
    "lower() == 'a'": (1, "lower() takes 1 argument without names"),
    "lower(text=region) == 'a'": (1, "takes 1 argument"),
    "lower(*region) == 'a'": (7, "Starred"),
    "contains(topic) ": (1, "contains() takes 2 arguments without names"),
    "lower(1) == 'a'": (7, "lower(): a field or a text is needed here, got a number"),
    "exists('a')": (8, "exists(): a field is needed here, got a text"),
    "exists(topic)": (8, "a field is needed here, got a text"),
    "price ** 2 > 1": (1, "`**`"),
    "price // 2 > 1": (1, "`//`"),
    "open & open": (1, "write `and`"),
    "open | open": (1, "write `or`"),
    "~open": (1, "write `not`"),
    "price > 1 if open else shut": (1, "IfExp"),
    "lambda: price": (1, "Lambda"),
    "[x for x in price] == 1": (1, "ListComp"),
    "f'{price}' == 'a'": (1, "braces"),
    "{'a': 1} == price": (1, "Dict"),
    "[1] == price": (1, "a list outside of `in`"),
    "(price := 1) == 1": (2, "NamedExpr"),
    "price == b'a'": (10, "got bytes"),
    "price == 1j": (10, "got complex"),
    "price == ...": (10, "got ellipsis"),
    "price > 99999999999999999999": (9, "too large"),
    "price > 1e999": (9, "too large"),
    "price > 1 / 0": (9, "no value"),
    "price > 1 % (2 - 2)": (9, "no value"),
    "price > 1e300 * 1e300": (9, "no value"),
    "headers == 1": (1, "one header is named"),
    "headers.a.b == 1": (1, "one header is named"),
    "headers[0] == 1": (1, "one header is named"),
    "body is None": (1, "a field of the body is named"),
    "body[0] == 1": (1, "a field of the body is named"),
    "topic.size == 1": (1, "write body.topic"),
    "items[-1] == 1": (7, "in brackets stands"),
    "items[0:1] == 1": (7, "in brackets stands"),
    "items[price] == 1": (7, "in brackets stands"),
    "items[true] == 1": (7, "in brackets stands"),
    "'abc'[0] == 'a'": (1, "has no fields"),
    "lower(region).x == 'a'": (1, "has no fields"),
    "body['a\\\"b'] == 1": (1, "no quotation mark"),
    "body['\\u0000'] == 1": (1, "no quotation mark"),
    "µ == 1": (1, "Python reads this as 'μ'"),
    "price > 1 and a.ﬁ == 1": (15, "Python reads this as 'fi'"),
    "price = 1": (7, "can't be read"),
    "price >": (7, "can't be read"),
    "price > 1;": (10, "can't be read"),
    "(price > 1": (1, "was never closed"),
    "price > 'eu": (9, "unterminated"),
    "price > $1": (9, "can't be read"),
    "region == '\\d'": (12, "written twice"),
    "price > 1\nand open": (10, "one line of printable text"),
    "price\0 > 1": (6, "one line of printable text"),
    "region == '\ud800'": (12, "one line of printable text"),
}


@pytest.mark.parametrize("condition", REFUSED)
def test_what_is_wrong_is_refused_with_its_place(condition: str) -> None:
    column, problem = REFUSED[condition]
    with pytest.raises(InvalidFilter) as refused:
        Where(condition)
    assert problem in str(refused.value)
    assert refused.value.column == column
    first, shown, caret = str(refused.value).split("\n")
    assert first.startswith(f"column {column} of the condition: ")
    assert caret == " " * (column + 1) + "^"
    assert len(shown) <= len(condition) + 2


def test_a_refusal_is_a_configuration_s() -> None:
    with pytest.raises(InvalidConfiguration):
        Where("1")
    with pytest.raises(InvalidFilter, match="got int"):
        Where(5)  # type: ignore[arg-type]


def test_a_long_condition_is_shown_around_the_place() -> None:
    condition = " and ".join(["price > 100"] * 50) + " and topic > 1"
    with pytest.raises(InvalidFilter) as refused:
        Where(condition)
    _, shown, caret = str(refused.value).split("\n")
    assert shown[caret.index("^")] == "1"
    assert condition[refused.value.column - 1] == "1"
    assert len(shown) <= 102


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("x" * (TEXT_BYTES_MAX + 1), f"{TEXT_BYTES_MAX} bytes"),
        ("é" * (TEXT_BYTES_MAX // 2 + 1), f"{TEXT_BYTES_MAX} bytes"),
        ("x in [" + "1," * NODES_MAX + "]", "operators at most"),
        ("h==(" * 40 + "h" + ")==h" * 40, "operators at most"),  # 2 to the power of 40, each looked at apart
        ("not " * DEPTH_MAX + "x", "parts within parts"),
        ("x > " + "-" * DEPTH_MAX + "1", "parts within parts"),
        ("x > " + "+".join(["y"] * (DEPTH_MAX + 1)), "parts within parts"),
        ("not " * 1000 + "x", "operators at most"),
        ("-" * 4000 + "1 == x", "parts within parts"),
        ("(" * 300 + "x" + ")" * 300, "nested parentheses"),
        ("[" * 150 + "x" + "]" * 150, "a list outside of `in`"),
        ("x > 1" + "0" * 4000, "too large"),
    ],
)
def test_a_condition_is_bounded(condition: str, problem: str) -> None:
    with pytest.raises(InvalidFilter) as refused:
        Where(condition)
    assert problem in str(refused.value)


def test_what_fits_the_bounds_is_taken() -> None:
    assert holds("not " * (DEPTH_MAX // 2 // 2 * 2 - 2) + "open")
    assert holds("price in [" + ",".join(str(each) for each in range(120, 1000)) + "]")
    assert holds(" or ".join(["price > 999"] * 150) + " or open")


@pytest.mark.parametrize(
    "payload",
    [b"", b"[1]", b"120", b"null", b"{", b'{"price": 120', b'{"price": 120} x', b"\xff", b'{"price": "\xff"}', b"[" * 100_000,
     b'{"price":' * 100_000, b'{"price": NaN}', b'{"price": 1e999}', b'{"price": "\\ud800"}', b'{"other": ' + b"[" * 100_000],
)  # fmt: skip
def test_a_payload_that_is_no_object_has_no_fields(payload: bytes) -> None:
    message = Message("t", payload, 1, 1, 1, {"a": "b"})
    assert holds("price is None and not exists(body.price) and a == 'b' and topic == 't'", message)
    assert not holds("price > 1", message)
    assert not holds("body.price <= 1", message)


def test_a_body_is_left_alone_until_a_field_of_it_is_needed() -> None:
    class Untouched(NamedTuple):
        topic: str
        headers: Mapping[str, str | bytes]
        publisher: int = 1
        timestamp: int = 1

        @property
        def payload(self) -> bytes:
            raise AssertionError("the payload was looked at")

    there, elsewhere = Untouched("a.b", {"region": "eu"}), Untouched("c", {"region": "us"})
    for condition in ("headers.region == 'eu'", "region == 'eu'", "startswith(topic, 'a')", "region in ['eu'] and topic > 'a'"):
        assert Where(condition).select([there, elsewhere]) == [there]
    for condition in ("headers.region == 'xx' and body.price > 1", "topic >= 'a' or price > 1"):
        assert len(Where(condition).select([there, elsewhere])) in (0, 2)
    with pytest.raises(AssertionError, match="looked at"):
        Where("body.region == 'eu'").select([there])


def test_of_a_task_what_is_not_told_is_unknown() -> None:
    assert Where("price > 100").matches(b'{"price": 101}')
    assert Where("topic is None and publisher is None and timestamp is None and size == 2").matches(b"{}")
    assert not Where("topic == 'a' or topic != 'a'").matches(b"{}")


def test_one_message_says_nothing_of_the_next() -> None:
    bodies = [b'{"a": 1, "b": 2}', b"{}", b"no json", b'{"b": 2}', b'{"a": 1}']
    messages = [Message("t", body, 1, number, 1) for number, body in enumerate(bodies)]
    assert [one.sequence for one in Where("a == 1").select(messages)] == [0, 4]
    assert [one.sequence for one in Where("b == 2 and a is None").select(messages)] == [3]
    assert [one.sequence for one in Where("a is None").select(iter(messages))] == [1, 2, 3]
    assert Where("a == 1").select([]) == []


def test_a_condition_shows_itself() -> None:
    assert repr(Where("price > 1")) == "Where('price > 1')"
    assert Where(" price > 1 ").text == " price > 1 "


# --- garbage ----------------------------------------------------------------------------------------------------------

WORDS = [
    "price", "body", "headers", "topic", ".", "[", "]", "(", ")", "'eu'", '"', "'", "1", "0", ".5", "and", "or", "not", "in",
    "is", "None", "null", "true", "==", "!=", "<", ">=", "+", "-", "*", "/", "%", "**", ",", "len", "lower", "exists", "number",
    "contains", "lambda", "if", "else", "for", "f'{", "}'", ":=", "*", "\\", "é", "µ", "#", "\n", "1e999", "9" * 30,
    "{", "}", ":",
]  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join)))
@settings(deadline=None, max_examples=1500)
@example("-" * 4096)
@example("a." * 2000 + "b")
@example("a+" * 2000 + "b")
@example("x[" * 1300)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_garbage_is_refused_or_evaluated(text: str) -> None:
    try:
        where = Where(text)
    except InvalidFilter as error:
        where, refused = None, error
    if where is None:
        assert 1 <= refused.column <= max(1, len(text))
    else:
        assert where.select([MESSAGE]) in ([], [MESSAGE])


CHOSEN = [Where(line) for line in lines(TRUE) + lines(FALSE) + lines(UNKNOWN) if "100and" not in line]


@given(st.binary(max_size=80), st.dictionaries(st.sampled_from(sorted(HEADERS)), st.text(max_size=5) | st.binary(max_size=5)))
@settings(deadline=None)
def test_no_payload_makes_it_fail(payload: bytes, headers: dict[str, str | bytes]) -> None:
    messages = [Message("t", payload, 1, 1, 1, headers), Message("t", b'{"price": ' + payload + b"}", 1, 1, 1, headers)]
    for where in CHOSEN:
        assert len(where.select(messages)) <= 2
