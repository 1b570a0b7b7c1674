"""The agent-like conversation through a real ``dflash serve``: caches reused, text equal in both modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import agent_trace


@pytest.mark.slow
def test_only_what_is_new_is_prefilled_and_both_modes_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agent_trace.main(["demo-hybrid", "--turns", "4", "--out", str(tmp_path / "trace.json")]) == 0
    told = capsys.readouterr().out
    assert "4 turns" in told and "0 tokens prefilled beyond what was new" in told
    assert (tmp_path / "trace.json").is_file()


def test_the_table_calls_a_difference_by_name() -> None:
    row = {"turn": 1, "text": "a", "prompt": 9, "reused": 4, "prefilled": 5, "new": 5, "tokens": 3, "ms": 2.0}
    found = {"model": "m", "dflash": [row | {"acceptance": 2.5}], "ar": [row | {"text": "b", "ms": 4.0}]}
    told = "\n".join(agent_trace.lines(found))
    assert "2.00x" in told and "NO" in told
