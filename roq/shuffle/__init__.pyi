from roq.shuffle.service import Shuffles, open
from roq.shuffle.writer import Writer
from roq.wire.shuffle import Description, Interval, Position, Range, Receipt, ShuffleState, Spec

__all__ = [
    "Description",
    "Interval",
    "Position",
    "Range",
    "Receipt",
    "ShuffleState",
    "Shuffles",
    "Spec",
    "Writer",
    "open",
]
