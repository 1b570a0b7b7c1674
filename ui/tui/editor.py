"""A message written in the user's own editor."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

from dflash_local import settings

if TYPE_CHECKING:
    from textual.app import App


def edited(app: App[object], text: str) -> str | None:
    """What the editor left of ``text``; None when there is no editor, or none can be shown here."""
    environ = settings.load().environ
    command = shlex.split(environ.get("VISUAL") or environ.get("EDITOR") or "")
    if not command:
        return None
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            with app.suspend():
                done = subprocess.run([*command, str(file)], check=False)
        except (OSError, SuspendNotSupported):
            return None
        return file.read_text(encoding="utf-8", errors="replace").rstrip("\n") if done.returncode == 0 else text
