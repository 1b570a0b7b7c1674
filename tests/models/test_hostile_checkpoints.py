"""Hostile checkpoints end as a reply or as an error that names its cause: no hang, no abort, no unexpected failure."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from tests.models.hostile_checkpoints import cases, outcomes, run, table
from tests.models.hostile_fields import Case

pytestmark = pytest.mark.skipif(os.name != "posix", reason="made of pipes, devices and links")

# Of each group every so manieth is run here, all of them below; tokenizers have tests of their own beside theirs.
FAST = {"target config": 29, "drafter config": 19, "hybrid config": 17, "config file": 3, "odd files": 5, "headers": 11}


def of_group(group: str, step: int = 1) -> list[Case]:
    return list(islice((case for case in cases() if case.group == group), 0, None, step))


def unfit(found: list[Case], folder: Path, command: str = "run") -> list[str]:
    """What is neither a reply nor an error that names its cause."""
    verdicts = [run(case, folder / str(at), command) for at, case in enumerate(found)]
    return [f"{each.outcome} {each.name}: {each.said}" for each in verdicts if not each.fine]


@pytest.mark.parametrize("group", FAST)
def test_a_part_of_them_in_this_process(group: str, tmp_path: Path) -> None:
    found = of_group(group, FAST[group])
    assert len(found) > 5 and unfit(found, tmp_path) == []


@pytest.mark.parametrize("group", ["target config", "drafter config", "config file"])
def test_plan_reads_them_too(group: str, tmp_path: Path) -> None:
    found = of_group(group, FAST[group])
    assert len(found) > 5 and unfit(found, tmp_path, "plan") == []


def test_there_are_enough_of_them() -> None:
    found = list(cases())
    assert len(found) >= 1000 and len({(case.group, case.name) for case in found}) == len(found)


@pytest.mark.slow
def test_all_of_them_in_processes_that_may_die() -> None:
    found = list(outcomes(list(cases())))
    bad = [f"{each.outcome} {each.group}: {each.name}: {each.said}" for each in found if not each.fine]
    assert bad == [], table(found)
