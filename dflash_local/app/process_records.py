"""The processes of this user that hold models (engines, servers, pages), by what each wrote down when it began."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.kept import keep
from dflash_local.store.owner import Owner

STOP_S = 15.0  # a server gives replies a few seconds; then its memory is freed
PURPOSES = ("engine", "serve")  # files of the cache folder begin with these


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process.

    Attributes:
        address: the URL of a server, the socket of an engine. key: that an engine wants, in hexadecimal.
        folder: an engine's, with its socket and its log. model: a server's at its start. token: a server wants one.
    """

    owner: Owner
    address: str
    key: str = ""
    folder: str = ""
    model: str = ""
    token: bool = False

    @classmethod
    def from_line(cls, line: bytes | str) -> ProcessRecord:
        """Return what ``line`` gave. ValueError or TypeError: it is something else."""
        content = parse_json(line)
        record = cls(**{**content, "owner": Owner(**content["owner"])})
        if not isinstance(record.address, str):
            raise TypeError(f"{record.address!r} is no address")
        return record

    @property
    def line(self) -> str:
        """The record as JSON, with a line feed."""
        return json.dumps(asdict(self)) + "\n"

    @property
    def is_engine(self) -> bool:
        """True of an engine's process, False of a server."""
        return bool(self.key)

    def write(self, user: Settings) -> Path | None:
        """Let other commands find the process; None where nothing can be written."""
        if user.cache_dir is None:
            return None
        path = user.cache_dir / f"{self.owner.purpose}-{self.owner.token}.json"
        return path if keep(path, self.line) else None


def read_records(user: Settings) -> tuple[ProcessRecord, ...]:
    """Return those of processes that live; those of dead ones are removed with their folders.

    A server may be another container's, whose processes cannot be seen: its record is taken as it is.
    """
    from dflash_local.remote.endpoint import endpoint

    found = []
    for purpose in PURPOSES:
        for path in sorted(user.cache_dir.glob(f"{purpose}-*.json")) if user.cache_dir is not None else ():
            with suppress(OSError, ValueError, TypeError, LookupError, UsageError):
                record = ProcessRecord.from_line(path.read_text(encoding="utf-8"))
                if not record.is_engine:
                    endpoint(record.address)  # UsageError: it is no address
                state = record.owner.state
                if state == "alive" or (state == "unknown" and not record.is_engine):
                    found.append(record)
                elif state == "dead":
                    path.unlink()
                    if record.folder:
                        shutil.rmtree(record.folder, ignore_errors=True)
    return tuple(found)


@contextmanager
def recorded(user: Settings, url: str, model: str, token: bool = False) -> Iterator[None]:
    """Let other commands find this server within."""
    read_records(user)  # those of servers that were killed go
    path = ProcessRecord(Owner.me("serve"), url, model=model, token=token).write(user)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def stop_server(record: ProcessRecord) -> None:
    """End the process that wrote a record, in order, and wait until it is gone; at once where that takes too long.

    Raises:
        UsageError: it is another user's.
    """
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        if record.owner.state != "alive":
            return
        try:
            os.kill(record.owner.pid, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise UsageError(f"process {record.owner.pid} is another user's", "stop it as that user") from error
        until = time.monotonic() + STOP_S
        while record.owner.state == "alive" and time.monotonic() < until:  # its memory is free then
            time.sleep(0.05)
