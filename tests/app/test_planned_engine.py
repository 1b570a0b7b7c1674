"""Which engine a plan names, and where it proposes llama.cpp."""

from __future__ import annotations

import pytest

from dflash_local import settings
from dflash_local.app import fitting
from dflash_local.app.planned_engine import NO_KERNELS, PlannedEngine, planned_engine
from dflash_local.app.resolve import choose
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import plan

GIB = 2**30
CPU = Machine("CPU", "cpu", 64 * GIB, 64 * GIB, "", "cpu")
APPLE = Machine("Apple GPU", "mps", 64 * GIB, 64 * GIB, "", "mps")


def chosen(model: str, where: Machine, load: LoadConfig | None = None) -> PlannedEngine:
    user = settings.load()
    choice = choose(model, None, user)
    known = fitting.shapes(choice, None)
    assert known is not None
    return planned_engine(choice, plan(known.target, known.drafter, where, load))


@pytest.mark.parametrize(
    ("model", "where", "engine", "why", "command"),
    [
        ("Qwen/Qwen3-8B", named("RTX 4090", None), "fused", "whose kernels are for this card and format", ""),
        ("Qwen/Qwen3-8B", CPU, "reference", "a CPU", "dflash chat Qwen/Qwen3-8B-GGUF:Q4_K_M --engine llama.cpp"),
        ("Qwen/Qwen3.5-9B", APPLE, "reference", "an Apple GPU", "dflash chat FILE.gguf --engine llama.cpp"),
        (
            "Qwen/Qwen3.5-9B",
            named("RX 7900 XTX", None),
            "reference",
            NO_KERNELS,
            "dflash chat FILE.gguf --engine llama.cpp",
        ),
        ("demo", CPU, "reference", "the only one on a CPU", ""),
    ],
)
def test_llama_cpp_is_proposed_where_the_fused_engine_does_not_run(
    model: str, where: Machine, engine: str, why: str, command: str
) -> None:
    found = chosen(model, where)
    assert (found.engine, found.llama_cpp) == (engine, command) and why in found.why
    assert found.line.endswith(command or found.why)


def test_the_fused_engine_on_a_cpu_is_what_was_asked_for() -> None:
    assert (
        chosen("demo", CPU, LoadConfig(engine="fused")).line == "engine: fused, as asked for: its kernels are for GPUs"
    )
