"""The product's files as syntax trees, parsed once for all tests that read them, and not before one does."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("roq", "gcm", "hcm")


def sources(*folders: str) -> list[str]:
    """Every Python file of these top folders, as a path from the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


PRODUCT = sources(*PACKAGES)


@cache
def tree(path: str) -> ast.Module:
    """Of a file of the product. A million objects in all, so no other file's is kept."""
    return ast.parse((ROOT / path).read_text(), path)
