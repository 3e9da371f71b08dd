"""Addresses of work queues over logs on servers: what is whose, and that no password is shown. Not covered: opening them."""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType

import pytest

import roq
from roq import blocking
from roq.errors import InvalidAddress, InvalidConfiguration, InvalidName
from roq.runtime.installation import BRINGS
from roq.workqueue.address import LOGS, open_backend, parse, same_queue, without_password

SECRET = "s3cr%2Ft"


def test_what_is_ours_and_what_is_the_driver_s() -> None:
    place = parse(f"postgresql://u:{SECRET}@h1,h2:54/db?sslmode=require&queue=a%20b&max_attempts=5&host=/run/postgresql")
    assert (place.scheme, place.path, place.options.given()) == ("postgresql", "a b", {"max_attempts": 5})
    assert place.server == f"postgresql://u:{SECRET}@h1,h2:54/db?sslmode=require&host=/run/postgresql"
    assert place.place == "postgresql://u:***@h1,h2:54/db"
    place = parse(f"jetstream://u:{SECRET}@h1:4222,h2/orders%2Fnew?replicas=3&patience_seconds=2".replace("%2Fnew", ".new"))
    assert (place.scheme, place.path, place.options.given()) == ("jetstream", "orders.new", {"patience_seconds": 2.0})
    assert place.server == f"jetstream://u:{SECRET}@h1:4222,h2?replicas=3"
    assert place.place == "jetstream://u:***@h1:4222,h2"
    assert parse("postgresql:///db?queue=q&host=/tmp").server == "postgresql:///db?host=/tmp"


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("postgresql://u:{}@h/db", InvalidAddress),
        ("postgresql://u:{}@h/?queue=q", InvalidAddress),
        ("postgresql://u:{}@h/db?queue=a&queue=b", InvalidAddress),
        ("postgresql://u:{}@h:0/db?queue=a", InvalidAddress),
        ("postgresql://u:{}@h:x/db?queue=a", InvalidAddress),
        ("postgresql://u:{}@h/db?queue=", InvalidName),
        ("postgresql://u:{}@h/db?queue=a%2Fb", InvalidName),
        ("postgresql://u:{}@h/db?queue=a&replicas=3", InvalidConfiguration),
        ("postgresql://u:{}@h/db?queue=a&write_quorum=3", InvalidConfiguration),
        ("postgresql://u@h/db?queue=a&password={}", InvalidConfiguration),
        ("postgres://u:{}@h/db?queue=a", InvalidAddress),
        ("postgresql:u:{}@h/db?queue=a", InvalidAddress),
        ("postgresql://u:a/{}@h/db?queue=a", InvalidAddress),
        ("jetstream://u:{}@h", InvalidAddress),
        ("jetstream://u:{}@h/", InvalidAddress),
        ("jetstream://u:{}@/q", InvalidAddress),
        ("jetstream://u:{}@h:70000/q", InvalidAddress),
        ("jetstream://u:{}@h/a/b", InvalidName),
        ("jetstream://u:{}@h/q?sslmode=require", InvalidConfiguration),
        ("nats://u:{}@h/q", InvalidAddress),
        ("jetstream://u:{}/ret@h:4222/name", InvalidAddress),
        ("jetstream://u:a/{}@h:4222/name", InvalidAddress),
        ("jetstream://u:{}?ret@h:4222/name", InvalidAddress),
        ("jetstream://u:4222/x?{}@h:4222/name", InvalidAddress),
        ("jetstream://u:4222/x?a&{}=b@h:4222/name", InvalidConfiguration),
        ("jetstream://{}@h:x/name", InvalidAddress),
        ("postgresql://u:{}/ret@h:4222/db?queue=q", InvalidAddress),
        ("postgresql://u:{}?ret@h/db?queue=q", InvalidAddress),
        ("postgresql://u@h/db?queue=a&sslpassword={}", InvalidConfiguration),
    ],
)
def test_what_is_wrong_is_told_without_the_password(address: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as told:
        parse(address.format(SECRET))
    assert "s3cr" not in str(told.value)
    assert "s3cr" not in without_password(address.format(SECRET)) or "password=" in address


def test_an_opened_queue_shows_no_password() -> None:
    address = f"jetstream://u:{SECRET}@h/q"
    for queue in (roq.open_queue(address), blocking.open_queue(address)):
        assert queue.address == "jetstream://u:***@h/q"
    token = f"jetstream://{SECRET}@h:4222/q"
    assert roq.open_queue(token).address == "jetstream://***@h:4222/q"
    assert (parse(token).place, parse(token).server) == ("jetstream://***@h:4222", f"jetstream://{SECRET}@h:4222")
    assert without_password("postgresql://u@h/db?queue=q") == "postgresql://u@h/db?queue=q", "a user's name is none"
    assert without_password("jetstream://h:4222/q") == "jetstream://h:4222/q"
    assert roq.open_queue("roq://zk:2181/queue@group").address == "roq://zk:2181/queue@group"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("postgresql://a:x@h/db?queue=q", "postgresql://b@H:5432/db?queue=q&max_attempts=3", True),
        ("postgresql://h/db?queue=q", "postgresql://h/db?queue=r", False),
        ("postgresql://h/db?queue=q", "postgresql://h/other?queue=q", False),
        ("postgresql://h:1/db?queue=q", "postgresql://h:2/db?queue=q", False),
        ("jetstream://a,b/q", "jetstream://b:4222,c/q", True),
        ("jetstream://a/q", "jetstream://a/r", False),
        ("jetstream://a/q", "postgresql://a/db?queue=q", False),
    ],
)
def test_two_addresses_of_one_queue(one: str, other: str, same: bool) -> None:
    assert same_queue(one, other) is same_queue(other, one) is same


@pytest.mark.parametrize("scheme", LOGS)
def test_a_driver_that_is_missing_is_told_with_its_extra(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> ModuleType:
        if module == LOGS[scheme].module:
            raise ModuleNotFoundError("no such module", name=BRINGS[scheme][0])
        return import_module(module)

    monkeypatch.setattr("roq.workqueue.address.import_module", missing)
    address = {"postgresql": "postgresql://h/db?queue=q", "jetstream": "jetstream://h/q"}[scheme]
    wanted = f'an address of {scheme}: needs {BRINGS[scheme][0]}: pip install "roq-messaging[{scheme}]"'
    with pytest.raises(InvalidConfiguration, match=re.escape(wanted)):
        open_backend(address, None)
