"""What stands in a comment behind a field of a class: `port: int = 0  # of requests`. It is the field's documentation."""

from __future__ import annotations

import inspect
import io
import re
import textwrap
import tokenize
from functools import cache

FIELD = re.compile(r"    (\w+):")


@cache
def of_class(kind: type) -> dict[str, str]:
    """Field -> comment; those of base classes, too."""
    found = dict[str, str]()
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("roq."):
            continue
        lines = textwrap.dedent(inspect.getsource(base)).splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
            field = FIELD.match(token.line)
            if token.type == tokenize.COMMENT and field is not None and not token.line.lstrip().startswith("#"):
                found[field[1]] = token.string.lstrip("# ")
    return found
