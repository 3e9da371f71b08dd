"""Tables of the daemons' settings, from their models in roq/config.py."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from roq import config
from tools.documentation.trailing_comments import of_class

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page(model: str) -> str:
    """A Markdown table of one model, by its name."""
    kind: type[config.Config] = getattr(config, model)
    comments = of_class(kind)
    rows = [_row(name, field, comments.get(name, "")) for name, field in kind.model_fields.items()]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows, ""])


def _row(name: str, field: FieldInfo, comment: str) -> str:
    return f"| `{name}` | {_default(field)} | {_cell(comment, field)} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return f"`{field.default_factory.__module__}.{field.default_factory.__name__}()`"
    return "" if field.default in (None, "") else f"`{field.default}`"


def _cell(comment: str, field: FieldInfo) -> str:
    bounds = [f"{sign} {bound:g}" for key, sign in SIGNS.items() for bound in _bounds(field, key)]
    choices = getattr(field.annotation, "__args__", ()) if "Literal" in str(field.annotation) else ()
    limits = ", ".join([*bounds, *map(repr, choices)])
    return "; ".join(filter(None, [comment.replace("|", "\\|"), limits]))


def _bounds(field: FieldInfo, key: str) -> list[float]:
    return [getattr(one, key) for one in field.metadata if hasattr(one, key)]
