"""The provider of hosts from clouds with two real drivers of libcloud over TCP, each with its cloud's answers (cloud_rig.py).

As a user has it: by a fleet's file. What needs no cloud's answer (libcloud's dummy, the file): test_providers.py.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from libcloud.common.digitalocean import DigitalOcean_v2_Connection
from libcloud.compute.drivers.digitalocean import DigitalOcean_v2_NodeDriver

from gcm.providers.provider import HostProvider, HostSpec, ProviderExhausted, ProviderFailed
from gcm.providers.settings import load_fleet, provider_of
from tests.unit.cloud_rig import ADDRESS, SILENCE, Answer, FakeCloud, FakeDroplets, FakeInstances, Server

SPEC = HostSpec("roq-abc-7", "abc", {"ROQ_HOST": "roq-abc-7", "ROQ_ZOOKEEPER": "zk1:2181"}, b"a card's secret key\n" * 20)
CARD = base64.b64encode(SPEC.card).decode()
OTHERS = ("database", "roq-abcd-7", "roq-abc", "roq-ab-7", "xroq-abc-7")  # other people's, and other fleets'
AT_ONCE = 20.0  # seconds; a call that obeys no bound takes a minute or an hour

Changes = Sequence[tuple[str, str]]
CALLS: dict[str, Callable[[HostProvider], Any]] = {
    "list": lambda provider: provider.names("abc"),
    "create": lambda provider: provider.create(SPEC),
    "destroy": lambda provider: provider.destroy(SPEC.name, "abc"),
}


@pytest.fixture(params=[FakeDroplets, FakeInstances], ids=["digitalocean", "ec2"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    made: FakeCloud = request.param()
    connect_here(made, monkeypatch)
    yield made
    made.server.close()


@pytest.fixture
def droplets(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDroplets]:
    made = FakeDroplets()
    connect_here(made, monkeypatch)
    yield made
    made.server.close()


@pytest.fixture
def instances() -> Iterator[FakeInstances]:
    made = FakeInstances()
    yield made
    made.server.close()


def connect_here(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """DigitalOcean's driver takes a key alone; its connection obeys them."""

    def connection(key: str, secure: bool, **options: Any) -> Any:
        return DigitalOcean_v2_Connection(key, False, ADDRESS, cloud.server.port, **options)

    if isinstance(cloud, FakeDroplets):
        monkeypatch.setattr(DigitalOcean_v2_NodeDriver, "connectionCls", staticmethod(connection))


@pytest.fixture
def provider(cloud: FakeCloud, tmp_path: Path) -> HostProvider:
    return provider_for(cloud, tmp_path)


def provider_for(cloud: FakeCloud, folder: Path, seconds: float = 30.0, key: str = "", changed: Changes = ()) -> HostProvider:
    """changed: texts of the file and what they are instead."""
    text = cloud.file()
    for before, after in changed:
        text = text.replace(before, after)
    path = folder / "fleet.toml"
    path.write_text(f'provider = "cloud"\ncall_seconds = {seconds}\n{text}')
    path.chmod(0o600)
    known = cloud.token if isinstance(cloud, FakeDroplets) else FakeInstances.key
    return provider_of(load_fleet(path, {"CLOUD_KEY": key or known}), ADDRESS)


def failure(call: Callable[[HostProvider], Any], provider: HostProvider) -> ProviderFailed:
    """Of a call, within its bound."""
    begun = time.monotonic()
    with pytest.raises(ProviderFailed) as caught:
        call(provider)
    assert time.monotonic() - begun < AT_ONCE
    return caught.value


# --- what it asks for --------------------------------------------------------------------------------------------------


