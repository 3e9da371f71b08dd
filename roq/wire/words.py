"""Values in the text of errors: as people write them, without the names of our classes."""

from __future__ import annotations

import msgspec


def in_words(value: msgspec.Struct) -> str:
    """`name value, name value …`, in the order of the fields."""
    return ", ".join(f"{name} {getattr(value, name)}" for name in value.__struct_fields__)
