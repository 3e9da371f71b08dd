"""A queue that is made because somebody opens it and it is not there (`create_missing=True`)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import AccessDenied, QueueNotFound
from roq.ids import check_name, new_token
from roq.wire import gcm
from roq.wire.options import CreateMissing

T = TypeVar("T", bound=msgspec.Struct)
CREATE_SECONDS = 15.0


class QueueMaker(GcmClient):
    """What one publisher or subscriber asks the leading GCM through, over the cluster's own connection. The first of its
    questions that finds no queue makes it, by the cluster's template; once it was there, one that was removed stays so."""

    def __init__(self, client: GcmClient, queue: str) -> None:
        self._client, self._queue = client, check_name(queue)  # no connection of its own: nothing of a GcmClient's is made
        self._seen = False

    @property
    def closed(self) -> bool:
        """Whether the cluster's connection is."""
        return self._client.closed

    async def request(self, body: msgspec.Struct, expect: type[T], timeout_seconds: float = CREATE_SECONDS) -> T:
        """As the connection's; also AccessDenied: the card has no right to make the queue, and whatever prevents that."""
        try:
            answer = await self._client.request(body, expect, timeout_seconds)
        except QueueNotFound:
            if self._seen:
                raise
            await self.make()
            answer = await self._client.request(body, expect, timeout_seconds)
        self._seen = True
        return answer

    async def make(self) -> None:
        """The queue, unless it is there; many may do so at once."""
        exists = await self._client.request(gcm.QueueExists(self._queue), gcm.Exists, CREATE_SECONDS)
        if not exists.exists:
            request = CreateMissing(self._queue, new_token())
            try:
                await self._client.request(request, gcm.QueueInfo, CREATE_SECONDS)
            except AccessDenied:  # or somebody else has made it meanwhile
                if not (await self._client.request(gcm.QueueExists(self._queue), gcm.Exists, CREATE_SECONDS)).exists:
                    raise
        self._seen = True

    def close(self) -> None:
        """The connection is the cluster's."""