def test_a_machine_is_asked_for_once_with_all_that_it_needs(cloud: FakeCloud, provider: HostProvider) -> None:
    cloud.has("database")
    provider.create(SPEC)
    assert tuple(cloud.steps) == cloud.steps_of_create
    provider.create(SPEC)
    assert len(cloud.created) == 1
    made = cloud.created[0]
    wanted = {"digitalocean": ("s-2vcpu-4gb", "88004"), "ec2": ("m7g.large", "ami-0ddd")}
    assert (made.name, made.size, made.image) == ("roq-abc-7", *wanted[cloud.kind])
    assert made.user_data.startswith("#!/bin/sh\n")
    assert "\nROQ_HOST=roq-abc-7\nROQ_ZOOKEEPER=zk1:2181\nROQ_CARD=/etc/roq/host.card\nEND\n" in made.user_data
    assert f"printf %s {CARD} | base64 -d >/etc/roq/host.card\n" in made.user_data
    assert "exec roq-hcm --address" in made.user_data.splitlines()[-1]


def test_options_of_the_file_are_in_the_request(cloud: FakeCloud, provider: HostProvider) -> None:
    provider.create(SPEC)
    wanted: dict[str, dict[str, Any]] = {
        "digitalocean": {"region": "fra1", "tags": ["roq"], "ipv6": True},
        "ec2": {
            "MinCount": "1", "MaxCount": "1", "KeyName": "operations", "SecurityGroup.1": "roq",
            "TagSpecification.1.ResourceType": "instance", "tags": {"team": "data"},
        },
    }  # fmt: skip
    assert cloud.created[0].more == wanted[cloud.kind]


def test_an_image_may_be_named(cloud: FakeCloud, tmp_path: Path) -> None:
    id = {"digitalocean": "88004", "ec2": "ami-0ddd"}[cloud.kind]
    provider_for(cloud, tmp_path, changed=[(id, "roq-2026-03")]).create(SPEC)
    assert cloud.created[0].image == id
    missing = provider_for(cloud, tmp_path, changed=[(id, "none")])
    with pytest.raises(ProviderFailed, match="the cloud has no 'none'"):
        missing.create(replace(SPEC, name="roq-abc-8"))


def test_a_location_is_found_by_its_id_or_name(droplets: FakeDroplets, tmp_path: Path) -> None:
    provider_for(droplets, tmp_path, changed=[("fra1", "Amsterdam 3")]).create(SPEC)
    assert droplets.created[0].more["region"] == "ams3"
    with pytest.raises(ProviderFailed, match=r"the cloud has no 'mars1'.*`location`"):
        provider_for(droplets, tmp_path, changed=[("fra1", "mars1")]).create(replace(SPEC, name="roq-abc-8"))


def test_machines_of_a_fleet_are_found_among_all_others(cloud: FakeCloud, provider: HostProvider) -> None:
    """Of DigitalOcean 200 a page: the fleet's are on the first, the second and the last one."""
    for name in ("roq-abc-1", *OTHERS * 50, "roq-abc-2", *OTHERS * 50, "roq-abc-7"):
        cloud.has(name)
    assert provider.names("abc") == ["roq-abc-1", "roq-abc-2", "roq-abc-7"]
    assert cloud.steps.count("list") == {"digitalocean": 3, "ec2": 1}[cloud.kind]
    provider.create(SPEC)
    assert cloud.created == []
    for name in OTHERS:
        provider.destroy(name, "abc")
    assert "destroy" not in cloud.steps


def test_both_machines_of_one_name_are_listed_and_destroyed(cloud: FakeCloud, provider: HostProvider) -> None:
    for name in (SPEC.name, *OTHERS, SPEC.name):
        cloud.has(name)
    assert provider.names("abc") == [SPEC.name] * 2
    provider.destroy(SPEC.name, "abc")
    provider.destroy(SPEC.name, "abc")
    assert cloud.steps.count("destroy") == 2
    assert provider.names("abc") == []
    assert [machine.name for machine in cloud.machines if machine.state == cloud.running] == [*OTHERS]


