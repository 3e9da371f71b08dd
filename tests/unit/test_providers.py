"""Providers of hosts, without a cluster: the file that names one, a program, a cloud (libcloud's dummy), a provider that hangs.

With a cluster: tests/integration/test_fleet.py, tests/failure/test_fleet.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from libcloud.common.exceptions import BaseHTTPError
from libcloud.compute.providers import get_driver

from gcm.providers.calls import ProviderCalls
from gcm.providers.cloud import CloudProvider, cloud_driver, user_data
from gcm.providers.command import CommandProvider
from gcm.providers.means import fleet_means
from gcm.providers.provider import HostSpec, ProviderExhausted, ProviderFailed
from gcm.providers.settings import load_fleet, provider_of
from roq.config import GcmConfig
from roq.errors import InvalidConfiguration
from roq.runtime.security import CardFile
from roq.tools.authority import Authority
from tests.harness.documented import block

SPEC = HostSpec("roq-abc-7", "abc", {"ROQ_HOST": "roq-abc-7", "ROQ_ZOOKEEPER": "zk1:2181"}, b"a card\n")
FOLDER = """#!/bin/sh
set -eu
cd {folder}
case "$1" in
create) cat >"$2"; env >"$2.env" ;;
list) for each in *; do case "$each" in *.env) ;; roq-*) echo "$each running" ;; esac; done ;;
destroy) rm -f "$2" "$2.env" ;;
esac
"""


def program(path: Path, text: str) -> list[str]:
    path.write_text(text)
    path.chmod(0o700)
    return [str(path)]


# --- a program ---------------------------------------------------------------------------------------------------------


def test_a_program_makes_lists_and_destroys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROQ_CARD", "/of/the/gcm")
    folder = tmp_path / "machines"
    folder.mkdir()
    provider = CommandProvider(program(tmp_path / "p", FOLDER.format(folder=folder)), 10.0, {"TOKEN": "s3cret"})
    assert provider.names("abc") == []
    provider.create(SPEC)
    provider.create(SPEC)
    assert provider.names("abc") == ["roq-abc-7"]
    assert (folder / "roq-abc-7").read_bytes() == b"a card\n"
    environment = (folder / "roq-abc-7.env").read_text().splitlines()
    assert {"ROQ_FLEET_ID=abc", "ROQ_HOST=roq-abc-7", "ROQ_ZOOKEEPER=zk1:2181", "TOKEN=s3cret"} <= {*environment}
    assert "ROQ_CARD=/of/the/gcm" not in environment
    provider.destroy("roq-abc-7", "abc")
    provider.destroy("roq-abc-7", "abc")
    assert provider.names("abc") == []


@pytest.mark.parametrize(("code", "kind"), [(1, ProviderFailed), (75, ProviderExhausted)])
def test_a_program_that_fails_says_why(tmp_path: Path, code: int, kind: type[ProviderFailed]) -> None:
    provider = CommandProvider(program(tmp_path / "p", f"#!/bin/sh\necho no disk left >&2\nexit {code}\n"), 10.0, {})
    with pytest.raises(ProviderFailed, match=f"p create: exit code {code}: no disk left") as caught:
        provider.create(SPEC)
    assert type(caught.value) is kind


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    provider = CommandProvider(program(tmp_path / "p", f"#!/bin/sh\necho $$ >{tmp_path}/pid\nsleep 600\n"), 0.5, {})
    begun = time.monotonic()
    with pytest.raises(ProviderFailed, match=r"took longer than 0\.5 s"):
        provider.names("abc")
    assert time.monotonic() - begun < 5
    session = (tmp_path / "pid").read_text().strip()
    left = subprocess.run(["ps", "-o", "stat=", "-s", session], capture_output=True, text=True, check=False).stdout.split()
    assert not [state for state in left if state[0] != "Z"]


@pytest.mark.parametrize(("then", "says"), [("exit 0", "kept its output open"), ("sleep 600", "took longer than")])
def test_what_a_program_leaves_behind_does_not_hold_up_the_call(tmp_path: Path, then: str, says: str) -> None:
    """It is in a session of its own, and has the pipe."""
    text = f"#!/bin/sh\nsetsid sh -c 'echo $$ >{tmp_path}/pid; exec sleep 30' &\n{then}\n"
    provider = CommandProvider(program(tmp_path / "p", text), 1.0, {})
    begun = time.monotonic()
    with pytest.raises(ProviderFailed, match=says):
        provider.create(SPEC)
    assert time.monotonic() - begun < 10
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProviderFailed, match="No such file"):
        CommandProvider([str(tmp_path / "none")], 1.0, {}).names("abc")


# --- a cloud -----------------------------------------------------------------------------------------------------------


class Cloud:
    """libcloud's dummy, which has two nodes of somebody else's, made to obey names."""

    def __init__(self) -> None:
        self.driver = get_driver("dummy")(0)
        self.asked: list[dict[str, Any]] = []
        self._make = self.driver.create_node
        self.driver.create_node = self._create
        self.error: Exception | None = None

    def _create(self, name: str, **options: Any) -> Any:
        self.asked.append(options)
        if self.error is not None:
            raise self.error
        node = self._make(name=name, size=options["size"], image=options["image"])
        node.name = name
        return node

    def provider(self, size: str = "Small") -> CloudProvider:
        return CloudProvider(lambda: self.driver, size, "Ubuntu 9.10", "start it", "ex_userdata", {"ex_keyname": "ops"})

    def names(self) -> list[str]:
        return [node.name for node in self.driver.list_nodes()]


def test_a_cloud_makes_lists_and_destroys() -> None:
    cloud = Cloud()
    provider, others = cloud.provider(), cloud.names()
    provider.create(SPEC)
    provider.create(SPEC)
    assert provider.names("abc") == ["roq-abc-7"]
    assert len(cloud.asked) == 1
    assert cloud.asked[0]["ex_keyname"] == "ops"
    assert "ROQ_HOST=roq-abc-7" in cloud.asked[0]["ex_userdata"]
    assert provider.names("ab") == []
    for name in others:
        provider.destroy(name, "abc")
    provider.destroy("roq-abc-7", "ab")
    assert cloud.names() == [*others, "roq-abc-7"]
    provider.destroy("roq-abc-7", "abc")
    provider.destroy("roq-abc-7", "abc")
    assert cloud.names() == others


def test_a_cloud_that_made_it_twice_lists_and_destroys_both() -> None:
    cloud = Cloud()
    cloud.provider().create(SPEC)
    cloud.driver.create_node(name=SPEC.name, size=cloud.driver.list_sizes()[0], image=cloud.driver.list_images()[0])
    assert cloud.provider().names("abc") == ["roq-abc-7"] * 2
    cloud.provider().destroy(SPEC.name, "abc")
    assert cloud.provider().names("abc") == []


def test_an_image_is_asked_for_by_its_id_and_only_a_name_is_looked_for() -> None:
    cloud = Cloud()
    images, listed = {one.id: one for one in cloud.driver.list_images()}, cloud.driver.list_images

    def get_image(id: str) -> Any:
        if id not in images:
            raise BaseHTTPError(400, "InvalidAMIID.Malformed")
        return images[id]

    def list_images() -> Any:
        raise AssertionError("of all customers")

    cloud.driver.get_image, cloud.driver.list_images = get_image, list_images
    CloudProvider(lambda: cloud.driver, "Small", "1", "start it", "", {}).create(SPEC)
    assert cloud.provider().names("abc") == [SPEC.name]
    cloud.provider().destroy(SPEC.name, "abc")
    cloud.driver.list_images = listed
    cloud.provider().create(SPEC)
    assert cloud.asked[1]["image"].name == "Ubuntu 9.10"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BaseHTTPError(400, "InstanceLimitExceeded: you have requested more"), ProviderExhausted),
        (BaseHTTPError(403, "Quota 'CPUS' exceeded"), ProviderExhausted),
        (BaseHTTPError(500, "internal"), ProviderFailed),
        (OSError("connection refused"), ProviderFailed),
    ],
)
def test_a_cloud_that_refuses(error: Exception, kind: type[ProviderFailed]) -> None:
    cloud = Cloud()
    cloud.error = error
    with pytest.raises(ProviderFailed) as caught:
        cloud.provider().create(SPEC)
    assert type(caught.value) is kind


def test_a_cloud_without_that_size_or_driver() -> None:
    with pytest.raises(ProviderFailed, match="has no 'Tiny'"):
        Cloud().provider("Tiny").create(SPEC)
    with pytest.raises(InvalidConfiguration, match="knows no driver 'nocloud'"):
        cloud_driver("nocloud", {}, 10.0)


def test_the_script_of_a_new_machine(tmp_path: Path) -> None:
    """It is shell, and what it writes is shell: a value with blanks and quotes survives both."""
    spec = HostSpec("roq-abc-7", "abc", {"ROQ_HOST": "roq-abc-7", "ROQ_LOG_PATH": "/a b/it's.log"}, b"\x00card'\n")
    script = user_data(spec, f'. {tmp_path}/hcm.env; echo "$ROQ_LOG_PATH $ROQ_CARD"').replace("/etc/roq", str(tmp_path))
    ran = subprocess.run(["sh"], input=script, capture_output=True, text=True, check=True)
    assert ran.stdout == f"/a b/it's.log {tmp_path}/host.card\n"
    assert (tmp_path / "host.card").read_bytes() == b"\x00card'\n"
    assert (tmp_path / "host.card").stat().st_mode & 0o077 == 0


# --- one that hangs ----------------------------------------------------------------------------------------------------


class Hanging:
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[str] = []

    def create(self, spec: HostSpec) -> None:
        self.calls.append(f"create {spec.name}")
        self.go.wait(10)

    def names(self, fleet: str) -> list[str]:
        return ["roq-abc-1"]

    def destroy(self, name: str, fleet: str) -> None:
        self.calls.append(f"destroy {name}")


async def test_a_provider_that_hangs_holds_up_nobody_but_the_same_machine() -> None:
    provider = Hanging()
    calls = ProviderCalls(provider, 1.5)
    with pytest.raises(ProviderFailed, match=r"creating roq-abc-7: the provider did not answer within 1\.5 s"):
        await calls.create(SPEC)
    assert await calls.names("abc") == ["roq-abc-1"]
    await calls.destroy("roq-abc-8", "abc")
    with pytest.raises(ProviderFailed, match="did not answer"):
        await calls.destroy(SPEC.name, "abc")  # behind the creation, which may still come
    assert provider.calls == ["create roq-abc-7", "destroy roq-abc-8"]
    destroying = asyncio.ensure_future(calls.destroy(SPEC.name, "abc"))
    provider.go.set()
    await destroying
    assert provider.calls[-1] == "destroy roq-abc-7"


async def test_what_a_library_raises_is_told() -> None:
    class Broken(Hanging):
        def names(self, fleet: str) -> list[str]:
            raise KeyError("InstanceId")

    with pytest.raises(ProviderFailed, match="KeyError: 'InstanceId'"):
        await ProviderCalls(Broken(), 1.0).names("abc")


# --- the file ----------------------------------------------------------------------------------------------------------


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_file_of_a_program(tmp_path: Path) -> None:
    text = 'provider = "command"\n[command]\nprogram = ["/bin/p", "-v"]\nenvironment = { TOKEN = "$SECRET", ZONE = "a" }\n'
    config = load_fleet(written(tmp_path / "fleet.toml", text), {"SECRET": "s3cret\n"})
    assert config.command is not None
    assert config.command.environment == {"TOKEN": "s3cret", "ZONE": "a"}
    assert isinstance(provider_of(config, "127.0.0.1"), CommandProvider)
    with pytest.raises(InvalidConfiguration, match=r"\$SECRET, which is not set"):
        load_fleet(tmp_path / "fleet.toml", {})


def test_the_document_s_files(tmp_path: Path) -> None:
    environment = {"EC2_KEY": "k", "EC2_SECRET": "s", "MACHINES_TOKEN": "t"}
    for number, provider in enumerate(("docker", "cloud", "command"), 1):
        text = block("docs/elasticity.md", "Say where from", number)
        config = load_fleet(written(tmp_path / "fleet.toml", text), environment)
        assert config.provider == provider
        assert provider_of(config, "127.0.0.1")
    assert config.command is not None
    assert config.command.environment == {"TOKEN": "t"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('provider = "docker"\n', r"needs a table \[docker\]"),
        ('provider = "aws"\n', "provider: "),
        ('provider = "docker"\nsize = 3\n[docker]\nnetwork = "n"\n', "size: "),
        ('provider = "docker"\ncards = "a"\nauthority = "b"\n[docker]\nnetwork = "n"\n', "not both"),
        ('provider = "docker"\nenvironment = { AWS_KEY = "x" }\n[docker]\nnetwork = "n"\n', "AWS_KEY"),
        ("provider = \n", "can't read"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        load_fleet(written(tmp_path / "fleet.toml", text), {})


def test_a_file_that_others_may_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="chmod 600"):
        load_fleet(written(tmp_path / "fleet.toml", 'provider = "process"\n', 0o644), {})


def means_of(tmp_path: Path, more: str, **config: Any) -> Any:
    path = written(tmp_path / "fleet.toml", f'provider = "process"\n{more}\n[process]\ndirectory = "{tmp_path}"\n')
    return fleet_means(GcmConfig(fleet=path, zookeeper="zk1:2181", session_seconds=4.0, **config))


def test_what_a_host_is_told(tmp_path: Path) -> None:
    means = means_of(tmp_path, 'exchanges_max = 3\nenvironment = { ROQ_METRICS = ":9464" }', security="none")
    spec = means.spec("roq-abc-7", "abc")
    assert spec.environment == {
        "ROQ_ZOOKEEPER": "zk1:2181",
        "ROQ_EXCHANGES_MAX": "3",
        "ROQ_SESSION_SECONDS": "4",
        "ROQ_SECURITY": "none",
        "ROQ_METRICS": ":9464",
        "ROQ_HOST": "roq-abc-7",
    }
    assert spec.card == b""
    assert fleet_means(GcmConfig()) is None
    with pytest.raises(InvalidConfiguration, match="need cards"):
        means_of(tmp_path, "")


def test_a_host_has_the_card_that_lies_ready(tmp_path: Path) -> None:
    means = means_of(tmp_path, f'cards = "{tmp_path}"')
    with pytest.raises(ProviderFailed, match=r"no card for roq-abc-7: `roq ca sign host roq-abc-7 .*roq-abc-7\.card`"):
        means.spec("roq-abc-7", "abc")
    (tmp_path / "roq-abc-7.card").write_bytes(b"signed")
    spec = means.spec("roq-abc-7", "abc")
    assert spec.card == b"signed"
    assert "signed" not in repr(spec)
    assert "ROQ_SECURITY" not in spec.environment


def test_or_the_authority_makes_one(tmp_path: Path) -> None:
    Authority.init(tmp_path / "authority.json")
    means = means_of(tmp_path, f'authority = "{tmp_path}/authority.json"')
    card = msgspec.json.decode(means.spec("roq-abc-7", "abc").card, type=CardFile)
    assert card.servers
    assert os.stat(tmp_path / "authority.json").st_mode & 0o077 == 0


def test_an_authority_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    Authority.init(tmp_path / "authority.json")
    (tmp_path / "authority.json.lock").unlink(missing_ok=True)
    (tmp_path / "authority.json.lock").mkdir()
    means = means_of(tmp_path, f'authority = "{tmp_path}/authority.json"')
    with pytest.raises(ProviderFailed, match=r"no card for roq-abc-7: .*must be able to write .*authority\.json"):
        means.spec("roq-abc-7", "abc")
