"""RoQ's image as users run it: small, as nobody in particular, on a root file system that can't be written; its entry point."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.quick
SIZE_MAX = 150_000_000  # bytes
SECONDS = 30.0  # a daemon starts, ends, is found healthy or not, on two busy cores
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
BUILD_TOOLS = ("gcc", "cc", "ld", "make", "pip", "apt-get", "dpkg", "perl")


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def roq_image(image: str) -> str:
    """Its name. Made with the image for tests."""
    return docker("image", "inspect", "--format", "{{.Id}}", "roq:latest").stdout.strip()


@pytest.fixture
def start(roq_image: str) -> Iterator[Callable[..., str]]:
    """Starts a hardened container; its name."""
    names: list[str] = []

    def run(*command: str, options: tuple[str, ...] = ()) -> str:
        names.append(f"roq-image-{uuid.uuid4().hex[:8]}")
        docker("run", "--detach", "--name", names[-1], *HARDENED, *options, roq_image, *command)
        return names[-1]

    yield run
    for name in names:
        docker("rm", "--force", "--volumes", name)


def run(roq_image: str, *command: str) -> str:
    return docker("run", "--rm", "--network", "none", *HARDENED, roq_image, *command).stdout


def until(true: Callable[[], bool], what: str) -> None:
    """What is seen only from outside the container has to be asked again and again."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, f"not so after {SECONDS:g} s: {what}"
        time.sleep(0.1)


def test_it_is_small_and_has_no_tools_to_build_with(roq_image: str) -> None:
    found = json.loads(docker("image", "inspect", roq_image).stdout)[0]
    assert found["Size"] < SIZE_MAX
    assert found["Config"]["User"] == "550:550"
    labels = found["Config"]["Labels"]
    version = run(roq_image, "roq", "--version").strip()
    assert (labels["org.opencontainers.image.title"], labels["org.opencontainers.image.version"]) == ("RoQ", version)
    assert run(roq_image, "sh", "-c", f"command -v {' '.join(BUILD_TOOLS)} || true") == ""


def test_one_entry_point_for_all_programs_and_nothing_to_write_but_its_folders(roq_image: str) -> None:
    assert "Usage: roq " in run(roq_image)
    for daemon in ("roq-gcm", "roq-hcm"):
        assert f"usage: {daemon} " in run(roq_image, daemon, "--help")
    code = "import pathlib, roq, gcm, hcm, prometheus_client\nfor place in ('/tmp/x', '/x', '/opt/roq/x'):\n    try:\n"
    code += (
        "        pathlib.Path(place).touch()\n        print(place)\n    except OSError as error:\n        print(error.strerror)"
    )
    told = run(roq_image, "python3", "-c", code).splitlines()
    assert told == ["/tmp/x", "Read-only file system", "Read-only file system"]


def test_a_daemon_that_can_t_start_ends_the_container_and_says_why(roq_image: str) -> None:
    done = docker("run", "--rm", "--network", "none", *HARDENED, roq_image, "roq-hcm", check=False)
    assert done.returncode == 2
    assert "no card" in done.stderr


def test_a_host_is_healthy_until_its_hcm_hangs_and_a_killed_one_is_started_again(start: Callable[..., str]) -> None:
    """ZooKeeper is away all the time: that is no reason to end a host's container."""
    options = ("--network", "none", "--tmpfs", "/data:uid=550,gid=550,mode=700", "--env", "ROQ_SECURITY=none")
    name = start("roq-hcm", "--zookeeper", "127.0.0.1:1", options=options)

    def healthy() -> bool:
        return docker("exec", name, "healthy", check=False).returncode == 0

    def hcm() -> str:
        script = 'for one in /proc/[0-9]*; do [ "$(cat $one/comm)" = roq-hcm ] && basename $one; done; true'
        return docker("exec", name, "sh", "-c", script, check=False).stdout.strip()

    until(lambda: bool(hcm()) and healthy(), "healthy")
    before = hcm()
    docker("exec", name, "sh", "-c", f"kill -STOP {before}")
    assert not healthy()
    docker("exec", name, "sh", "-c", f"kill -KILL {before}")
    until(lambda: hcm() not in ("", before) and healthy(), "another HCM is healthy")
    began = time.monotonic()
    docker("stop", "--time", str(int(SECONDS)), name)
    assert time.monotonic() - began < SECONDS / 2
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0"
