"""Conditions over messages and tasks: `price > 100 and region == 'eu'`, compiled once, for whoever reads (docs/filters.md).

    names        topic, publisher, size, timestamp
                 headers.h, headers["h"]: a header; body.f, body["f"], body.items[0].f: a field of the payload, a JSON object
                 h: the header of this name, or else the body's field; a.b and a[0]: within the body's field a
    values       numbers with + - * / %, texts, true, false
    conditions   and or not; == != < <= > >=; in and not in a list of constants; is None, is not None; FUNCTIONS

A field that is missing or null, and a comparison of unlike types, is *unknown*, as in SQL; what is true is selected, and
nothing else. The text is read by Python's own parser; what is not listed here is refused, and the rest compiled into closures
(terms.py): nothing of it is executed. A body is decoded when a field of it is first asked for, and only the fields that are
named.

It stands beside the headers, whose readers it serves: subscribers and work queues, which don't know each other, and whoever
gets a condition from them. Not covered: where it is applied.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from roq.errors import InvalidFilter
from roq.wire import terms
from roq.wire.terms import FUNCTIONS, INTEGER_MAX, MISSING, NO_SUBJECT, OWN, Compare, Kind, Loose, Operand, Selectable, Subject

TEXT_BYTES_MAX = 4096  # of a condition: it travels in requests and is shown in errors
DEPTH_MAX = 50  # parts within parts: each costs a call within a call for every message
NODES_MAX = 1000
EXCERPT = 100  # characters of a condition that an error shows
M = TypeVar("M", bound=Selectable)


class Where:
    """A condition. text: as it was given. Raises InvalidFilter, which names the place."""

    __slots__ = ("_decode", "_nothing", "_test", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        compiler = _Compiler(text)
        self._test = compiler.condition()
        body = compiler.body()
        self._decode, self._nothing = msgspec.json.Decoder(body).decode, body()

    def __repr__(self) -> str:
        return f"Where({self.text!r})"

    def select(self, messages: Iterable[M]) -> list[M]:
        """Those for which it is true, in their order. Never raises for what is in a message."""
        subject, test, selected = Subject(self._decode, self._nothing), self._test, list[M]()
        for message in messages:
            subject.message, subject.body = message, None
            if test(subject) is True:
                selected.append(message)
        return selected

    def matches(
        self,
        payload: bytes,
        headers: Mapping[str, str | bytes] | None = None,
        *,
        topic: str | None = None,
        publisher: int | None = None,
        timestamp: int | None = None,
    ) -> bool:
        """Whether it is true for this message or task; what is None is unknown. timestamp: nanoseconds since 1970."""
        subject = Subject(self._decode, self._nothing)
        subject.message, subject.body = Loose(topic, payload, headers or {}, publisher, timestamp), None
        return self._test(subject) is True


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(text: str, column: int, problem: str) -> InvalidFilter:
    """For what is wrong at this column, from 1 on."""
    first = max(0, column - 1 - EXCERPT // 2)
    shown = "".join(one if one.isprintable() else "?" for one in text[first : first + EXCERPT])
    caret = " " * (column - 1 - first) + "^"
    return InvalidFilter(f"column {column} of the condition: {problem}\n  {shown}\n  {caret}", column)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise InvalidFilter(f'a condition is a text such as "price > 100", got {type(text).__name__}', 1)
    for place, character in enumerate(text[: TEXT_BYTES_MAX + 1], 1):
        if not character.isprintable():
            raise refusal(text, place, f"a condition is one line of printable text, got {character!r}")
    if not text.strip():
        raise refusal(text, 1, 'a condition is empty: say what is selected, such as "price > 100"')
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise refusal(text, 1, f"a condition has {TEXT_BYTES_MAX} bytes at most, got {len(text.encode())}")
    for escape in re.finditer(r"\\(.?)", text):  # others stand for themselves in Python, with a warning to whoever runs this
        if escape[1] not in _ESCAPES:
            raise refusal(text, escape.start() + 1, "a backslash in a text is written twice")


_ESCAPES = frozenset("\\'\"nrtuUx")
_ONE_TEXT = re.compile(r"""[rRuU]?('([^'\\]|\\.)*'|"([^"\\]|\\.)*")""")


