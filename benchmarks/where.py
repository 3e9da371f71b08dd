"""What a content filter costs per message: `python -m benchmarks.where`; docs/filters.md has the table.

100,000 messages of JSON, of 150 bytes and ten times as many, in lists as frames carry them and all at once. "struct" is RoQ's
way; "dict" decodes whole bodies and tests them with plain Python, the least that way can cost; "arrow" reads the bodies as one
table and computes on columns: one broken body, or one field of two types, would fail the whole list. Each way in turn, the best
of ROUNDS. Not covered: reading the messages.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Sequence

import msgspec
import pyarrow.compute
import pyarrow.json

from roq.pubsub.subscription import Message
from roq.wire.where import Where

MESSAGES, ROUNDS = 100_000, 5
LISTS = (10, 100, 800, MESSAGES)  # 800 fill a frame
BODY = "body.price > 100 and body.region == 'eu'"
Select = Callable[[Sequence[Message]], int]
decode = msgspec.json.Decoder(dict).decode


def made(seed: int, notes: int) -> list[Message]:
    """Orders, each with so many notes; one in six is selected by BODY."""
    chance = random.Random(seed)
    bodies = [
        {
            "id": number,
            "customer": f"customer-{number:06}",
            "region": chance.choice(("eu", "us", "ap")),
            "price": chance.randrange(200),
            "items": [1, 2, 3],
            "notes": ["left at the neighbour's door, as always"] * notes,
        }
        for number in range(MESSAGES)
    ]
    headers: list[dict[str, str | bytes]] = [{"region": str(body["region"])} for body in bodies]
    return [
        Message("eu.paris", json.dumps(body).encode(), 7, number, 0, beside)
        for number, (body, beside) in enumerate(zip(bodies, headers, strict=True))
    ]


def by_struct(condition: str) -> Select:
    """The product's."""
    where = Where(condition)
    return lambda messages: len(where.select(messages))


def by_dict(messages: Sequence[Message]) -> int:
    """Whole bodies."""
    return len([one for one in messages if (body := decode(one.payload))["price"] > 100 and body["region"] == "eu"])


def by_arrow(messages: Sequence[Message]) -> int:
    """One table for the list."""
    table = pyarrow.json.read_json(io.BytesIO(b"\n".join([one.payload for one in messages])))
    dear = pyarrow.compute.greater(table["price"], 100)
    wanted = pyarrow.compute.and_kleene(dear, pyarrow.compute.equal(table["region"], "eu"))
    places = pyarrow.compute.indices_nonzero(wanted).to_pylist()
    return len([messages[place] for place in places])


WAYS: dict[str, Select] = {
    "struct, body": by_struct(BODY),
    "dict, body": by_dict,
    "arrow, body": by_arrow,
    "header or body": by_struct("price > 100 and region == 'eu'"),
    "header first": by_struct("headers.region == 'eu' and body.price > 100"),
    "headers alone": by_struct("headers.region == 'eu'"),
    "topic alone": by_struct("startswith(topic, 'eu.')"),
}


def main() -> None:
    """Prints a table for each size."""
    for notes in (1, 33):
        compare(made(1, notes))


def compare(messages: list[Message]) -> None:
    """Prints a table."""
    size = sum(len(one.payload) for one in messages) / MESSAGES
    print(f"ns per message, {MESSAGES:,} messages of {size:.0f} bytes, in lists of")
    print(f"{'':16}", *(f"{count:>8,}" for count in LISTS), "  selected")
    found = dict.fromkeys(((way, count) for way in WAYS for count in LISTS), float("inf"))
    selected = dict.fromkeys(WAYS, 0)
    for _ in range(ROUNDS):
        for way, count in found:
            lists = [messages[first : first + count] for first in range(0, MESSAGES, count)]
            began = time.perf_counter()
            selected[way] = sum(map(WAYS[way], lists))
            found[way, count] = min(found[way, count], (time.perf_counter() - began) * 1e9 / MESSAGES)
    for way in WAYS:
        print(f"{way:16}", *(f"{found[way, count]:8.0f}" for count in LISTS), f"{selected[way]:10,}")


if __name__ == "__main__":
    main()
