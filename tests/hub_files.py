"""Files of a repository as the Hub knows them, and small ones in the format of weights."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = (".json", ".jinja", ".md", ".txt", ".py", ".gitattributes")
HTML = b"<!DOCTYPE html><html><head><title>Sign in to the network</title></head><body>Welcome</body></html>\n"
CHUNK = 16 * 1024


@dataclass(frozen=True)
class File:
    """One file of one commit."""

    path: str
    content: bytes | Path
    size: int
    sha256: str
    blob: str
    lfs: bool

    @classmethod
    def of(cls, path: str, content: bytes | str | Path) -> File:
        content = content.encode() if isinstance(content, str) else content
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        sha, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        for piece in pieces(content, 0, size, 1 << 20):
            sha.update(piece)
            blob.update(piece)
        lfs = not path.endswith(TEXT) or path.rsplit("/", 1)[-1] == "tokenizer.json"
        return cls(path, content, size, sha.hexdigest(), blob.hexdigest(), lfs)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob

    def entry(self) -> dict[str, Any]:
        lfs = {"sha256": self.sha256, "size": self.size, "pointerSize": 135}
        return {"rfilename": self.path, "size": self.size, "blobId": self.blob, **({"lfs": lfs} if self.lfs else {})}


def pieces(content: bytes | Path, start: int, stop: int, step: int = CHUNK) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for at in range(start, min(stop, len(content)), step):
            yield content[at : min(at + step, stop)]
        return
    with content.open("rb") as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(step, stop - start))):
            yield piece
            start += len(piece)


def safetensors(size: int, seed: int = 0, *, tensors: tuple[str, ...] = ()) -> bytes:
    """A whole safetensors file with ``size`` bytes of weights, its tensors named after the seed unless given."""
    names = tensors or (f"layers.{seed}.weight",)
    ends = [size * (n + 1) // len(names) for n in range(len(names))]
    header = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, start, end in zip(names, [0, *ends], ends)
    }
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + random.Random(seed).randbytes(size)


def shards(count: int, size: int) -> dict[str, bytes]:
    """The weights of a repository in ``count`` files of ``size`` bytes, with their index."""
    names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    index = {"metadata": {}, "weight_map": {f"layers.{n}.weight": name for n, name in enumerate(names)}}
    files = {name: safetensors(size, n) for n, name in enumerate(names)}
    return {"model.safetensors.index.json": json.dumps(index).encode(), **files}
