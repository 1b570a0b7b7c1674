"""Cuts a file into parts, and joins and checks them elsewhere: what carries little at a time carries it in turns.

``python -m tools.train.parts cut FILE FOLDER MIB`` writes FOLDER/<name>.0, .1, ... and FOLDER/<name>.sha256;
``python -m tools.train.parts join FOLDER/<name> FILE`` puts the parts together where all have come, and checks the sum.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

AT_ONCE = 2**24


def cut(file: Path, folder: Path, mebibytes: int) -> list[Path]:
    """The parts, each of at most so many MiB, and the file of the sum last."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    total, size = hashlib.sha256(), mebibytes * 2**20
    with file.open("rb") as stream:
        while data := stream.read(size):
            made.append(folder / f"{file.name}.{len(made)}")
            made[-1].write_bytes(data)
            total.update(data)
    made.append(folder / f"{file.name}.sha256")
    made[-1].write_text(f"{total.hexdigest()} {len(made) - 1}\n", encoding="ascii")
    return made


def join(stem: Path, file: Path) -> None:
    """Join ``stem``.0, .1, ... to a file. Raises SystemExit: a part is missing, or the sum is another."""
    wanted, count = stem.with_name(f"{stem.name}.sha256").read_text(encoding="ascii").split()
    parts = [stem.with_name(f"{stem.name}.{number}") for number in range(int(count))]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise SystemExit(f"{file} cannot be joined yet: {', '.join(missing)} of {count} parts are not here")
    file.parent.mkdir(parents=True, exist_ok=True)
    total = hashlib.sha256()
    with file.open("wb") as stream:
        for part in parts:
            data = part.read_bytes()
            total.update(data)
            stream.write(data)
    if total.hexdigest() != wanted:
        file.unlink()
        raise SystemExit(f"{file.name}: the parts do not give SHA-256 {wanted}; carry them again")


def main(arguments: list[str]) -> None:
    match arguments:
        case ["cut", file, folder, mebibytes]:
            for made in cut(Path(file), Path(folder), int(mebibytes)):
                sys.stderr.write(f"{made} {made.stat().st_size}\n")
        case ["join", stem, file]:
            join(Path(stem), Path(file))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
