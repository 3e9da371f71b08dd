"""Messages as rows of Arrow record batches: what `roq.read` and Spark make of recorded queues.

topic      string
payload    binary
publisher  uint64                   who published it; (publisher, sequence) names a message for ever
sequence   uint64                   its number among that publisher's, over all topics
timestamp  timestamp[ns, UTC]       when its publisher opened the batch that carried it
headers    map<string, binary>      empty if it has none; text is UTF-8
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, repeat

from roq.runtime.installation import brought_by
from roq.wire.frame import Item

with brought_by("arrow", "reading messages as data"):
    import pyarrow as pa

HEADERS = pa.map_(pa.string(), pa.binary())
SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("publisher", pa.uint64(), nullable=False),
        pa.field("sequence", pa.uint64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ns", "UTC"), nullable=False),
        pa.field("headers", HEADERS, nullable=False),
    ]
)
TIMESTAMP_MAX = (1 << 63) - 1  # Arrow's; a publisher may say anything
NUMBER_MASK = (1 << 64) - 1  # likewise


class MessageRows:
    """Rows that are gathered for one batch. bytes: of payloads and topics."""

    def __init__(self) -> None:
        self.bytes = 0
        self._topics: list[str] = []
        self._payloads: list[bytes] = []
        self._publishers: list[int] = []
        self._sequences: list[int] = []
        self._timestamps: list[int] = []
        self._headers: dict[int, dict[str, str | bytes]] = {}  # by row

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, topic: str, publisher: int, timestamp: int, sequences: Sequence[int], items: Sequence[Item]) -> None:
        """Messages of one publisher and topic. timestamp: nanoseconds since 1970, of all. items: payloads, or payloads with
        their headers."""
        row, count = len(self._payloads), len(items)
        plain = [item for item in items if isinstance(item, bytes)]
        if len(plain) == count:
            self._payloads += plain
        else:
            for item in items:
                payload, headers = (item, None) if isinstance(item, bytes) else item
                if headers:
                    self._headers[len(self._payloads)] = headers
                self._payloads.append(payload)
        self.bytes += sum(map(len, islice(self._payloads, row, None))) + count * len(topic)
        self._sequences += sequences if not count or sequences[-1] <= NUMBER_MASK else [n & NUMBER_MASK for n in sequences]
        self._topics += repeat(topic, count)
        self._publishers += repeat(publisher, count)
        self._timestamps += repeat(min(timestamp, TIMESTAMP_MAX), count)

    def batch(self) -> pa.RecordBatch:
        """Of SCHEMA."""
        columns = [
            pa.array(self._topics, pa.string()),
            pa.array(self._payloads, pa.binary()),
            pa.array(self._publishers, pa.uint64()),
            pa.array(self._sequences, pa.uint64()),
            pa.array(self._timestamps, pa.timestamp("ns", "UTC")),
            self._header_column(),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _header_column(self) -> pa.Array:
        offsets, names, values = [0], [], []
        for row in range(len(self)) if self._headers else ():
            for name, value in self._headers.get(row, {}).items():
                names.append(name)
                values.append(value.encode() if isinstance(value, str) else value)
            offsets.append(len(names))
        if not self._headers:
            offsets *= len(self) + 1
        arrays = pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.binary())
        return pa.MapArray.from_arrays(*arrays)
