"""Baselines: what they measure, in this process; what becomes of a process that breaks, hangs or babbles."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict

import pytest

from dflash_local.bench import baselines
from dflash_local.bench.baselines import NAMES, Baseline, BaselineTask, run_one, tasks
from tests.bench.shapes import PLACE, tiny_pair


def _task(kind: str, hybrid: bool = False) -> BaselineTask:
    found = {task.kind: task for task in tasks(tiny_pair(hybrid), 20, PLACE)}
    assert set(found) == set(NAMES)
    task = found[kind]
    return BaselineTask(kind, task.family, task.text_config, task.drafter_config, 20, "cpu", "float32", tokens=3)


def _shell(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize("hybrid", [False, True])
def test_transformers_and_the_reference_engine_are_timed(hybrid: bool) -> None:
    eager = baselines.measure(_task("eager", hybrid))
    assert set(eager) == {"step_ms"} and eager["step_ms"] > 0
    reference = baselines.measure(_task("reference", hybrid))
    assert reference["rows"] == 8 and reference["step_ms"] > 0 and reference["cycle_ms"] > 0


def test_the_answer_is_the_last_line_of_a_process() -> None:
    code = (
        "import sys, json; task = json.load(sys.stdin); print('noise'); print(json.dumps({'step_ms': task['context']}))"
    )
    assert run_one(_task("eager"), 30, _shell(code)) == Baseline(NAMES["eager"], 20, 20)


def test_a_process_that_breaks_is_a_line() -> None:
    found = run_one(_task("compiled"), 30, _shell("raise RuntimeError('no compiler\\nwas found')"))
    assert found.step_ms is None and found.reason == "RuntimeError: no compiler"
    assert "ended with code 3" in run_one(_task("eager"), 30, _shell("import sys; sys.exit(3)")).reason
    babble = run_one(_task("eager"), 30, _shell("print('[1, 2]')"))
    assert babble.step_ms is None and babble.reason


def test_a_process_that_hangs_is_ended() -> None:
    found = run_one(_task("reference"), 0.5, _shell("import time; time.sleep(60)"))
    assert found.reason == "it took more than 0.5 s"


def test_what_the_process_runs_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(_task("eager")))))
    baselines.main()
    *_, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert set(found) == {"step_ms"} and found["step_ms"] > 0


@pytest.mark.slow  # it imports everything; what it runs is above
def test_the_real_process_answers() -> None:
    found = run_one(_task("eager"), 120)
    assert found.reason == "" and found.step_ms is not None and found.step_ms > 0
