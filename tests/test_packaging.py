"""What is shipped: the tree docs show, the metadata, the constraints, the Makefile."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from dflash_local import __version__
from dflash_local.cli.main import main
from dflash_local.planner import software

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dflash_local"

# Folders of a build machine and hosts of registries, as patterns that do not match themselves.
FORBIDDEN_TEXT = re.compile(r"/[w]ork/|/[r]oot/|/opt/[w]heels|/opt/[p]ypi|\.\./[s]hared|[p]ypi\.org|[p]ythonhosted")


def pyproject() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    content: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return content


def requirements(extra: str = "") -> dict[str, Requirement]:
    project = pyproject()["project"]
    assert isinstance(project, dict)
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in map(Requirement, lines)}


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): Version(version) for name, version in pairs}


def _folders_on_disk() -> set[str]:
    """Top folders, the package's rooms, and test folders that mirror no room; empty ones do not count."""

    def inside(folder: Path) -> set[str]:
        children = (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith((".", "__")))
        files = {child: [f for f in child.rglob("*") if f.is_file() and f.suffix != ".pyc"] for child in children}
        return {child.name for child, found in files.items() if found}

    top = inside(ROOT) - {"build", "dist"}
    rooms = inside(PACKAGE)
    tests = inside(ROOT / "tests") - rooms
    return top | {f"dflash_local/{room}" for room in rooms} | {f"tests/{folder}" for folder in tests}


def _folders_in_docs() -> set[str]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture, tree = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    folders, top = {f"dflash_local/{room}" for room in re.findall(r"(\w+)/(?=\s)", picture)}, ""
    for line in tree.splitlines():
        found = re.match(r"( *)([\w.]+)/ +\S", line)
        if found:
            top = top if found.group(1) else found.group(2)
            folders.add(f"{top}/{found.group(2)}" if found.group(1) else top)
    return folders


def test_the_tree_in_docs_matches_the_disk() -> None:
    assert _folders_in_docs() == _folders_on_disk()


def test_committed_text_names_no_build_machine() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if known.returncode:
        pytest.skip("not a git checkout")
    wrong = []
    for path in (ROOT / name for name in known.stdout.split("\0") if name):
        if path.is_file() and path.stat().st_size < 1_000_000 and b"\0" not in (content := path.read_bytes()):
            found = set(FORBIDDEN_TEXT.findall(content.decode("utf-8", errors="replace")))
            wrong += [f"{path.relative_to(ROOT)} mentions {word}" for word in found]
    assert not wrong, "\n".join(wrong)


def test_tested_versions_satisfy_the_declared_ranges() -> None:
    pinned = constraints()
    wanted = {**requirements(), **requirements("dev")}
    assert "nvidia-cuda-nvrtc" not in pinned, "a torch for CUDA could not be installed beside another version's"
    del wanted["nvidia-cuda-nvrtc"], wanted["pip"]  # an environment's own pip installs the others
    assert set(wanted) <= set(pinned)
    unmet = [f"{name} {pinned[name]}" for name, range_ in wanted.items() if pinned[name] not in range_.specifier]
    assert not unmet


def test_the_wheel_holds_kernels_in_cuda_and_no_trainer() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    shipped = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    sources = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.cu")}
    assert sources and sources <= shipped and "dflash_local/demo/prompts.json" in shipped
    assert {name.split("/")[0] for name in shipped} == {"dflash_local"}
    assert not [name for name in shipped if "train/" in name]


def test_doctor_judges_by_the_declared_ranges() -> None:
    declared = requirements()
    dotted = {name: ".".join(map(str, getattr(software, name))) for name in dir(software) if name.isupper()}
    assert Version(__version__).release >= (0, 1)
    assert str(declared["torch"].specifier) == f">={dotted['OLDEST_TORCH']}"
    both = {f">={dotted['OLDEST_TRANSFORMERS']}", f"<{dotted['TRANSFORMERS_BELOW']}"}
    assert {str(part) for part in declared["transformers"].specifier} == both
    project = pyproject()["project"]
    assert isinstance(project, dict) and project["requires-python"] == f">={dotted['OLDEST_PYTHON']}"