# --- the compiler -----------------------------------------------------------------------------------------------------

_RELATIONS: dict[type[ast.cmpop], Compare] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator | ast.unaryop], tuple[str, Any]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.Mod: ("%", operator.mod),
    ast.UAdd: ("+", operator.add),
    ast.USub: ("-", operator.sub),
}
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_CONDITION = ("boolean", "field")
_ZERO = Operand("number", lambda subject: 0, True)


class _Path(NamedTuple):
    """a.b[0]: a name, and what follows it."""

    root: str
    keys: list[str | int]


class _Compiler:
    """Of one text. The fields of the body that it names are collected on the way."""

    def __init__(self, text: str) -> None:
        _check_text(text)
        self._text = text.rstrip()
        self._indent = len(text) - len(text.lstrip())  # Python refuses it
        self._bytes = text.strip().encode()
        self._attributes: dict[str, str] = {}  # of the decoded body, by field
        self._looks = False  # at anything of a message
        self._depth = self._count = 0

    def condition(self) -> terms.Get:
        """The whole of it. Raises InvalidFilter."""
        node = self._parsed()
        operand = self._operand(node)
        if operand.kind not in _CONDITION:
            raise self._refusal(node, f"this is a {operand.kind}, not a condition: compare it with something")
        if not self._looks:
            raise self._refusal(node, "this is the same for every message: name a header, a field of the body, or topic")
        return operand.get

    def body(self) -> type[msgspec.Struct]:
        """What the fields that are named are decoded into; others are skipped."""
        fields = [(attribute, Any, MISSING) for attribute in self._attributes.values()]
        names = {attribute: name for name, attribute in self._attributes.items()}
        return msgspec.defstruct("Body", fields, rename=names)

    def _parsed(self) -> ast.expr:
        try:
            node = ast.parse(self._bytes.decode(), mode="eval").body
        except SyntaxError as error:
            end = len(self._text)
            column = min(self._indent + (error.offset or end), end)
            raise refusal(self._text, column, f"this can't be read: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError):  # how Python's parser gives up
            raise refusal(self._text, 1, f"a condition has {DEPTH_MAX} parts within parts at most") from None
        if sum(1 for _ in ast.walk(node)) > NODES_MAX:
            raise refusal(self._text, 1, f"a condition has {NODES_MAX} names, values and operators at most")
        return node

    def _refusal(self, node: ast.expr, problem: str) -> InvalidFilter:
        """The parser counts bytes."""
        return refusal(self._text, self._indent + len(self._bytes[: node.col_offset].decode()) + 1, problem)

    # --- parts ----------------------------------------------------------------------------------------------------------

    def _operand(self, node: ast.expr) -> Operand:
        self._count += 1  # in a < b < c the middle is compiled, and looked at, twice: within each other that doubles each time
        if self._count > NODES_MAX:
            raise self._refusal(node, f"a condition has {NODES_MAX} names, values and operators at most")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._refusal(node, f"a condition has {DEPTH_MAX} parts within parts at most")
        operand = self._compiled(node)
        self._depth -= 1
        return operand

    def _compiled(self, node: ast.expr) -> Operand:
        match node:
            case ast.BoolOp(op=op, values=values):
                gets = [self._of_kind(value, _CONDITION, "a condition").get for value in values]
                return Operand("boolean", terms.all_of(gets) if isinstance(op, ast.And) else terms.any_of(gets))
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return Operand("boolean", terms.negated(self._of_kind(inner, _CONDITION, "a condition").get))
            case ast.UnaryOp(op=op, operand=inner) if type(op) in _ARITHMETIC:
                return self._arithmetic(node, op, _ZERO, self._number(inner, op))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(node, op, self._number(left, op), self._number(right, op))
            case ast.Compare():
                return self._comparisons(node)
            case ast.Call():
                return self._call(node)
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name) if name in _CONSTANTS:
                return self._constant(node, _CONSTANTS[name])
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self._named(node, self._path(node))
            case _:
                raise self._refusal(node, f"{_called(node)} is no part of a condition")

    def _of_kind(self, node: ast.expr, kinds: tuple[Kind | str, ...], wanted: str) -> Operand:
        operand = self._operand(node)
        if operand.kind not in kinds:
            raise self._refusal(node, f"{wanted} is needed here, got a {operand.kind}")
        return operand

    def _constant(self, node: ast.expr, value: object) -> Operand:
        kind = terms.KINDS.get(type(value))
        if value is None:
            raise self._refusal(node, "nothing equals null: write `is None` or `is not None`")
        if kind is None:
            raise self._refusal(node, f"a constant is a number, a text, true or false, got {type(value).__name__}")
        if (isinstance(value, int) and value > INTEGER_MAX) or value == math.inf:
            raise self._refusal(node, "a number is too large: integers have 64 bits")
        if kind == "text" and not _ONE_TEXT.fullmatch(self._bytes[node.col_offset : node.end_col_offset].decode()):
            raise self._refusal(node, "these texts would be joined: a comma or an operator is missing between them")
        return Operand(kind, lambda subject: value, True)

    def _number(self, node: ast.expr, op: ast.operator | ast.unaryop) -> Operand:
        sign = _ARITHMETIC[type(op)][0]
        return self._of_kind(node, ("number", "field"), f"`{sign}` is for numbers: one")

    def _arithmetic(self, node: ast.expr, op: ast.operator | ast.unaryop, left: Operand, right: Operand) -> Operand:
        compute, of, other = _ARITHMETIC[type(op)][1], left.get, right.get
        if not (left.constant and right.constant):
            return Operand("number", lambda subject: terms.computed(compute, of(subject), other(subject)))
        value = terms.computed(compute, of(NO_SUBJECT), other(NO_SUBJECT))
        if value is None:
            raise self._refusal(node, "this has no value: it divides by 0, or is too large")
        return Operand("number", lambda subject: value, True)

    # --- comparisons ----------------------------------------------------------------------------------------------------

    def _comparisons(self, node: ast.Compare) -> Operand:
        """a < b < c is a < b and b < c."""
        lefts = [node.left, *node.comparators]
        gets = [self._comparison(*each) for each in zip(lefts, node.ops, node.comparators, strict=False)]
        return Operand("boolean", gets[0] if len(gets) == 1 else terms.all_of(gets))

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> terms.Get:
        match op:
            case ast.Is() | ast.IsNot():
                if not _is_null(right):
                    raise self._refusal(right, "`is` is for None: compare with == or !=")
                return terms.is_null(self._operand(left).get, isinstance(op, ast.Is))
            case ast.In() | ast.NotIn():
                return self._membership(left, right, isinstance(op, ast.In))
        first, second = self._operand(left), self._operand(right)
        kinds = {first.kind, second.kind} - {"field"}
        if len(kinds) > 1:
            raise self._refusal(right, f"a {first.kind} is compared with a {second.kind}: that is never true")
        if "boolean" in kinds and not isinstance(op, ast.Eq | ast.NotEq):
            raise self._refusal(right, "true and false have no order: compare with == or !=")
        return terms.compared(_RELATIONS[type(op)], first, second)

    def _membership(self, left: ast.expr, right: ast.expr, wanted: bool) -> terms.Get:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise self._refusal(right, "`in` is for a list of constants, such as ['eu', 'us']; see also contains(a, b)")
        operand, constants = self._operand(left), [self._operand(each) for each in right.elts]
        kind = constants[0].kind
        for each, one in zip(right.elts, constants, strict=True):
            if not one.constant or one.kind != kind:
                raise self._refusal(each, "a list has constants of one kind")
        if operand.kind not in (kind, "field"):
            raise self._refusal(right, f"a {operand.kind} is compared with a {kind}: that is never true")
        return terms.member(operand.get, kind, frozenset(one.get(NO_SUBJECT) for one in constants), wanted)

    # --- names and functions --------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Operand:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in FUNCTIONS:
            problem = f"there is no function {name!r}" if name else "a method can't be called"
            raise self._refusal(node.func, f"{problem}: there are {', '.join(FUNCTIONS)}")
        function = FUNCTIONS[name]
        if len(node.args) != len(function.takes) or node.keywords:
            count = len(function.takes)
            raise self._refusal(node, f"{name}() takes {count} argument{'s' * (count > 1)} without names")
        gets = []
        for each, kinds in zip(node.args, function.takes, strict=True):
            wanted = " or ".join(f"a {kind}" for kind in kinds)
            gets.append(self._of_kind(each, kinds, f"{name}(): {wanted}").get)
        return Operand(function.kind, terms.call(function.call, gets))

    def _path(self, node: ast.expr) -> _Path:
        keys: list[str | int] = []
        while not isinstance(node, ast.Name):
            match node:
                case ast.Attribute(attr=name):
                    self._check_spelling(node, name)
                    keys.append(name)
                case ast.Subscript(slice=ast.Constant(value=key)) if type(key) is str or type(key) is int:
                    keys.append(key)
                case ast.Subscript():
                    raise self._refusal(node.slice, "in brackets stands a text, or a number from 0 on for an element of a list")
                case _:
                    raise self._refusal(node, f"{_called(node)} has no fields: a name stands before a dot or bracket")
            node = node.value
        self._check_spelling(node, node.id)
        return _Path(node.id, keys[::-1])

    def _check_spelling(self, node: ast.expr, name: str) -> None:
        """Python's parser puts names into Unicode's normal form NFKC, which a field's may not have."""
        if not self._bytes[: node.end_col_offset].endswith(name.encode()):
            raise self._refusal(node, f'Python reads this as {name!r}: write body["…"] or headers["…"]')

    def _named(self, node: ast.expr, path: _Path) -> Operand:
        root, keys = path
        self._looks = True
        if root in OWN:
            if keys:
                raise self._refusal(node, f"{root} has no fields: for a field of this name write body.{root}")
            return OWN[root]
        if root == "headers":
            if len(keys) != 1 or not isinstance(keys[0], str):
                raise self._refusal(node, 'one header is named like this: headers.region or headers["ce-type"]')
            return Operand("field", terms.header(keys[0]))
        if root == "body":
            if not keys or not isinstance(keys[0], str):
                raise self._refusal(node, 'a field of the body is named like this: body.price or body["unit price"]')
            root, keys = keys[0], keys[1:]
        elif not keys:
            return Operand("field", terms.header_or_field(root, self._attribute(node, root)))
        operand = terms.field(self._attribute(node, root))
        return Operand("field", terms.within(operand.get, keys)) if keys else operand

    def _attribute(self, node: ast.expr, name: str) -> str:
        """A field's name may be any text, an attribute's may not."""
        if not name.isprintable() or '"' in name or "\\" in name:
            raise self._refusal(node, "the name of a field has no quotation mark, backslash or control character")
        return self._attributes.setdefault(name, f"field{len(self._attributes)}")


def _is_null(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=None) | ast.Name(id="null"):
            return True
    return False


_SIGNS: dict[type[ast.AST], str] = {
    ast.BitAnd: "`&` (write `and`)",
    ast.BitOr: "`|` (write `or`)",
    ast.BitXor: "`^`",
    ast.FloorDiv: "`//`",
    ast.Invert: "`~` (write `not`)",
    ast.LShift: "`<<`",
    ast.MatMult: "`@`",
    ast.Pow: "`**`",
    ast.RShift: "`>>`",
    ast.JoinedStr: "a text in braces (f'…')",
    ast.List: "a list outside of `in`",
    ast.Tuple: "a list outside of `in`",
    ast.Set: "a list outside of `in`",
}


def _called(node: ast.expr) -> str:
    kind = type(node.op) if isinstance(node, ast.BinOp | ast.UnaryOp) else type(node)
    return _SIGNS.get(kind, f"{kind.__name__} of Python's grammar")
