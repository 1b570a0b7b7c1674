"""The process behind a record of ours: is it still alive, dead, or out of our sight?"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from functools import cache
from typing import Literal

State = Literal["alive", "dead", "unknown"]
TOLERANCE_S = 60.0  # start times are told by the clock, which may be set


@dataclass(frozen=True, slots=True)
class Owner:
    """Names a process of some machine.

    Attributes:
        started: seconds since the epoch; tells it from a later process with the same id.
        space: the namespace its ids are counted in: containers of one machine may count their own.
        token: of its own for every record.
    """

    pid: int
    started: float
    host: str
    space: str
    purpose: str
    token: str

    @classmethod
    def me(cls, purpose: str) -> Owner:
        pid = os.getpid()
        return cls(pid, started(pid) or 0.0, socket.gethostname(), _space(), purpose, secrets.token_hex(6))

    @property
    def state(self) -> State:
        """Say whether the process lives; unknown for another machine's or container's. TypeError: no sane record."""
        if (self.host, self.space) != (socket.gethostname(), _space()):
            return "unknown"
        now = started(self.pid)
        return "alive" if now is not None and abs(now - self.started) < TOLERANCE_S else "dead"


@cache
def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started(pid: int) -> float | None:
    """Return when a process began, in seconds since the epoch; None when it is gone or a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (psutil.NoSuchProcess, ValueError):
        return None
