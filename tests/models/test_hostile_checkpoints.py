"""Hostile checkpoints end as a reply or as an error that names its cause: no hang, no abort, no unexpected failure."""

from __future__ import annotations

import io
import os
from itertools import islice
from pathlib import Path

import pytest

from dflash_local.checkpoint_files.source import open_source
from dflash_local.cli.main import main
from tests.models.hostile_checkpoints import cases, outcomes, run
from tests.models.hostile_fields import Case
from tests.models.hostile_tokenizers import TEMPLATES
from tests.smollm2 import GGUF

pytestmark = pytest.mark.skipif(os.name != "posix", reason="made of pipes, devices and links")

# Of each group every so manieth is run here, all of them below; tokenizers have tests of their own beside theirs. No
# number divides those of a field's values, or each field would be tried with the same one.
FAST = {"target config": 43, "drafter config": 31, "hybrid config": 29, "config file": 3, "odd files": 7, "headers": 17}


def of_group(group: str, step: int = 1) -> list[Case]:
    return list(islice((case for case in cases() if case.group == group), 0, None, step))


def unfit(found: list[Case], folder: Path, command: str = "run") -> list[str]:
    """What is neither a reply nor an error that names its cause."""
    verdicts = [run(case, folder / str(at), command) for at, case in enumerate(found)]
    return [f"{each.outcome} {each.name}: {each.said}" for each in verdicts if not each.fine]


@pytest.mark.parametrize("group", FAST)
def test_a_part_of_them_in_this_process(group: str, tmp_path: Path) -> None:
    found = of_group(group, FAST[group])
    assert len(found) > 4 and unfit(found, tmp_path) == []


def test_plan_reads_them_too(tmp_path: Path) -> None:
    found = [
        case for group in ("target config", "drafter config", "config file") for case in of_group(group, FAST[group])
    ]
    assert len(found) > 20 and unfit(found, tmp_path, "plan") == []


def test_a_template_inside_a_gguf_file_is_kept_in_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, file = open_source(GGUF).tokenizer(), tmp_path / "model.gguf"
    assert parts is not None and isinstance(parts.template, str)
    hostile = TEMPLATES["a leak"].ljust(len(parts.template))  # of one length: what stands behind it stays in its place
    file.write_bytes(GGUF.read_bytes().replace(parts.template.encode(), hostile.encode()))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["run", str(file), "hi", "--mode", "ar", "--device", "cpu"]) == 6
    out, err = capsys.readouterr()
    *_, error, hint = err.splitlines()  # behind the pair that was loaded
    said = "error: the chat template tries to leave its sandbox: access to '__class__'"
    assert out == "" and error.startswith(said) and hint.startswith("hint: ")


def test_there_are_enough_of_them() -> None:
    found = list(cases())
    assert len(found) >= 1000 and len({(case.group, case.name) for case in found}) == len(found)


@pytest.mark.slow
def test_all_of_them_in_processes_that_may_die() -> None:
    found = list(outcomes(list(cases())))
    bad = [f"{each.outcome} {each.group}: {each.name}: {each.said}" for each in found if not each.fine]
    assert bad == []
