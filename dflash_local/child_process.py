"""The one place that starts processes, and what each child may import, where it runs and which variables it gets.

- No file of the folder that the user stands in, a download perhaps, is run: a Python child has this process's import
  path less that folder, a program is looked for in absolute folders of PATH only, and a child runs in a folder of our
  own unless its caller says why it needs the user's.
- No child gets a variable that holds a secret, unless its caller grants it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_local import settings
from dflash_local.import_path import without_current_folder

OWN_FOLDER = Path(sys.prefix)  # always there, as safe from others as Python itself, and without a module in it
USERS_FOLDER = Path(os.curdir)
# By name. A list of the variables that are allowed would be safer, but nobody can list what a server, a compiler or an
# editor reads: CUDA_*, NCCL_*, VLLM_*, HF_*, proxies, the display. HF_HUB_DISABLE_IMPLICIT_TOKEN is a switch, and
# SGLANG_*_TOKENS_PER_RANK a number.
_SECRET = re.compile(
    r"SECRET|PASSW|CREDENTIAL|(?:^|_)(?:(?<!IMPLICIT_)TOKEN(?:_PATH|_FILE)?|(?:API)?KEY(?:_ID)?)$", re.IGNORECASE
)


def python_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module as ``python -m`` would.

    ``-I`` in its place would drop PYTHONPATH and the user's site-packages, and Python 3.10 has no ``-P``.
    """
    line = (
        f"import sys; sys.path[:] = {without_current_folder(sys.path)!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", line, *arguments]


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those without secrets; PYTHONPATH without the current folder."""
    kept = {name: value for name, value in environ.items() if not _SECRET.search(name)}
    if kept.get("PYTHONPATH"):
        kept["PYTHONPATH"] = os.pathsep.join(without_current_folder(kept["PYTHONPATH"].split(os.pathsep)))
    return kept


def find_program(name: str) -> str | None:
    """Return the path of a program in an absolute folder of PATH; None where there is none."""
    folders = settings.environment().get("PATH", os.defpath).split(os.pathsep)
    found = shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, folders)))
    return found if found and os.path.isabs(found) else None  # Windows looks into the current folder first


def start(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    granted: Mapping[str, str] | None = None,
    folder: Path = OWN_FOLDER,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a process.

    Args:
        argv: its program first, looked for on PATH where it is a plain name.
        environ: what its variables are taken from; those of this process if not given.
        granted: variables that it gets besides, secrets among them. options: of ``subprocess.Popen``.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(_found(argv), env=_environment(environ, granted), cwd=folder, **options)


def run(argv: Sequence[str], folder: Path = OWN_FOLDER, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a process to its end; as ``start``, with the options of ``subprocess.run``."""
    return subprocess.run(_found(argv), env=_environment(None, None), cwd=folder, check=False, **options)


def _found(argv: Sequence[str]) -> list[str]:
    program = argv[0] if os.path.dirname(argv[0]) else find_program(argv[0])
    if program is None:
        raise FileNotFoundError(2, "no such program on PATH", argv[0])
    return [program, *argv[1:]]


def _environment(environ: Mapping[str, str] | None, granted: Mapping[str, str] | None) -> dict[str, str]:
    return variables(settings.environment() if environ is None else environ) | dict(granted or {})
