"""The libraries under the command line, the screens, the page and the downloads, over the range of their versions.

``make test-versions``: each set of versions gets an environment of its own in .venv-versions, which borrows all the
rest from the one that runs this; the tests that concern the library run there. Takes long and a network; no part of CI.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-versions"
CLI = ("tests/cli", "tests/app", "--ignore=tests/cli/test_pull_processes.py", "tests/test_terminal.py")
TUI = ("tests/ui", "--ignore=tests/ui/web", "tests/cli/test_screen.py")
PAGE = ("tests/ui/web", "tests/cli/test_web.py", "tests/app/test_served_pair.py")
STORE = ("tests/store", "tests/cli/test_pull.py", "tests/cli/test_rm.py")

LIST = "import sys; from importlib.metadata import version as v; print('\\n'.join(f'{n} {v(n)}' for n in sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed over the borrowed packages, and what is tested with it."""

    library: str
    pins: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Of its environment."""
        return FOLDER / "-".join(pin.replace("==", "-") for pin in self.pins)


SETS = (
    Versions("typer", ("typer==0.18.0", "click==8.1.8", "rich==14.2.0"), CLI),
    Versions("typer", ("typer==0.18.0", "click==8.5.1"), CLI),  # typer does not say which click is too new for it
    Versions("typer", ("typer==0.24.2", "click==8.3.1", "rich==14.3.4"), CLI),
    Versions("typer", ("typer==0.27.2", "rich==15.0.0"), CLI),
    Versions("typer", ("typer==0.29.2", "click==8.5.1", "rich==15.0.0"), CLI),
    Versions("textual", ("textual==8.2.0", "rich==14.2.0"), TUI),
    Versions("textual", ("textual==8.2.4",), TUI),
    Versions("textual", ("textual==8.2.8", "rich==15.0.0"), TUI),
    Versions("gradio", ("gradio==6.29.0",), PAGE),
    Versions("gradio", ("gradio==6.30.0",), PAGE),
    Versions("gradio", ("gradio==6.31.0",), PAGE),
    Versions("huggingface_hub", ("huggingface_hub==1.31.0",), STORE),
    Versions("huggingface_hub", ("huggingface_hub==2.0.0",), STORE),
    Versions("huggingface_hub", ("huggingface_hub==2.4.0",), STORE),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test every set, or those of the libraries that are named; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(dict.fromkeys(s.library for s in SETS))}; all")
    parser.add_argument("--flags", default="", help="more words for pytest")
    args = parser.parse_args(arguments)
    chosen = [one for one in SETS if not args.libraries or one.library in args.libraries]
    if not chosen:
        parser.error(f"no set is of {' or '.join(args.libraries)}")
    found = [tested(one, args.flags.split()) for one in chosen]
    print("\n== versions")
    for code, installed in found:
        print(f"{'passed' if code == 0 else 'FAILED':<7} {', '.join(installed)}")
    return int(any(code for code, _ in found))


def tested(one: Versions, flags: Sequence[str]) -> tuple[int, list[str]]:
    """Exit code of the tests with these versions, and the versions as they were found there."""
    print(f"\n== {' '.join(one.pins)}", flush=True)
    python = environment(one)
    names = [pin.split("==")[0] for pin in one.pins]
    listed = subprocess.run([python, "-c", LIST, *names], check=True, capture_output=True, text=True)
    installed = listed.stdout.splitlines()
    if installed != [pin.replace("==", " ") for pin in one.pins]:
        raise SystemExit(f"asked for {one.pins}, found {installed}")
    done = subprocess.run([python, "-m", "pytest", "-q", *flags, *one.tests], cwd=ROOT, env=_environ(python))
    return done.returncode, installed


def environment(one: Versions) -> Path:
    """The interpreter of the set's environment, made when it is not there yet."""
    python = one.folder / "bin" / "python"
    done = one.folder / ".installed"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", one.folder], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(one.folder), "platbase": str(one.folder)})
    # A path file is not followed into other path files, so all that this interpreter searches is named in one. Pip
    # takes what it finds there for installed, and leaves it where it is when another version is asked for.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, *one.pins], check=True)
    done.touch()
    return python


def _environ(python: Path) -> dict[str, str]:
    """Tests that start ``dflash`` by name find that of the environment's own folder first."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    sys.exit(main())
