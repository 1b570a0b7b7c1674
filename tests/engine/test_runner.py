"""The seam between sessions and engines."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.bench.certify import CertifyPlan, cases, certify
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.runner import Runner
from dflash_local.errors import UsageError
from tests.engine_sessions import target_of
from tests.fused_models import fused_target

MEMBERS = {name for name in vars(Runner) if not name.startswith("_")} | {"proposer"}


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_every_runner_has_what_a_session_uses_and_takes_it_the_same_way(engine: str) -> None:
    runner: Any = {
        "reference": lambda: ReferenceRunner(target_of("qwen3"), None, 100),
        "fused": lambda: FusedRunner(fused_target("qwen3", 100), None, 100),
    }[engine]()
    assert runner.name == engine and len(MEMBERS) > 15
    for member in MEMBERS:
        wanted = vars(Runner).get(member)
        found = getattr(runner, member)
        if inspect.isfunction(wanted):
            assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters)[1:], member


def test_a_target_elsewhere_cannot_be_certified() -> None:
    session: Any = SimpleNamespace(runner=SimpleNamespace(target=None), facts=SimpleNamespace(target="counting"))
    with pytest.raises(UsageError, match="counting is not in this process"):
        certify(session, CertifyPlan(((1, 2),), cases(1), (4,), 8))
