"""What `import roq` gives: the same names to programs, to people and to type checkers, and nothing that isn't used yet.

Whatever a public method takes or gives is importable from `roq` (of a shuffle: from `roq.shuffle`), and `roq.blocking` has
every method of the asynchronous face.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import roq
import roq.shuffle
from roq import blocking
from roq.pubsub.inbox import Inbox
from roq.pubsub.past import PastReader

FACES = [
    (roq.Cluster, blocking.Cluster),
    (roq.Publisher, blocking.Publisher),
    (roq.Subscriber, blocking.Subscriber),
    (roq.GroupSubscriber, blocking.GroupSubscriber),
    (roq.Responder, blocking.Responder),
    (roq.Request, blocking.Request),
    (roq.WorkQueue, blocking.WorkQueue),
    (roq.Task, blocking.Task),
    (roq.Transaction, blocking.Transaction),
]
PUBLIC = (roq, roq.shuffle)
# What a queue's membership, its past and its inbox ask of a publisher or a subscriber; what a lease's keeper does to a task.
INSIDE = {"join_request", "report", "take", "answered", "mark_lost", "ends_in"}
INSIDE |= {name for kind in (PastReader, Inbox) for name in vars(kind) if name not in vars(object)} - {"batches", "next_batch"}
# A blocking publisher or subscriber is opened by `with` alone; its `id` and `lost` are attributes of the asynchronous one.
OPENED_BY_WITH, ATTRIBUTES = {"open"}, {"id", "lost"}


def members(kind: type) -> dict[str, Any]:
    """Public ones, with those of its bases."""
    found: dict[str, Any] = {}
    for base in kind.__mro__[:-1]:
        for name, value in vars(base).items():
            if not name.startswith("_") and name not in INSIDE:
                found.setdefault(name, value)
    return found


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize(("asynchronous", "plain"), FACES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_the_blocking_face_has_every_method(asynchronous: type, plain: type) -> None:
    theirs, ours = members(asynchronous), members(plain)
    assert set(theirs) - set(ours) <= OPENED_BY_WITH
    assert set(ours) - set(theirs) <= ATTRIBUTES
    for name in set(theirs) & set(ours):
        assert isinstance(theirs[name], property) == isinstance(ours[name], property), name
        if inspect.isfunction(theirs[name]):
            assert parameters(theirs[name]) == parameters(ours[name]), name


@pytest.mark.parametrize("name", ["connect", "open_queue"])
def test_both_faces_are_opened_the_same_way(name: str) -> None:
    assert parameters(getattr(roq, name)) == parameters(getattr(blocking, name))


def in_hand(module: ModuleType) -> Iterator[type]:
    """Every type of ours that is named where one that `module` exports is used, or in what that gives, and so on."""
    todo: list[Any] = [getattr(module, name) for name in module.__all__ if name != "blocking"]
    seen = set[Any]()
    while todo:
        one = todo.pop()
        if isinstance(one, list):  # of a Callable's arguments
            todo += one
            continue
        if one in seen:
            continue
        seen.add(one)
        todo += typing.get_args(one)
        if inspect.isfunction(one):
            todo += typing.get_type_hints(one).values()
        elif isinstance(one, type) and one.__module__.partition(".")[0] == "roq":
            yield one
            if not issubclass(one, Enum | Exception):
                todo += [hint for name, hint in typing.get_type_hints(one).items() if not name.startswith("_")]
                for member in members(one).values():
                    method = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                    todo += typing.get_type_hints(method).values() if inspect.isfunction(method) else ()


SEEN = {
    roq: {roq.Cluster, roq.Task, roq.Message, roq.QueueKpi},
    roq.shuffle: {roq.shuffle.Shuffles, roq.shuffle.Receipt, roq.shuffle.Range, roq.shuffle.Position},
}


@pytest.mark.parametrize("module", PUBLIC)
def test_whatever_a_user_gets_in_hand_is_importable_from_where_it_is_used(module: ModuleType) -> None:
    found = {kind for kind in in_hand(module) if kind.__module__ != "roq.errors"}
    assert SEEN[module] <= found
    assert [kind for kind in found if getattr(module, kind.__name__, None) is not kind] == []


def typed(module: ModuleType) -> dict[str, str]:
    """Public name -> the module that `__init__.pyi` has it from."""
    tree = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text())
    found = {
        alias.asname or alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    [written] = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(written) == sorted(found)
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_type_checkers_see_what_programs_get(module: ModuleType) -> None:
    assert sorted(typed(module)) == module.__all__
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in PUBLIC for name in module.__all__])
def test_each_name_is_where_it_is_said_to_be(module: ModuleType, name: str) -> None:
    home = sys.modules.get(typed(module)[name])
    found = getattr(module, name)
    assert found is getattr(home or sys.modules[typed(module)[name]], name)
    assert getattr(module, name) is found


def test_what_does_not_exist_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'roq' has no attribute 'conect'"):
        _ = roq.conect  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'roq\.shuffle' has no attribute 'opne'"):
        _ = roq.shuffle.opne  # type: ignore[attr-defined]


def test_a_program_loads_what_it_uses() -> None:
    program = "import sys, roq; roq.RoqError; print(sorted({'asyncio', 'zmq', 'kazoo', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


ERRORS_OF_0_1 = (
    *("AttemptConflict", "AttemptLost", "AttemptNotFound", "CallError", "Closed", "ClusterNotFound", "DataLost"),
    *("DeadlineExceeded", "ExchangeNotFound", "FrameError", "HostConflict", "HostFull", "HostNotFound", "InvalidAddress"),
    *("InvalidConfiguration", "InvalidName", "InvalidPolicy", "InvalidTopic", "LastExchange", "LeaseLost", "LogFenced"),
    *("LogTrimmed", "LogUnavailable", "ManifestGone", "ManifestsTaken", "MessagesLost", "NoHosts", "NotConfirmed"),
    *("NotLeader", "NotReady", "Overloaded", "PayloadTooLarge", "PortTaken", "ProcessFailed", "PublisherNotFound"),
    *("QueueConflict", "QueueNotFound", "QueueStopped", "RoqError", "SchemaMismatch", "ShuffleConflict", "ShuffleNotFound"),
    *("ShuffleNotSealed", "ShuffleSealed", "SlowSubscriber", "StaleEpoch", "StorageDenied", "StorageFailed", "StorageFull"),
    *("TaskNotFound", "TemporaryError", "Unavailable", "UnknownFormat", "WinnersUnknown", "WorkQueueConflict"),
    *("WorkQueueNotFound", "ZooKeeperUnavailable"),
)
# What README and docs of 0.1 name: it stays where it is, or says where it is now.
OF_0_1 = {
    "roq": (
        *("Bounds", "Cluster", "ExchangeRule", "HostRule", "LeaseLost", "Message", "MessagesLost", "NewTask", "Policy"),
        *("Publisher", "QueueRule", "RoqError", "SlowSubscriber", "Status", "Subscriber", "Task", "TaskState", "TaskView"),
        *("Work", "WorkQueue", "blocking", "connect", "log_lost", "open_queue", "policy_from_toml", "raise_lost"),
    ),
    "roq.blocking": ("Cluster", "Publisher", "Subscriber", "Task", "WorkQueue", "connect", "open_queue"),
    "roq.errors": ERRORS_OF_0_1,
    "roq.testing": ("Cut", "DockerCluster", "HostProcess", "LoopbackCluster", "NotPossible", "TestedCluster"),
    "roq.testing.plugin": ("roq_cluster", "roq_cluster_options"),
    "roq.shuffle": ("Shuffles", "Writer", "open"),
    "roq.spark": ("register",),
}
# `python -m NAME`, as units, containers and spark-submit have them.
PROGRAMS_OF_0_1 = (
    *("gcm", "hcm", "roq.cli"),
    *(f"roq.spark.pipeline.{job}" for job in ("archive", "dead_letters", "kpi", "sort")),
)
SCRIPTS_OF_0_1 = ("roq", "roq-gcm", "roq-hcm")


@pytest.mark.parametrize("module", OF_0_1)
def test_what_documents_of_0_1_name_is_where_it_was(module: str) -> None:
    home = importlib.import_module(module)
    assert [name for name in OF_0_1[module] if not hasattr(home, name)] == []


def test_programs_of_0_1_are_started_as_they_were() -> None:
    for name in PROGRAMS_OF_0_1:
        assert importlib.util.find_spec(name if "pipeline" in name else f"{name}.__main__") is not None, name
    scripts = {each.name: each for each in importlib.metadata.entry_points(group="console_scripts")}
    assert all(callable(scripts[name].load()) for name in SCRIPTS_OF_0_1)