def test_measured_versions_are_those_of_the_recorded_figures() -> None:
    lines = (ROOT / "constraints-cuda.txt").read_text(encoding="utf-8").splitlines()
    pinned = {each.name: each for each in map(Requirement, (line for line in lines if not line.startswith("#")))}
    assert set(pinned) == set(software.MEASURED)
    seen = 0
    for path in sorted((ROOT / "benchmarks" / "results").glob("h200_*.json")):
        versions = json.loads(path.read_text(encoding="utf-8")).get("versions") or {}
        for name, measured in software.MEASURED.items():
            if versions.get(name):
                seen += 1
                assert Version(versions[name]) in pinned[name].specifier, path.name
                assert software.release(versions[name])[: len(measured)] == measured, path.name
    assert seen > 50


def pages() -> dict[Path, str]:
    """README and what stands behind it."""
    files = (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *(ROOT / "docs").glob("*.md"))
    return {file: file.read_text(encoding="utf-8") for file in files}


def test_links_between_pages_lead_somewhere() -> None:
    seen = set()
    for file, text in pages().items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            there = (file.parent / target).resolve() if target else file
            assert there.is_file(), f"{file.name}: {link}"
            seen.add(there)
            if anchor:
                titles = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link
    assert seen >= {file for file in pages() if file.name != "README.md"}, "a page that nothing leads to"


def test_docs_name_only_targets_that_exist() -> None:
    text, makefile = "\n".join(pages().values()), (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_docs_name_every_command_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    code = [part for text in pages().values() for part in re.findall(r"^```.*?^```|`[^`]+`", text, re.DOTALL | re.M)]
    named = set(re.findall(r"\bdflash ([a-z]+)\b", "\n".join(code)))
    assert main(["--help"]) == 0
    offered = set(re.findall(r"^  ([a-z]+)  +\S", capsys.readouterr().out, re.MULTILINE))
    assert named <= offered and offered - named <= {"help"}, "a command that no page names"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_calls_no_pip_once_installed(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def plan(*targets: str) -> str:
        command = ["make", "-n", *targets]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    demo, test = plan("demo"), plan("test")
    assert "pip_install" in demo and "pip_install" in test
    assert "constraints-cuda.txt" not in demo
    stamps = re.findall(r"touch (\S+)", test)
    assert len(stamps) == 2
    (tmp_path / ".venv").mkdir()
    for stamp in stamps:
        (tmp_path / stamp).touch()
    (tmp_path / "pyproject.toml").touch()
    both = plan("demo", "test")
    assert "pip_install" not in both and "pytest" in both
    with (tmp_path / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert "pip_install" in plan("test")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_takes_the_measured_versions_where_a_card_is_present(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def plan(answer: str, *more: str) -> str:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
        smi.chmod(0o755)
        env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        command = ["make", "-n", "demo", *more]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    index = "TORCH_CPU_INDEX=https://torch.example/cpu"
    with_card, without = plan("GPU 0: NVIDIA H200 (UUID: GPU-1)", index), plan("No devices found.", index)
    assert "cat constraints-cuda.txt" in with_card and "torch.example" not in with_card
    assert "constraints-cuda.txt" not in without and "--index-url https://torch.example/cpu" in without
    assert "--index-url" not in plan("No devices found.", "TORCH_CPU_INDEX=")


def test_a_checkout_without_symbolic_links_works(tmp_path: Path) -> None:
    """Git writes a link's target as a text where the system has no links, as on Windows by default."""

    def as_text(source: str, copy: str) -> str:
        if Path(source).is_symlink():
            Path(copy).write_text(os.readlink(source), encoding="utf-8")
            return copy
        return str(shutil.copy2(source, copy))

    links = [path for path in PACKAGE.rglob("*") if path.is_symlink()]
    assert sorted(path.name for path in links) == ["registry.yaml", "ui"]

    def left_out(folder: str, names: list[str]) -> set[str]:
        found = {name for name in names if name in ("__pycache__", "demo")}
        return found | ({"ui"} if Path(folder) == PACKAGE else set())

    shutil.copytree(PACKAGE, tmp_path / "dflash_local", symlinks=False, ignore=left_out, copy_function=as_text)
    (tmp_path / "dflash_local" / "ui").write_text("../ui", encoding="utf-8")
    shutil.copytree(ROOT / "ui", tmp_path / "ui", ignore=left_out)
    shutil.copy(ROOT / "registry.yaml", tmp_path)
    code = (
        "import dflash_local.ui.readings as readings; from dflash_local.catalog import registry;"
        "print(readings.__file__, len(registry.load().rows))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path / "ui")) and int(run.stdout.split()[-1]) > 15
