"""Options of work queues: in the address or as arguments, one meaning; what is refused, and by which words."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec
import pytest

import roq
from roq import blocking
from roq.errors import InvalidConfiguration, WorkQueueConflict
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import ANY, KINDS, Options, from_query, open_backend, parse
from roq.workqueue.contract import ClusterSettings

EXAMPLES = {int: "3", float: "2.5", bool: "true"}


def test_every_option_can_be_said_in_an_address_and_as_an_argument() -> None:
    for opening in (roq.open_queue, blocking.open_queue):
        assert [*inspect.signature(opening).parameters] == ["address", *KINDS]
    assert Options.__struct_fields__ == tuple(KINDS)
    assert set(ClusterSettings.__struct_fields__) <= set(KINDS), "what is kept with a queue can be chosen"
    for name, kind in KINDS.items():
        said = from_query(f"{name}={EXAMPLES[kind.number]}")
        assert said == msgspec.convert({name: kind.number(EXAMPLES[kind.number])}, Options).checked()
        assert set(kind.schemes) <= set(ANY)


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("", "'' is no option; options are max_attempts="),
        ("copies=3", "'copies' is no option; options are max_attempts="),
        ("max_attempts", "'max_attempts' is no option"),
        ("max_attempts=3&&standbys=1", "'' is no option"),
        ("max_attempts=", "max_attempts is a whole number, at least 0, got ''"),
        ("max_attempts=many", "max_attempts is a whole number, at least 0, got 'many'"),
        ("max_attempts=1.5", "max_attempts is a whole number"),
        ("max_attempts=-1", "max_attempts is a whole number, at least 0, got -1"),
        ("max_attempts=3&max_attempts=3", "max_attempts is given twice"),
        ("dedup_seconds=nan", "dedup_seconds is a number, at least 0, got nan"),
        ("dedup_seconds=inf", "dedup_seconds is a number, at least 0, got inf"),
        ("write_quorum=0", "write_quorum is a whole number from 1 to 9, got 0"),
        ("write_quorum=10", "write_quorum is a whole number from 1 to 9, got 10"),
        ("standbys=16", "standbys is a whole number from 0 to 15, got 16"),
        ("inline_bytes=0", "inline_bytes is a whole number from 1 to 1048576, got 0"),
        ("patience_seconds=0", "patience_seconds is a number, at least 0.001, got 0"),
        ("ack_sync_seconds=61", "ack_sync_seconds is a number from 0 to 60, got 61"),
        ("trust_functions=1", "trust_functions is true or false, got '1'"),
        ("write_quorum=2&ack_quorum=3", "ack_quorum is at most write_quorum: 3 stores can't acknowledge what 2 keep"),
    ],
)
def test_a_wrong_option_is_refused_with_a_hint(query: str, hint: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        parse(f"roq://zk1:2181/jobs?{query}")
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        Options(write_quorum="3"),  # type: ignore[arg-type]
        Options(write_quorum=True),
        Options(trust_functions=1),  # type: ignore[arg-type]
        Options(max_attempts=1.0),  # type: ignore[arg-type]
        Options(dedup_seconds=float("nan")),
        Options(write_quorum=2, ack_quorum=3),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_opened(options: Options) -> None:
    for face in (roq.WorkQueue, blocking.WorkQueue):
        with pytest.raises(InvalidConfiguration):
            face("roq://nobody.invalid:1/jobs", options)


@pytest.mark.parametrize("scheme", ANY)
def test_an_option_that_a_queue_does_not_have_is_refused(scheme: str, tmp_path: Path) -> None:
    servers = {
        "roq": "roq://zk1:2181/jobs",
        "postgresql": "postgresql://nobody.invalid/db?queue=jobs",
        "jetstream": "jetstream://nobody.invalid/jobs",
    }
    address = {"memory": "memory:", **servers}.get(scheme, f"{scheme}://{tmp_path}/tasks")
    mark = "&" if "?" in address else "?"
    for name, kind in KINDS.items():
        value = EXAMPLES[kind.number]
        if scheme in kind.schemes:
            assert parse(f"{address}{mark}{name}={value}").options.given() == {name: kind.number(value)}
            continue
        with pytest.raises(InvalidConfiguration, match=rf"{name} is an option of [\w: ]+: addresses; this one is {scheme}:"):
            parse(f"{address}{mark}{name}={value}")
        with pytest.raises(InvalidConfiguration, match=rf"{name} is an option of"):
            open_backend(address, msgspec.convert({name: kind.number(value)}, Options))
    assert not [*tmp_path.iterdir()], "nothing was made"


@pytest.mark.parametrize("kind", ["memory", "file", "log"])
async def test_options_reach_the_queue_and_stay_with_it(kind: str, tmp_path: Path) -> None:
    place = "memory:options" if kind == "memory" else f"{kind}://{tmp_path}/tasks"
    async with roq.open_queue(f"{place}?max_attempts=4&dedup_seconds=1.5", payload_bytes_max=99) as queue:
        assert queue.settings == TaskSettings(4, 1.5, 99)
    with blocking.open_queue(place) as plain:
        assert plain.settings == TaskSettings(4, 1.5, 99)
    for query in ("max_attempts=4", "dedup_seconds=1.5", "payload_bytes_max=99&max_attempts=4"):
        with blocking.open_queue(f"{place}?{query}") as same:  # what is not asked for may be any
            assert same.settings == TaskSettings(4, 1.5, 99)
    with pytest.raises(WorkQueueConflict, match=r"exists with max_attempts 4, not 5$"):
        blocking.open_queue(f"{place}?max_attempts=5&payload_bytes_max=99").open()
    with pytest.raises(WorkQueueConflict, match=r"exists with max_attempts 4, not 0, dedup_seconds 1.5, not 300.0$"):
        blocking.open_queue(f"{place}?max_attempts=0&dedup_seconds=300").open()  # the defaults, if they are asked for
    with pytest.raises(InvalidConfiguration, match="max_attempts is 4 in the address, but 5 is asked for beside it"):
        blocking.open_queue(f"{place}?max_attempts=4", max_attempts=5).open()
    with pytest.raises(InvalidConfiguration, match="ack_quorum"):
        open_backend("roq://nobody.invalid:1/jobs?write_quorum=1", Options(ack_quorum=2))


def test_a_sync_that_may_come_later_reaches_the_folder(tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/tasks?ack_sync_seconds=0.5", None)
    assert backend._late_sync  # type: ignore[attr-defined]
    backend.close()
