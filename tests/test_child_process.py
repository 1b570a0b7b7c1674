"""Children and the folder that the user stands in: none of its files runs, and no secret leaves this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import run
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local import child_process, settings
from dflash_local.app.resolve import choose
from dflash_local.app.server_launch import launch, program_of
from dflash_local.child_process import variables
from dflash_local.cli.main import COMMANDS
from dflash_local.errors import MissingDependencyError, ServerError
from dflash_local.ui.tui.own_commands import edited
from tests.remote.launched_fake import ROOT

HOSTILE = (
    *("venv.py", "pip.py", "torch.py", "typer.py", "json.py", "subprocess.py", "pathlib.py", "__future__.py"),
    *("sitecustomize.py", "webbrowser.py", "sglang/__init__.py", "sglang/launch_server.py", "vllm/__init__.py"),
)
# What pip puts into the folder of programs: unlike ``python -m``, Python does not look into the current folder for it.
SCRIPT = "import sys\nfrom dflash_local.cli.main import main\nsys.exit(main())\n"
SHORT = ("--max-new-tokens", "2")
RUN = ("run", "demo", "hi", *SHORT)
# Of a child that a command starts only where a card is: the same call, by itself.
BASELINE = """
from dflash_local.bench import baselines
from tests.bench.test_baselines import _task
found = baselines.run_one(_task("eager"))
print(found)
assert found.step_ms, found
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, full of files that leave a mark where they run; afterwards there is none."""
    for name in HOSTILE:
        file = tmp_path / "download" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n", encoding="utf-8")
    for name in ("nvidia-smi", "rocm-smi", "gcc"):
        file = tmp_path / "download" / name
        file.write_text(f"#!/bin/sh\necho {name} >> {tmp_path / 'ran'}\n", encoding="utf-8")
        file.chmod(0o755)
    (tmp_path / "dflash").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "download")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path / "download"
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text(encoding="utf-8")


def call(*words: str, expected: int | None = 0) -> str:
    done = run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert expected is None or done.returncode == expected, done.stderr
    return done.stdout + done.stderr


def test_a_python_child_imports_nothing_of_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = ["", ".", str(folder), os.path.relpath(folder)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*spelled, str(ROOT)]))
    monkeypatch.setattr(sys, "path", [*spelled, *sys.path])
    argv = child_process.python_command("json.tool", ["--help"])  # unlike ours, it does not mend its path itself
    with child_process.start(argv, folder=child_process.USERS_FOLDER, stdout=-1, text=True) as child:
        assert child.communicate(timeout=60)[0].startswith("usage: ")


def test_a_program_is_not_taken_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", "../download", "/usr/bin", "/bin"]))
    assert child_process.find_program("nvidia-smi") is None and child_process.find_program("sh") in (
        "/usr/bin/sh",
        "/bin/sh",
    )
    with pytest.raises(FileNotFoundError, match="nvidia-smi"):
        child_process.run(["nvidia-smi"])
    assert child_process.run(["pwd"], stdout=-1, text=True).stdout.strip() == os.path.realpath(sys.prefix)


def test_a_child_gets_no_secrets_but_those_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "DFLASH_TOKEN", "DFLASH_ENGINE_TOKEN", "VLLM_API_KEY"),
        *(
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "PGPASSWORD",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "WANDB_API_KEY",
        ),
    )
    needed = (
        *("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "TOKENIZERS_PARALLELISM"),
        *("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SSH_AUTH_SOCK", "XAUTHORITY", "https_proxy"),
    )
    assert set(variables(dict.fromkeys((*secrets, *needed), "x"))) == set(needed)
    for name in secrets:
        monkeypatch.setenv(name, "a-secret")
    assert "a-secret" not in str(child_process.run(["env"], stdout=-1).stdout)
    with child_process.start(["env"], granted={"HF_TOKEN": "a-secret"}, stdout=-1) as child:
        assert str(child.stdout.read()).count("a-secret") == 1


def test_the_editor_has_the_users_folder_and_no_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = folder.parent / "editor"
    editor.write_text(f'#!/bin/sh\npwd > {folder.parent}/seen\nenv >> {folder.parent}/seen\nprintf " more" >> "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    app: Any = SimpleNamespace(suspend=nullcontext)
    assert edited(app, "a message") == "a message more"
    seen = (folder.parent / "seen").read_text(encoding="utf-8")
    assert seen.startswith(f"{folder}\n") and "a-secret" not in seen


@pytest.mark.needs_torch
def test_none_of_its_files_runs_with_the_program(folder: Path) -> None:
    """``__main__`` and a command that starts a child; the other commands take the same two ways, with transformers."""
    assert "Hello" in call("-m", "dflash_local", *RUN, "--engine", "fused")


@pytest.mark.slow  # the other commands that start children, each both ways: a minute, and three on a busy machine
@pytest.mark.needs_torch
@pytest.mark.parametrize("program", [("-m", "dflash_local"), ("../dflash",)], ids=["module", "script"])
@pytest.mark.parametrize(
    "words", [RUN, ("plan", "demo"), ("doctor",), *((one, "demo", *SHORT) for one in ("certify", "bench"))], ids=str
)
def test_none_of_its_files_runs_with_other_commands(
    words: tuple[str, ...], program: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", os.environ["PATH"]]))
    call(*program, *words, expected=None if words == ("doctor",) else 0)  # its code tells of this machine


@pytest.mark.slow  # half a minute for each way, as every command starts Python
@pytest.mark.parametrize("program", [("-m", "dflash_local"), ("../dflash",)], ids=["module", "script"])
def test_none_of_its_files_runs_with_any_help(program: tuple[str, ...], folder: Path) -> None:
    for name in COMMANDS:
        call(*program, name, "--help")


def test_sglang_is_not_taken_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", os.environ["PATH"]]))
    with pytest.raises(MissingDependencyError, match="SGLang is not on PATH"):
        program_of("sglang", settings.load())
    monkeypatch.setenv("DFLASH_SGLANG", sys.executable)
    user = settings.load()
    with pytest.raises(ServerError, match="No module named 'sglang'"):
        launch("sglang", choose("demo", None, user), user)


@pytest.mark.slow  # two processes that load torch
@pytest.mark.needs_torch
def test_none_of_its_files_runs_with_a_measurement(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_IN_PROCESS")  # so that it is one of a process of its own
    call("-m", "dflash_local", "certify", "demo", *SHORT)


@pytest.mark.slow  # a model of transformers, in a process that loads torch
@pytest.mark.needs_torch
def test_none_of_its_files_runs_with_a_child(folder: Path) -> None:
    file = folder.parent / "script.py"
    file.write_text(BASELINE, encoding="utf-8")
    call(str(file))
