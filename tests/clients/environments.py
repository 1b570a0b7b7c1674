"""Makes one environment for each client of ``versions.txt`` and prints what is in it: of Python, or ``npm``'s.

``python tests/clients/environments.py FOLDER [pip's options]``: pip is called only where the versions have changed.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSIONS = Path(__file__).with_name("versions.txt")
WANTED = "wanted.txt"  # what an environment was made of, in it
NPM = "npm"  # the environment whose packages are npm's


def table() -> dict[str, list[str]]:
    """The packages of each environment."""
    lines = VERSIONS.read_text(encoding="utf-8").splitlines()
    rows = (line.partition(":") for line in lines if line and not line.startswith("#"))
    return {name: packages.split() for name, _, packages in rows}


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of a client's environment."""
    return folder / name / "bin" / "python"


def make(folder: Path, name: str, packages: list[str], options: list[str]) -> None:
    """Make or renew one environment.

    Raises:
        SystemExit: pip failed.
    """
    made = folder / name / WANTED
    wanted = " ".join(packages)
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return
    print(f"installing {wanted} into {folder / name}", flush=True)
    if name == NPM:
        made.parent.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", str(made.parent)]
    else:
        venv.create(folder / name, with_pip=True, clear=not python_of(folder, name).exists())
        pip = [str(python_of(folder, name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command = [*pip, *options]
    if subprocess.run([*command, *packages]).returncode:
        raise SystemExit(f"could not install {wanted}")
    made.write_text(wanted, encoding="utf-8")


def main(arguments: list[str]) -> None:
    folder, options = Path(arguments[0]), arguments[1:]
    for name, packages in table().items():
        make(folder, name, packages, options)
        print(f"{name:12} {' '.join(packages)}")


if __name__ == "__main__":
    main(sys.argv[1:])
