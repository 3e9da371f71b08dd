"""The cluster's access list (roq/wire/card.py), in the conversation with the Global Configuration Manager (roq/wire/gcm.py)."""

from __future__ import annotations

import msgspec


class SetAccess(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This access list from now on, if it is newer than the cluster's. signed: by the authority."""

    signed: bytes


class GetAccess(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which access list has the cluster?"""


class AccessInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to both. signed: b"" if there is none yet."""

    signed: bytes