def test_what_is_over_is_no_machine_and_what_costs_is_one(cloud: FakeCloud, provider: HostProvider) -> None:
    words = {
        "digitalocean": (["archive"], ["new", "active", "off"]),
        "ec2": (["shutting-down", "terminated"], ["pending", "running", "stopping", "stopped"]),
    }
    over, costs = words[cloud.kind]
    for number, state in enumerate((*over, *costs)):
        cloud.has(f"roq-abc-{number}", state)
    assert provider.names("abc") == [f"roq-abc-{number}" for number in range(len(over), len(over) + len(costs))]
    for number in range(len(over)):
        provider.create(replace(SPEC, name=f"roq-abc-{number}"))
    assert [made.name for made in cloud.created] == [f"roq-abc-{number}" for number in range(len(over))]


def test_a_machine_that_is_gone_meanwhile_is_destroyed(cloud: FakeCloud, provider: HostProvider) -> None:
    """A list may be older than what has happened: the second one of the name is destroyed as well."""
    cloud.has(SPEC.name)
    cloud.has(SPEC.name)
    cloud.instead["destroy"] = cloud.refusal("gone")
    provider.destroy(SPEC.name, "abc")
    assert cloud.steps.count("destroy") == 2


# --- what it is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        ("quota", ProviderExhausted),
        ("rate", ProviderExhausted),
        ("request", ProviderFailed),
        ("broken", ProviderFailed),
        ("busy", ProviderFailed),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_is_told_as_what_it_is(
    cloud: FakeCloud, provider: HostProvider, call: str, why: str, kind: type[ProviderFailed]
) -> None:
    if call == "destroy":
        cloud.has(SPEC.name)
    cloud.instead[call] = refusal = cloud.refusal(why)
    error = failure(CALLS[call], provider)
    assert type(error) is kind, error
    assert cloud.steps.count(call) == 1  # whoever leads tries again, and later each time
    told = (
        json.loads(refusal.body)["message"]
        if cloud.kind == "digitalocean"
        else refusal.body.split("<Message>")[1].split("<")[0]
    )
    assert told in str(error) or refusal.status == 429
    assert cloud.created == []


def test_no_room_in_a_zone_is_exhaustion(instances: FakeInstances, tmp_path: Path) -> None:
    instances.instead["create"] = instances.refusal("capacity")
    assert type(failure(CALLS["create"], provider_for(instances, tmp_path))) is ProviderExhausted


@pytest.mark.parametrize("step", ["list", "size", "image", "location"])
def test_a_rate_that_is_limited_is_not_waited_for(droplets: FakeDroplets, tmp_path: Path, step: str) -> None:
    """Whatever is asked before the machine is; it may be asked again in an hour."""
    droplets.instead[step] = droplets.refusal("rate")
    assert type(failure(CALLS["create"], provider_for(droplets, tmp_path))) is ProviderExhausted
    assert tuple(droplets.steps) == droplets.steps_of_create[: droplets.steps_of_create.index(step) + 1]


@pytest.mark.parametrize("call", CALLS)
def test_wrong_credentials_are_named(cloud: FakeCloud, tmp_path: Path, call: str) -> None:
    error = failure(CALLS[call], provider_for(cloud, tmp_path, key="wrong"))
    assert type(error) is ProviderFailed
    assert "InvalidCredsError" in str(error)
    assert "wrong" not in str(error)


@pytest.mark.parametrize(
    ("before", "after"),
    [("eu-central-1", "mars-1"), ("region = ", "regoin = "), ("ex_keyname", "ex_keynaem"), ("port = ", "port = -")],
)
def test_a_file_that_no_driver_takes_fails_as_a_cloud_does(
    instances: FakeInstances, tmp_path: Path, before: str, after: str
) -> None:
    assert type(failure(CALLS["create"], provider_for(instances, tmp_path, changed=[(before, after)]))) is ProviderFailed


# --- what is no answer -------------------------------------------------------------------------------------------------

