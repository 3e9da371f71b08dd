"""Lists of the whole cluster, asked of the leading GCM in parts that fit into a message (roq/wire/gcm.py). Pure.

    first part     after "", snapshot ""                 the answer names a snapshot; more: there is another part
    other parts    after the place of the last one       of the same snapshot, if it is still kept; else the answer is empty
                   told, of that snapshot                and names none: begin anew
    all at once    after None                            as programs of 0.1 ask; IncompatibleVersion if that is too much

A place is kind and name; everything is told by place. A GCM of 0.1 tells all at once, whatever is asked.
"""

from __future__ import annotations

import msgspec

HOST, QUEUE, WORK_QUEUE = "host/", "queue/", "work/"  # in order; a name has no "/"


class PartRequest(msgspec.Struct, frozen=True, array_like=True):
    """One part of a list."""

    after: str | None = None
    snapshot: str = ""
