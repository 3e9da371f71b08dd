"""Pages of the API: what a module exports, in the order of the rooms it comes from, as autodoc's directives."""

from __future__ import annotations

import enum
import inspect
from importlib import import_module
from typing import Any

import msgspec

from roq.errors import RoqError
from tools.documentation.trailing_comments import of_class

# Their members say nothing about RoQ.
FOREIGN = "Struct, str, int, float, tuple, Enum, Exception, object"


def page(module: str, *rooms: str) -> str:
    """Everything that `module` exports; of `roq` only what comes from these rooms. Errors have a page of their own."""
    names = _exported(module)
    if rooms:
        homes = import_module(module).__dict__["_HOME"]
        names = [name for name in names if homes[name].split(".")[0] in rooms]
    lines = []
    for name in names:
        found = getattr(import_module(module), name)
        if not (inspect.isclass(found) and issubclass(found, RoqError)):
            lines += [f"## {name}", "", "```{eval-rst}", *_directive(f"{module}.{name}", found), "```", ""]
    return "\n".join(lines)


def _exported(module: str) -> list[str]:
    found = vars(import_module(module))
    return list(found.get("_HOME") or found.get("_HOMES") or found["__all__"])  # in the order of the rooms


def _directive(name: str, found: Any) -> list[str]:
    if not inspect.isclass(found):
        return [f".. autofunction:: {name}", ""]
    if issubclass(found, msgspec.Struct):  # the signature has its fields; below are those of which more is said
        members = ", ".join(_explained(found))
        return [f".. autoclass:: {name}", *([f"   :members: {members}", "   :undoc-members:"] if members else []), ""]
    lines = [f".. autoclass:: {name}", "   :members:", f"   :inherited-members: {FOREIGN}"]
    if issubclass(found, enum.Enum):
        lines.append("   :undoc-members:")
    return [*lines, ""]


def _explained(found: type[msgspec.Struct]) -> list[str]:
    own = {name: one for base in found.__mro__ if base.__module__.startswith("roq.") for name, one in vars(base).items()}
    methods = [
        name for name, one in own.items() if isinstance(one, property | classmethod | staticmethod) or inspect.isfunction(one)
    ]
    fields = [name for name in found.__struct_fields__ if name in of_class(found)]
    return [name for name in [*fields, *methods] if not name.startswith("_")]
