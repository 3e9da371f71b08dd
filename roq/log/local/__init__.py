"""A log in a folder, shared by the processes of one machine: segments, group sync, snapshots (log.py tells the story)."""

from roq.log.local.log import LocalLog

__all__ = ["LocalLog"]
