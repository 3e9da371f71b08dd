"""What a test needs that becomes another user. Not covered: becoming one, which takes root."""

from __future__ import annotations

import tempfile
from pathlib import Path


def let_others_in(folder: Path) -> None:
    """Others may read `folder` and come as far as it, wherever below the folder for temporary files pytest has put it."""
    temporary = Path(tempfile.gettempdir()).resolve()
    for path in (folder, *folder.parents):
        if temporary in path.parents:
            path.chmod(0o755)
