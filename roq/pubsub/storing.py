"""What a publisher knows of its queue's tapes."""

from __future__ import annotations

import asyncio

from roq.coordination.locate import GcmClient
from roq.errors import NotRecorded
from roq.wire import gcm


class Storing:
    """What a publisher knows of its queue's tapes. wanted: it was made to confirm what is stored. tapes: the queue's part of
    their names, once it was asked for. asking: held by whoever asks."""

    __slots__ = ("_client", "_queue", "asking", "tapes", "wanted")

    def __init__(self, client: GcmClient, queue: str, *, wanted: bool) -> None:
        self._client, self._queue, self.wanted = client, queue, wanted
        self.asking, self.tapes = asyncio.Lock(), ""

    async def find(self, timeout_seconds: float) -> None:
        """Ask for them unless they are known. Raises NotRecorded."""
        if not self.tapes:
            info = await self._client.request(gcm.DescribeQueue(self._queue), gcm.QueueInfo, timeout_seconds)
            recording = info.record.recording
            if recording is None or not recording.on:
                raise NotRecorded(f"queue {self._queue!r} is not recorded: `roq queue record` switches that on")
            self.tapes = recording.tapes
