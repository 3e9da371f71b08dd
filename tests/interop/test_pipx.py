"""`pipx install`, as the documents tell it: for one user, and for all of a host.

pipx comes from the index, into an environment of its own. Not covered: systemd (tests/failure/test_systemd.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.environments import INSTALL_SECONDS, Environment, Environments, copied_sources

pytestmark = pytest.mark.timeout(400)
PIPX = "pipx>=1.5"  # the first that knows --global


@pytest.fixture(scope="module")
def pipx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("pipx")
    environments = Environments(folder)
    made = environments.empty("with-pipx")
    environments.install(made, PIPX)
    copied_sources(folder / "clone")
    yield made
    shutil.rmtree(folder)


def put_and_worked(programs: Path, folder: Path) -> None:
    """A task goes through a folder by the commands that were installed."""
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}
    for command, shown in (
        (f"roq task put file://{folder}/tasks hello", ""),
        (f"roq task lease file://{folder}/tasks", "hello"),
    ):
        done = subprocess.run(
            command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, shown in done.stdout) == (0, True), done.stderr


def test_for_one_user(pipx: Environment, tmp_path: Path) -> None:
    variables = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    clone = pipx.folder.with_name("clone")
    done = pipx.run("pipx", "install", ".", cwd=clone, seconds=INSTALL_SECONDS, **variables)
    assert done.returncode == 0, done.stderr
    put_and_worked(tmp_path / "bin", tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs for everybody")
def test_for_all_of_a_host(pipx: Environment, tmp_path: Path) -> None:
    variables = {"PIPX_GLOBAL_HOME": str(tmp_path / "opt"), "PIPX_GLOBAL_BIN_DIR": str(tmp_path / "bin")}
    clone = pipx.folder.with_name("clone")
    done = pipx.run("pipx", "install", "--global", ".[metrics]", cwd=clone, seconds=INSTALL_SECONDS, **variables)
    assert done.returncode == 0, done.stderr
    assert {"roq", "roq-hcm", "roq-gcm"} <= {one.name for one in (tmp_path / "bin").iterdir()}
    put_and_worked(tmp_path / "bin", tmp_path)
    shown = subprocess.run([tmp_path / "bin" / "roq-hcm", "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, "--metrics" in shown.stdout) == (0, True), shown.stderr
