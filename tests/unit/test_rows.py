"""Messages as Arrow rows, and the bounds of what a publisher may say."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest

import roq
import roq.client.read as read_module
from roq.client.read import TapeWindow, _end_of, queue_at
from roq.client.rows import SCHEMA, MessageRows
from roq.coordination.locate import GcmClient
from roq.errors import InvalidAddress, InvalidConfiguration, InvalidName, InvalidPosition
from roq.pubsub.subscriber import Subscriber
from roq.wire.recording import TapePosition


def test_rows_have_their_columns() -> None:
    rows = MessageRows()
    rows.add("eu", 7, 5, range(1, 3), [b"1", b"22"])
    rows.add("us.é", (1 << 64) - 1, (1 << 64) - 1, [(1 << 64) - 1, 1 << 64], [(b"", {"é": "ü", "raw": b"\xff"}), (b"x", {})])
    rows.add("eu", 7, 5, [], [])
    assert (len(rows), rows.bytes) == (4, 16)
    batch = rows.batch()
    assert batch.schema == SCHEMA
    assert batch.validate(full=True) is None
    assert batch["topic"].to_pylist() == ["eu", "eu", "us.é", "us.é"]
    assert batch["payload"].to_pylist() == [b"1", b"22", b"", b"x"]
    assert batch["publisher"].to_pylist() == [7, 7, (1 << 64) - 1, (1 << 64) - 1]
    assert batch["sequence"].to_pylist() == [1, 2, (1 << 64) - 1, 0], "no number ends a read"
    assert [stamp.value for stamp in batch["timestamp"]] == [5, 5, (1 << 63) - 1, (1 << 63) - 1]
    assert batch["headers"].to_pylist() == [[], [], [("é", "ü".encode()), ("raw", b"\xff")], []]
    assert MessageRows().batch().num_rows == 0


def test_addresses() -> None:
    assert queue_at("roq://zk1:2181,zk2:2181/RoQ/or%20ders") == ("zk1:2181,zk2:2181/RoQ", "or ders")
    for wrong in ("orders", "zk1:2181/orders", "roq://zk1:2181", "memory:x", None):
        with pytest.raises(InvalidAddress):
            queue_at(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        queue_at("roq://zk1:2181/%20")
    with pytest.raises(InvalidConfiguration, match="for work queues"):
        queue_at("roq://zk1:2181/orders?standbys=1")


def test_a_name_alone_is_of_the_cluster_that_is_said() -> None:
    assert queue_at("or ders", "zk1:2181,zk2:2181/RoQ") == ("zk1:2181,zk2:2181/RoQ", "or ders")
    with pytest.raises(InvalidAddress, match=r"'orders' names no cluster: roq://zk1:2181,.* does, or a name with cluster="):
        queue_at("orders")
    with pytest.raises(InvalidConfiguration, match="names its cluster: leave cluster='zk2' out"):
        queue_at("roq://zk1:2181/orders", "zk2")
    with pytest.raises(InvalidAddress):
        queue_at("log:///x", "zk1")
    with pytest.raises(InvalidName):
        queue_at("a/b", "zk1")
    with pytest.raises(InvalidConfiguration, match="is not host:port"):
        queue_at("orders", "zk1:x")


def test_ends() -> None:
    now = datetime.now().astimezone().replace(microsecond=250_999) - timedelta(seconds=1)
    place = TapePosition("0f", {"a": 1})
    assert _end_of(None) is None
    assert _end_of(now) == int(now.timestamp()) * 1000 + 250
    assert abs(_end_of(timedelta(hours=1)) - (now.timestamp() - 3600) * 1000) < 5_000  # type: ignore[operator]
    assert _end_of(place) == _end_of(str(place)) == place
    with pytest.raises(InvalidPosition):
        _end_of("p1.?")
    with pytest.raises(InvalidConfiguration, match="a time that has passed"):
        _end_of(now + timedelta(hours=1))
    with pytest.raises(InvalidConfiguration, match="without it, everything up to now is read"):
        _end_of(timedelta(seconds=-1))
    for wrong in ("live", "earliest", 5):
        with pytest.raises(InvalidConfiguration):
            _end_of(wrong)  # type: ignore[arg-type]


async def test_a_time_that_has_just_passed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then what was written before it is stored, whatever Exchange wrote it."""
    monkeypatch.setattr(read_module, "UNTIL_SECONDS", 0.2)
    begun: list[float] = []

    async def opened(self: Subscriber, timeout_seconds: float = 0.0) -> Subscriber:
        begun.append(time.time())
        return self

    monkeypatch.setattr(Subscriber, "open", opened)
    end = round(time.time() * 1000)
    for at in (end, end - 60_000):
        await TapeWindow(GcmClient("127.0.0.1:1"), "q", (), lambda lost: None, "earliest", at).open()
    assert begun[0] * 1000 >= end + 200
    assert begun[1] - begun[0] < 0.2


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from roq import *
import roq
try:
    roq.read("roq://zk:2181/orders")
except ModuleNotFoundError as error:
    print(error)
"""


def test_who_lacks_pyarrow_is_told_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYARROW], check=True, capture_output=True, text=True)
    assert done.stdout == 'roq.read needs pyarrow: pip install "roq-messaging[arrow]"\n'
    done = subprocess.run(
        [sys.executable, "-c", "import sys, roq; roq.connect; print('pyarrow' in sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n"
    assert roq.RecordedBatches.__doc__
