"""Names that are held in a recorded queue, durable subscribers and producers, as an administrator sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from roq.coordination.locate import GcmClient
from roq.coordination.parts import all_parts
from roq.errors import DurableNotFound, ProducerNotFound
from roq.wire.durables import Durables, DurableView, ForgetDurable, ListDurables
from roq.wire.gcm import Done
from roq.wire.producers import ForgetProducer, ListProducers, Producers, ProducerView

V = TypeVar("V", DurableView, ProducerView)
SECONDS = 15.0  # as for all administration


async def durables(client: GcmClient, queue: str) -> list[DurableView]:
    """By name."""
    return await _all(lambda after: client.request(ListDurables(queue, after), Durables, SECONDS))


async def producers(client: GcmClient, queue: str) -> list[ProducerView]:
    """By name."""
    return await _all(lambda after: client.request(ListProducers(queue, after), Producers, SECONDS))


async def _all(page: Callable[[str], Awaitable[Any]]) -> list[V]:
    async def ask(before: Any) -> Any:
        return await page(before.views[-1].name if before is not None else "")

    return [view for part in await all_parts(ask, lambda _: "") for view in part.views]


async def forget_durable(client: GcmClient, queue: str, name: str) -> None:
    """Raises DurableNotFound."""
    if not any(view.name == name for view in await durables(client, queue)):
        raise DurableNotFound(f"queue {queue!r} has no durable subscriber {name!r}")
    await client.request(ForgetDurable(queue, name), Done, SECONDS)


async def forget_producer(client: GcmClient, queue: str, name: str) -> None:
    """Raises ProducerNotFound."""
    if not any(view.name == name for view in await producers(client, queue)):
        raise ProducerNotFound(f"queue {queue!r} has no producer {name!r}")
    await client.request(ForgetProducer(queue, name), Done, SECONDS)
