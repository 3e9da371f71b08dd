"""The product's files as syntax trees, parsed once for all tests that read them, and not before one does."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("roq", "gcm", "hcm")


def sources(*folders: str) -> list[str]:
    """Every Python file of these top folders, as a path from the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


PRODUCT = sources(*PACKAGES)


@cache
def _trees() -> dict[str, ast.Module]:
    """Of the whole product: a million objects, none of which is garbage as long as the process lives."""
    gc.collect()  # what a test before has left is not kept
    gc.disable()
    try:
        return {path: ast.parse((ROOT / path).read_text(), path) for path in PRODUCT}
    finally:
        gc.freeze()
        gc.enable()


def tree(path: str) -> ast.Module:
    """Of a file of the product. No other file's is kept."""
    return _trees()[path]


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """All of a file of the product, as `ast.walk` finds them."""
    return tuple(ast.walk(tree(path)))
