"""Configuration: order of sources, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from roq.config import Config, CoordinatorConfig, GcmConfig, HcmConfig, load
from roq.errors import InvalidConfiguration


def test_defaults() -> None:
    config = load(GcmConfig, None, {}, {})
    assert (config.zookeeper, config.port, config.session_seconds) == ("127.0.0.1:2181", 0, 6.0)


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "gcm.toml"
    file.write_text('zookeeper = "a:1"\nport = 1001\nbroadcast_port = 1002\ncontrol_port = 1003\n')
    environment = {"ROQ_PORT": "2001", "ROQ_BROADCAST_PORT": "2002", "ROQ_UNRELATED": "x", "PORT": "9"}
    config = load(GcmConfig, file, environment, {"broadcast_port": 3002, "control_port": None})
    assert (config.zookeeper, config.port, config.broadcast_port, config.control_port) == ("a:1", 2001, 3002, 1003)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "prot"),
        ("port = 70000", "port"),
        ("port = ", "can't read"),
        ('session_seconds = "soon"', "session_seconds"),
        ('log_level = "loud"', "log_level"),
    ],
)
def test_wrong_file_is_refused_with_its_reason(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "gcm.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfiguration, match=reason):
        load(GcmConfig, file, {}, {})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="nowhere"):
        load(GcmConfig, tmp_path / "nowhere.toml", {}, {})


def test_wrong_environment_and_unknown_flag_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="port"):
        load(GcmConfig, None, {"ROQ_PORT": "many"}, {})
    with pytest.raises(InvalidConfiguration, match="colour"):
        load(GcmConfig, None, {}, {"colour": "red"})


def test_frozen() -> None:
    config = load(GcmConfig, None, {}, {})
    with pytest.raises(ValueError, match="frozen"):
        config.port = 7


@pytest.mark.parametrize(("program", "model"), [("gcm", GcmConfig), ("hcm", HcmConfig), ("roq.coordinator", CoordinatorConfig)])
def test_help_tells_every_default(program: str, model: type[Config]) -> None:
    done = subprocess.run([sys.executable, "-m", program, "--help"], capture_output=True, text=True, timeout=30, check=True)
    told = " ".join(done.stdout.partition("options:")[2].split())
    for name, field in model.model_fields.items():
        value = field.default
        if isinstance(value, bool) or value is None or value is PydanticUndefined or name in {"name", "process_module"}:
            continue  # in words, if at all
        entry = told.partition(f"--{name.replace('_', '-')} {name.upper()} ")[2].partition(" --")[0]
        shown = f"{value:.10g}" if isinstance(value, float) else f"{value}"
        assert f"default {shown}" in entry.replace("roq- coordinator", "roq-coordinator"), name
