"""What decoding bytes from elsewhere may raise: msgspec's own errors, and the one that it lets through."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError)  # the latter for text that is no UTF-8
