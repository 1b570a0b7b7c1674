"""Where figures come from: machine, versions, model folders; no names of hosts or users, so it can be published."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local import __version__
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError
from dflash_local.planner import hardware, software

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "accelerate", "bitsandbytes", "numpy")
CONFIGS = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file by name and size; ``sha256`` is of the whole config, or of a weight file's header."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """A model's folder or file: its name, its hub revision when its place records it, and what it holds."""

    name: str
    revision: str | None
    files: tuple[FileIdentity, ...]


def checkpoint_files(path: Path) -> dict[Path, int | None]:
    """The files that a checkpoint is read from, and how many bytes of each tell what it is; None: all of them."""
    configs = [path / name for name in CONFIGS if (path / name).is_file()]
    files: dict[Path, int | None] = {**dict.fromkeys(configs), **open_source(path).headers()}
    return dict(sorted(files.items()))


def checkpoint_identity(path: Path) -> CheckpointIdentity:
    """Digests of configs and of weight files' headers (names, shapes, offsets). CheckpointError: unreadable."""
    place = path.absolute()  # with its links: the cache's files are links to blobs without a name
    try:
        identities = tuple(
            FileIdentity(file.name, file.stat().st_size, _digest(file, header))
            for file, header in checkpoint_files(path).items()
        )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    folder = place.parent if path.is_file() else path.resolve()
    name, revision = f"{folder.parent.name}/{folder.name}", None
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):  # of the standard hub cache
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        revision = folder.name
    return CheckpointIdentity(f"{name}/{place.name}" if path.is_file() else name, revision, identities)


def _digest(file: Path, header: int | None) -> str:
    with file.open("rb") as stream:
        return hashlib.sha256(stream.read(header)).hexdigest()


def versions() -> dict[str, str | None]:
    """Python, this program (with its git commit in a checkout) and the libraries that decide numbers."""
    found = {name: software.version_of(name) for name in PACKAGES}
    revision = source_revision(Path(__file__).resolve().parents[2])
    return {"python": platform.python_version(), "dflash-local": __version__, "revision": revision, **found}


def source_revision(root: Path) -> str | None:
    """The commit checked out at ``root``; None outside a git checkout."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text(encoding="ascii").strip()
        packed = (git / "packed-refs").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)


def machine() -> dict[str, Any]:
    """System, processor, memory and accelerators."""
    torch = hardware.probe_torch()
    driver = hardware.nvidia_driver()
    return {
        "system": platform.platform(),
        "processor": hardware.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": hardware.memory().total,
        "gpus": [asdict(gpu) for gpu in torch.gpus] if torch else [],
        "cuda": torch.cuda if torch else None,
        "driver": driver.version if driver else None,
    }
