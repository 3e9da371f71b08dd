"""`roq host install`: what is written, what is kept, what is refused. On a real systemd: tests/failure/test_systemd.py."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from roq.cli import host as host_commands
from roq.cli.host import files, own_address, program_directory
from roq.cli.main import app
from roq.config import GcmConfig, HcmConfig, load
from roq.errors import CallError, InvalidConfiguration, InvalidName
from roq.runtime.run import EXIT_FOR_GOOD
from roq.wire.card import SecurityMode

ZOOKEEPER = "127.0.0.1:2181"
EXPOSURE_MAX = 3.0
UNITS = ("etc/systemd/system/roq-hcm.service", "etc/systemd/system/roq-gcm.service")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with console scripts, of which `roq` runs."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("roq", "roq-gcm", "roq-hcm"):
        (place / name).write_text("#!/bin/sh\n")
        (place / name).chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(place / "roq")])
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(place))
    return place


def install(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["host", "install", "--zookeeper", ZOOKEEPER, *arguments])


def unit(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser["Service"]


def test_a_host_with_a_gcm(tmp_path: Path, programs: Path) -> None:
    root = tmp_path / "root"
    result = install("--gcm", "--prefix", str(root), "--host", "h7", "--address", "192.0.2.7", "--user", "messages")
    assert result.exit_code == 0, result.output
    for name, path in zip(("hcm", "gcm"), UNITS, strict=True):
        service = unit(root / path)
        assert service["ExecStart"] == f"{programs}/roq-{name} --config /etc/roq/{name}.toml"
        assert (service["User"], service["Type"], service["Restart"]) == ("messages", "notify", "always")
        assert re.search("@[a-z]+@", (root / path).read_text()) is None
    assert unit(root / UNITS[0])["KillMode"] == "process"
    assert unit(root / UNITS[0])["RestartPreventExitStatus"] == str(EXIT_FOR_GOOD)
    hcm = load(HcmConfig, root / "etc/roq/hcm.toml", {}, {})
    gcm = load(GcmConfig, root / "etc/roq/gcm.toml", {}, {})
    assert (hcm.host, hcm.address, gcm.address) == ("h7", "192.0.2.7", "192.0.2.7")
    assert hcm.zookeeper == gcm.zookeeper == f"{ZOOKEEPER}/RoQ"
    assert hcm.state_dir == Path("/var/lib/roq")
    assert (hcm.card, hcm.security) == (Path("/etc/roq/hcm.card"), "cards")
    assert gcm.card == Path("/etc/roq/gcm.card")
    assert 0 not in (hcm.port, gcm.port, gcm.broadcast_port), "fixed ones"
    assert (root / "etc/sysusers.d/roq.conf").read_text().split()[:2] == ["u", "messages"]


def test_a_hung_hcm_is_replaced_before_its_session_ends(tmp_path: Path, programs: Path) -> None:
    assert install("--prefix", str(tmp_path)).exit_code == 0
    service = unit(tmp_path / UNITS[0])
    assert float(service["WatchdogSec"]) < HcmConfig().session_seconds


def test_without_gcm_there_is_none(tmp_path: Path, programs: Path) -> None:
    assert install("--prefix", str(tmp_path)).exit_code == 0
    assert (tmp_path / UNITS[0]).exists()
    assert not (tmp_path / UNITS[1]).exists()
    assert not (tmp_path / "etc/roq/gcm.toml").exists()


def test_a_configuration_is_kept_unless_forced(tmp_path: Path, programs: Path) -> None:
    assert install("--prefix", str(tmp_path), "--host", "one").exit_code == 0
    config, first = tmp_path / "etc/roq/hcm.toml", tmp_path / UNITS[0]
    first.write_text("old")
    again = install("--prefix", str(tmp_path), "--host", "two")
    assert f"kept {config}" in again.stderr
    assert load(HcmConfig, config, {}, {}).host == "one"
    assert first.read_text() != "old", "units are written anew"
    assert install("--prefix", str(tmp_path), "--host", "two", "--force").exit_code == 0
    assert load(HcmConfig, config, {}, {}).host == "two"


def test_no_security_must_be_said(tmp_path: Path, programs: Path) -> None:
    assert install("--prefix", str(tmp_path), "--security", "none").exit_code == 0
    hcm = load(HcmConfig, tmp_path / "etc/roq/hcm.toml", {}, {})
    assert (hcm.card, hcm.security) == (None, "none")


def test_on_the_way_to_cards_both_are_said(tmp_path: Path, programs: Path) -> None:
    assert install("--prefix", str(tmp_path), "--security", "mixed").exit_code == 0
    hcm = load(HcmConfig, tmp_path / "etc/roq/hcm.toml", {}, {})
    assert (hcm.card, hcm.security) == (Path("/etc/roq/hcm.card"), "mixed")
    again = install("--prefix", str(tmp_path))
    assert 'its security differs, card = "/etc/roq/hcm.card" was asked for' in " ".join(again.stderr.split())


def test_metrics_are_served_where_that_is_asked_for(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "etc/roq/hcm.toml"
    assert install("--gcm", "--prefix", str(tmp_path)).exit_code == 0
    assert load(HcmConfig, config, {}, {}).metrics is None
    kept = install("--prefix", str(tmp_path), "--metrics", ":9464")
    assert 'its metrics differ, metrics = ":9464" was asked for' in " ".join(kept.stderr.split())
    assert install("--gcm", "--prefix", str(tmp_path), "--metrics", ":9464", "--force").exit_code == 0
    assert load(HcmConfig, config, {}, {}).metrics == ":9464"
    load(GcmConfig, tmp_path / "etc/roq/gcm.toml", {}, {})
    wrong = install("--prefix", str(tmp_path), "--metrics", "9464")
    assert (wrong.exit_code, "--metrics is [HOST]:PORT, got '9464'" in wrong.stderr) == (1, True)
    monkeypatch.setattr(host_commands, "missing", lambda extra: ["prometheus_client"])
    refused = install("--metrics", ":9464")
    assert refused.exit_code == 1
    assert 'nothing was written: pip install "roq-messaging[metrics]"' in " ".join(refused.stderr.split())


def test_nothing_is_started_without_a_card(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    result = install("--enable", "--host", "h7")
    assert result.exit_code == 1
    assert (
        "no card at /etc/roq/hcm.card, nothing was written. Make it by `roq ca sign host h7 hcm.card`"
        in result.stderr.replace("\n", " ")
    )


def test_dry_run_prints_and_writes_nothing(tmp_path: Path, programs: Path) -> None:
    result = install("--gcm", "--dry-run", "--prefix", str(tmp_path / "root"))
    assert result.exit_code == 0
    assert "ExecStart=" in result.stdout
    assert 'host = "' in result.stdout
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("flags", [("--enable", "--dry-run"), ("--enable", "--prefix", "/nowhere")])
def test_enable_is_for_this_host_only(programs: Path, flags: tuple[str, ...]) -> None:
    result = install(*flags)
    assert result.exit_code == 1
    assert "not with --prefix" in result.stderr


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--host", "a/b"), InvalidName),
        (("--user", "no body"), InvalidConfiguration),
        (("--zookeeper", "zk:port"), InvalidConfiguration),
        (("--zookeeper", "no-such-host.invalid:2181"), InvalidConfiguration),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(
    tmp_path: Path, programs: Path, flags: tuple[str, ...], error: type[CallError]
) -> None:
    result = install("--prefix", str(tmp_path / "root"), *flags)
    assert result.exit_code == 1
    assert error.__name__ in result.stderr
    assert not (tmp_path / "root").exists()


def test_names_are_quoted(tmp_path: Path) -> None:
    place = tmp_path / 'a "b" 50%'
    made = files(
        zookeeper=ZOOKEEPER,
        host='quo"ted\\',
        address="::1",
        user="roq",
        programs=place,
        prefix=tmp_path,
        gcm=False,
        new_user=False,
        security=SecurityMode.CARDS,
    )
    for file in made:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text)
    assert load(HcmConfig, tmp_path / "etc/roq/hcm.toml", {}, {}).host == 'quo"ted\\'
    quoted = f'"{tmp_path}/a \\"b\\" 50%%/roq-hcm"'
    assert unit(tmp_path / UNITS[0])["ExecStart"] == f"{quoted} --config /etc/roq/hcm.toml"


def test_the_address_is_the_one_zookeeper_is_reached_with() -> None:
    assert own_address("127.0.0.5:2181") == "127.0.0.1"


def test_a_bare_source_tree_has_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "roq")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(InvalidConfiguration, match="pip"):
        program_directory()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong(tmp_path: Path, programs: Path) -> None:
    assert install("--gcm", "--prefix", str(tmp_path), "--user", "root").exit_code == 0
    paths = [str(tmp_path / path) for path in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False, timeout=30)
    told = [line for line in done.stderr.splitlines() if "roq-" in line]
    assert done.returncode == 0, done.stderr
    assert not told


def test_without_systemd_nothing_is_written(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(host_commands, "_write", lambda file, *, force: written.append(file.path))
    monkeypatch.setenv("PATH", str(programs))
    result = install("--enable", "--host", "h7", "--address", "192.0.2.7")
    assert (result.exit_code, written) == (1, [])
    assert "this host has no systemd" in result.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", UNITS)
def test_units_have_little_of_the_machine(unit: str, tmp_path: Path, programs: Path) -> None:
    """systemd's own judgement: 0 is a process without any right, 10 one that may do everything."""
    assert install("--gcm", "--prefix", str(tmp_path)).exit_code == 0
    command = ["systemd-analyze", "security", "--offline=true", str(tmp_path / unit)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", told)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE_MAX
