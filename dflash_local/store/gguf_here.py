"""GGUF files that other programs left on this disk: names and sizes, by listing folders; no file of them is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_local.json_text import parse_json
from dflash_local.settings import Settings

MAX_FILES = 500  # of one folder of a program
MAX_DEPTH = 5  # folders below it
MAX_MANIFEST = 1 << 20  # bytes
SUFFIX = ".gguf"
BESIDE = ("mmproj",)  # what such files begin with that hold no text model
MODEL_LAYER = "application/vnd.ollama.image.model"
OLLAMA, LIBRARY = "registry.ollama.ai", "library"  # what its names leave out
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class GgufHere:
    """Describes a GGUF model on this disk.

    Attributes:
        path: what commands take as MODEL; the first of several that one was split into. size: of all of them, in bytes.
        program: that keeps it.
    """

    path: Path
    name: str
    size: int
    program: str


def gguf_here(user: Settings) -> tuple[GgufHere, ...]:
    """List all of them, each once; what cannot be read is left out."""
    others = user.others
    found = [*_listed("LM Studio", others.lm_studio), *_listed("llama.cpp", others.llama_cpp)]
    found += _listed("Hugging Face cache", (user.hub.cache,) if user.hub.cache else (), "models--")
    found += [one for folder in others.ollama for one in islice(_of_ollama(folder), MAX_FILES)]
    return tuple({os.path.realpath(one.path): one for one in reversed(found)}.values())[::-1]


def _listed(program: str, folders: tuple[Path, ...], prefix: str = "") -> list[GgufHere]:
    found = []
    for folder in folders:
        paths = islice(_files_below(folder, prefix), MAX_FILES)
        found += [GgufHere(path, path.name.removesuffix(SUFFIX), size, program) for path, size in _joined(paths)]
    return found


def _files_below(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield GGUF files, by name; only below folders that begin with ``prefix``."""
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if depth or name.startswith(prefix)) if depth < MAX_DEPTH else []
        for name in sorted(names):
            if name.lower().endswith(SUFFIX) and not name.lower().startswith(BESIDE):
                yield Path(place, name)


def _joined(paths: Iterator[Path]) -> Iterator[tuple[Path, int]]:
    """Yield each model's first file with the bytes of all its parts."""
    sizes: dict[Path, int] = {}
    for path in paths:
        try:
            size = path.stat().st_size
        except OSError:  # a link whose file is gone
            continue
        part = _PART.search(path.name)
        first = path if part is None else path.with_name(f"{path.name[: part.start()]}-00001-of-{part[2]}{SUFFIX}")
        sizes[first] = sizes.get(first, 0) + size
    yield from ((first, size) for first, size in sizes.items() if first.is_file())


def _of_ollama(folder: Path) -> Iterator[GgufHere]:
    """Yield the models whose manifests are there, and whose blobs are."""
    root = folder / "manifests"
    for place, folders, names in os.walk(root):
        parts = Path(place).relative_to(root).parts
        folders[:] = sorted(folders) if len(parts) < MAX_DEPTH else []
        for tag in sorted(names) if len(parts) > 1 else ():
            blob = _model_blob(Path(place, tag), folder / "blobs")
            try:
                size = blob.stat().st_size if blob is not None else 0
            except OSError:
                continue
            if blob is not None:
                named = [part for at, part in enumerate(parts) if (at, part) not in ((0, OLLAMA), (1, LIBRARY))]
                yield GgufHere(blob, f"{'/'.join(named)}:{tag}", size, "ollama")


def _model_blob(manifest: Path, blobs: Path) -> Path | None:
    """Return where a manifest's weights lie; None for one that cannot be read or names none."""
    try:
        with manifest.open("rb") as file:
            content: Any = parse_json(file.read(MAX_MANIFEST))
    except (OSError, ValueError):
        return None
    layers = content.get("layers") if isinstance(content, dict) else None
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == MODEL_LAYER:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            return None if digest is None else blobs / f"sha256-{digest[1]}"
    return None
