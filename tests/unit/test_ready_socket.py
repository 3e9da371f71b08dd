"""Where the children of a host say that they are ready, if the path of its directory is too long for a socket."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hcm.children import _ready_path
from roq.errors import InvalidConfiguration

TOO_LONG = Path("/srv") / ("long" * 40)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_short_path_is_used_and_nothing_is_made(temporary: Path) -> None:
    assert _ready_path(Path("/srv/host-1")) == "/srv/host-1/ready.sock"
    assert not list(temporary.iterdir())


def test_a_long_one_has_a_directory_of_its_own(temporary: Path) -> None:
    place = Path(_ready_path(TOO_LONG))
    assert place.parent.parent == temporary
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert _ready_path(TOO_LONG) == str(place), "an HCM that comes back takes the same"
    assert _ready_path(TOO_LONG / "other") != str(place)


@pytest.mark.parametrize("kind", ["readable by others", "a link", "a file", "somebody else's"])
def test_what_is_not_ours_alone_is_refused(temporary: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(_ready_path(TOO_LONG)).parent
    if kind == "readable by others":
        place.chmod(0o755)
    elif kind == "somebody else's":
        monkeypatch.setattr(os, "geteuid", lambda: os.stat(place).st_uid + 1)
    else:
        place.rmdir()
        place.symlink_to(temporary / "elsewhere") if kind == "a link" else place.write_text("")
    with pytest.raises(InvalidConfiguration, match="is not ours alone: remove it, or use a shorter path"):
        _ready_path(TOO_LONG)
