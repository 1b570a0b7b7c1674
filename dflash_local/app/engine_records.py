"""The engine's processes of this user: what each wrote down when it began, for other commands to find it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.kept import keep
from dflash_local.store.owner import Owner

FILES = "engine-*.json"  # in the cache folder


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Where a process listens, the key that it wants in hexadecimal, and its folder with the socket and a log."""

    owner: Owner
    address: str
    key: str
    folder: str

    @classmethod
    def from_line(cls, line: bytes | str) -> EngineRecord:
        """What ``line`` gave. ValueError or TypeError: it is something else."""
        content = parse_json(line)
        return cls(**{**content, "owner": Owner(**content["owner"])})

    @property
    def line(self) -> str:
        """As JSON, with a line feed."""
        return json.dumps(asdict(self)) + "\n"

    def write(self, user: Settings) -> Path | None:
        """Let other commands find the process; None where nothing can be written."""
        if user.cache_dir is None:
            return None
        path = user.cache_dir / FILES.replace("*", self.owner.token)
        return path if keep(path, self.line) else None


def read_records(user: Settings) -> tuple[EngineRecord, ...]:
    """Those of processes that live on this machine; those of dead ones are removed with their folders."""
    found = []
    for path in sorted(user.cache_dir.glob(FILES)) if user.cache_dir is not None else ():
        with suppress(OSError, ValueError, TypeError, LookupError):
            record = EngineRecord.from_line(path.read_text(encoding="utf-8"))
            if record.owner.state == "alive":
                found.append(record)
            elif record.owner.state == "dead":
                path.unlink()
                shutil.rmtree(record.folder, ignore_errors=True)
    return tuple(found)