PAGE_OF_A_PROXY = "<html><head><title>502 Bad Gateway</title><meta charset=utf-8></head><body>" + "<p>nginx</p>" * 10_000
BAD = {
    "a page": Answer(200, PAGE_OF_A_PROXY),
    "a page with an error": Answer(502, PAGE_OF_A_PROXY),
    "nothing": Answer(200, ""),
    "nothing with an error": Answer(503, ""),
    "an error of another kind": Answer(500, '{"errors": [1]}'),
    "a page that nothing is at": Answer(404, "<html><body>404 Not Found</body>"),
    "half of it": Answer(200, '{"droplets": [{"id": 1, "na'),
    "a list": Answer(200, "[]"),
    "something else": Answer(200, '{"volumes": []}'),
    "other things": Answer(200, '{"droplets": [{"id": 1}], "sizes": [{}], "droplet": {}}'),
    "it ends in the middle": Answer(200, '{"droplets": [], "links": {}, "meta": {"total": 0}}', cut=True),
    "other bytes than it says": Answer(200, "no gzip", {"Content-Encoding": "gzip"}),
    "no number": Answer(429, '{"message": "wait"}', {"Retry-After": "soon"}),
}


@pytest.mark.parametrize("step", ["list", "create", "destroy", "image"])
@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_answer_is_told_in_a_few_words(cloud: FakeCloud, provider: HostProvider, step: str, bad: str) -> None:
    if step == "destroy":
        cloud.has(SPEC.name)
    cloud.instead[step] = BAD[bad]
    cloud.instead["images"] = BAD[bad]
    error = failure(CALLS["create" if step == "image" else step], provider)
    assert len(str(error)) < 1000
    assert cloud.created == []


@pytest.mark.parametrize("call", CALLS)
def test_a_cloud_that_nobody_answers_for_refuses(cloud: FakeCloud, provider: HostProvider, call: str) -> None:
    cloud.server.close()
    assert type(failure(CALLS[call], provider)) is ProviderFailed


def test_a_failure_tells_no_secret(cloud: FakeCloud, provider: HostProvider) -> None:
    """EC2's requests have all in their address, user data with a host's card, too, and libcloud's errors have the address."""
    cloud.has("database")
    cloud.last = cloud.steps_of_create[-2]
    error = failure(CALLS["create"], provider)
    assert tuple(cloud.steps) == cloud.steps_of_create[:-1]
    assert "refused" in str(error)
    for secret in (CARD[:20], base64.b64encode(b"#!/bin/sh").decode()[:10], "UserData", "Signature"):
        assert secret not in str(error)


@pytest.mark.parametrize("step", ["list", "create", "destroy"])
def test_a_cloud_that_never_answers_is_given_up(cloud: FakeCloud, tmp_path: Path, step: str) -> None:
    cloud.has(SPEC.name if step == "destroy" else "other")
    cloud.instead[step] = SILENCE
    begun = time.monotonic()
    error = failure(CALLS[step], provider_for(cloud, tmp_path, seconds=0.3))
    assert time.monotonic() - begun >= 0.3
    assert "imed out" in str(error)


def test_a_cloud_whose_identity_service_never_answers_is_given_up(tmp_path: Path) -> None:
    """OpenStack's driver asks for a token first, over a connection of its own."""
    server = Server(lambda asked: SILENCE)
    try:
        cloud = f"""provider = "cloud"
call_seconds = 0.3
[cloud]
driver = "openstack"
size = "m1"
image = "roq"
[cloud.arguments]
key = "roq"
secret = "s"
ex_force_auth_url = "http://{ADDRESS}:{server.port}"
ex_force_auth_version = "3.x_password"
ex_tenant_name = "queues"
"""
        path = tmp_path / "fleet.toml"
        path.write_text(cloud)
        path.chmod(0o600)
        assert "imed out" in str(failure(CALLS["list"], provider_of(load_fleet(path, {}), ADDRESS)))
    finally:
        server.close()
