"""What people find in place of weights, told by a file's first bytes, whatever format was expected. Torch-free."""

from __future__ import annotations

from pathlib import Path

from dflash_local.errors import CheckpointError

AGAIN = "the download is damaged or incomplete: download the checkpoint again"
READ = "only safetensors and GGUF are read"

IMPOSTORS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the weights"),
    (b"<", "is a web page, not weights"),
    (b"PK\x03\x04", f"is a pickle or zip archive; {READ}"),
    (b"\x80\x02", f"is a pickle; {READ}"),
    (b"\x80\x04", f"is a pickle; {READ}"),
    (b"\x80\x05", f"is a pickle; {READ}"),
)


def refuse_impostor(file: Path, start: bytes) -> None:
    """CheckpointError that says what ``file`` is, where its first bytes are those of a known other thing."""
    for magic, what in IMPOSTORS:
        if start.lstrip().startswith(magic):
            raise CheckpointError(f"{file} {what}", AGAIN)
