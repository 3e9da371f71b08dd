"""The registration's JSON: what Curator writes is read, what we write Curator reads. Address and ordering rules beside it."""

from __future__ import annotations

import json

import msgspec
import pytest

from roq.coordination.election import order
from roq.coordination.link import parse_address
from roq.coordination.registration import ServiceInstance, instance_json, parse_instance
from roq.errors import FrameError, InvalidConfiguration
from roq.wire.hcm import HostPayload

CURATOR_FIELDS = ["name", "id", "address", "port", "sslPort", "payload", "registrationTimeUTC", "serviceType", "uriSpec"]

CURATOR_INSTANCE = b"""{"name":"hcm","id":"host-1","address":"127.0.1.1","port":5100,"sslPort":null,"payload":null,
"registrationTimeUTC":1700000000123,"serviceType":"DYNAMIC","uriSpec":null}"""


def test_what_curator_writes_by_default_is_read_and_counts_as_enabled() -> None:
    instance = parse_instance(CURATOR_INSTANCE)
    assert (instance.name, instance.id, instance.address, instance.port) == ("hcm", "host-1", "127.0.1.1", 5100)
    assert instance.registered == 1_700_000_000_123
    assert instance.enabled


def test_unknown_fields_are_ignored() -> None:
    text = CURATOR_INSTANCE.replace(b'"uriSpec":null', b'"uriSpec":{"parts":[{"value":"http","variable":false}]},"new":[1]')
    assert parse_instance(
        text.replace(b'"payload":null', b'"enabled":false,"payload":{"@class":"a.B","x":1}')
    ) == ServiceInstance(
        name="hcm",
        id="host-1",
        address="127.0.1.1",
        port=5100,
        payload={"@class": "a.B", "x": 1},
        registered=1_700_000_000_123,
        uri_spec={"parts": [{"value": "http", "variable": False}]},
        enabled=False,
    )


def test_missing_fields_have_curators_defaults() -> None:
    instance = parse_instance(b'{"name":"hcm","id":"a"}')
    assert instance == ServiceInstance(name="hcm", id="a")
    assert instance.enabled
    assert instance.service_type == "DYNAMIC"


def test_what_we_write_has_curators_fields_in_its_order_and_no_enabled() -> None:
    payload = HostPayload(incarnation="i1", exchanges_max=8)
    instance = ServiceInstance(name="hcm", id="a,b c", address="127.0.1.1", port=1, payload=payload, registered=5)
    fields = json.loads(instance_json(instance))
    assert list(fields) == CURATOR_FIELDS
    assert fields["sslPort"] is None
    assert fields["uriSpec"] is None
    assert fields["payload"]["incarnation"] == "i1"
    assert parse_instance(instance_json(instance)).payload_as(HostPayload) == payload


def test_a_disabled_instance_stays_disabled() -> None:
    instance = ServiceInstance(name="hcm", id="a", enabled=False)
    assert not parse_instance(instance_json(instance)).enabled


def test_a_payload_inside_a_string_is_read_too() -> None:
    payload = HostPayload(incarnation="i1", exchanges_max=8, draining=True)
    text = msgspec.json.encode(payload).decode()
    assert ServiceInstance(name="hcm", id="a", payload=text).payload_as(HostPayload) == payload


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"name":1,"id":"a"}', b"\xff", b'{"name":"hcm","id":"a"'])
def test_what_is_no_instance_is_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        parse_instance(data)


@pytest.mark.parametrize("payload", [None, 3, "no json", {"exchanges_max": 1}])
def test_a_payload_of_another_kind_is_a_frame_error(payload: object) -> None:
    with pytest.raises(FrameError):
        ServiceInstance(name="hcm", id="a", payload=payload).payload_as(HostPayload)


def test_participants_are_ordered_by_the_text_after_the_last_latch() -> None:
    names = [
        "_c_ffffffff-0000-0000-0000-000000000000-latch-0000000002",
        "_c_00000000-0000-0000-0000-000000000000-latch-0000000010",
        "_c_a-latch-b-latch-0000000001",
    ]
    assert [order(name) for name in names] == ["0000000002", "0000000010", "0000000001"]
    assert order("stranger") == "stranger"


@pytest.mark.parametrize(
    ("text", "hosts", "chroot"),
    [
        ("zk1:2181", "zk1:2181", "/RoQ"),
        ("zk1", "zk1:2181", "/RoQ"),
        (" zk1:1 , zk2:2/deep/er/ ", "zk1:1,zk2:2", "/deep/er"),
        ("127.0.0.1:2181/", "127.0.0.1:2181", ""),
        ("[::1]:99,[fe80::1]/x", "[::1]:99,[fe80::1]:2181", "/x"),
    ],
)
def test_zookeeper_addresses(text: str, hosts: str, chroot: str) -> None:
    assert parse_address(text) == (hosts, chroot)


@pytest.mark.parametrize(
    "text", ["", "/RoQ", "zk1:x", "zk1:0", "zk1:70000", "zk1,,zk2", "zk1:1:2", "zk 1", "a:1/x//b", "a:1/../b", "[]:1"]
)
def test_what_is_no_zookeeper_address(text: str) -> None:
    with pytest.raises(InvalidConfiguration):
        parse_address(text)
