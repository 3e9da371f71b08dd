"""Where shuffles are: good and bad addresses, and what is loaded for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import roq.shuffle
from roq.errors import InvalidAddress
from roq.shuffle.service import ShuffleAddress, parse


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("file:///data/shuffles", ShuffleAddress("file", "/data/shuffles")),
        ("file:///data/a%20b%3F", ShuffleAddress("file", "/data/a b?")),
        ("roq://zk1:2181,zk2:2181", ShuffleAddress("roq", "zk1:2181,zk2:2181")),
        ("roq://zk1/RoQ/two", ShuffleAddress("roq", "zk1/RoQ/two")),
    ],
)
def test_good_addresses(address: str, place: ShuffleAddress) -> None:
    assert parse(address) == place


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "is not the address of shuffles"),
        ("/data/shuffles", "Is file:///data/shuffles meant"),
        ("s3://bucket", "is not the address of shuffles"),
        ("file:/data", "is not the address of shuffles"),
        ("file://host/data", "three slashes"),
        ("file:///", "no folder of its own"),
        ("file:///a?b", "written %3F"),
        ("roq://", "not the host:port"),
        ("roq://:2181", "not the host:port"),
        ("roq://zk1:x", "not the host:port"),
        ("roq://zk1:99999", "not the host:port"),
        ("roq://zk1,,zk2", "not the host:port"),
        (None, "is a string"),
    ],
)
def test_bad_addresses(address: str, says: str) -> None:
    with pytest.raises(InvalidAddress, match=says):
        parse(address)


def test_a_folder_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidAddress):
        roq.shuffle.open(f"file://{tmp_path}/file/shuffles")


def test_the_plan_needs_no_arrow() -> None:
    """gcm plans shuffles on hosts without pyarrow."""
    program = "import sys, roq.shuffle.sampling, roq.shuffle.plan; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_the_public_names() -> None:
    assert {roq.shuffle.open.__name__, roq.shuffle.Shuffles.__name__, roq.shuffle.Writer.__name__} == {
        "open",
        "Shuffles",
        "Writer",
    }
    with pytest.raises(AttributeError, match="no attribute 'close'"):
        _ = roq.shuffle.close  # type: ignore[attr-defined]
