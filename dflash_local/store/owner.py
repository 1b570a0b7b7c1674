"""The process behind a lock, as a record that outlives it: is it still alive, dead, or out of our sight?"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from dflash_local.json_text import parse_json
from dflash_local.store.atomic import FILE_MODE

State = Literal["alive", "dead", "unknown"]
MAX_BYTES = 4096
HIDDEN = "hidden"  # there, but another user's
BOOT_TOLERANCE_S = 60.0  # a boot time read off the clock moves with the clock


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of some machine: ``started`` distinguishes it from a later one with the same id.

    ``boot`` names the machine's current run, ``space`` the namespace its ids are counted in.
    """

    pid: int
    started: str
    boot: str
    space: str
    host: str
    purpose: str
    token: str

    @classmethod
    def me(cls, purpose: str) -> Owner:
        """This process, with a token of its own for every lock."""
        pid = os.getpid()
        return cls(pid, started(pid) or "", _boot(), _space(), socket.gethostname(), purpose, secrets.token_hex(6))

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """The record in a file; None when there is none, or none that makes sense."""
        try:
            with path.open("rb") as file:
                owner = cls(**parse_json(file.read(MAX_BYTES)))
        except (OSError, ValueError, TypeError):
            return None
        texts = [owner.started, owner.boot, owner.space, owner.host, owner.purpose, owner.token]
        right = type(owner.pid) is int and owner.pid > 0 and all(type(text) is str for text in texts)
        return owner if right else None

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def write_new(self, path: Path) -> None:
        """Write the record into a file that must not exist. Raises FileExistsError, OSError."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            file.write(self.encoded())

    @property
    def near(self) -> bool:
        """True when the process ran under the kernel of this one, so that their locks meet."""
        return _same_boot(self.boot, _boot())

    @property
    def state(self) -> State:
        """Whether the process lives; unknown for another machine's or container's."""
        here = self.host == socket.gethostname()
        if not self.near:
            return "dead" if here else "unknown"
        if not here or self.space != _space():
            return "unknown"
        return "alive" if started(self.pid) in (self.started, HIDDEN) else "dead"


@cache
def _boot() -> str:
    """What changes with every start of the machine: Linux's boot id, elsewhere the time of the start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        import psutil

        return f"{psutil.boot_time():.0f}"


def _same_boot(one: str, other: str) -> bool:
    try:
        return abs(float(one) - float(other)) < BOOT_TOLERANCE_S
    except ValueError:
        return one == other


@cache
def _space() -> str:
    """The namespace of process ids: containers of one machine may count their own. Empty elsewhere."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started(pid: int) -> str | None:
    """When a process began; None when it is gone or a zombie."""
    try:
        # The name in brackets may hold anything, brackets too; state and start follow the last one.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else fields[19].decode()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError):
        return None
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return HIDDEN
