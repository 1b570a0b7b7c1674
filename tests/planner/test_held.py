"""What a loaded pair holds of its device, as the plan that loaded it has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import held, plan
from tests.drafter_configs import published_drafter, published_target

TARGET = published_target("Qwen/Qwen3-8B")
DRAFTER = published_drafter("z-lab/Qwen3-8B-DFlash-b16")
CARD = Machine("a card", "cuda", 2**50, 2**50, "", "cuda:0")
CPU = Machine("CPU", "cpu", 2**50, 2**50, "", "cpu")


@pytest.mark.parametrize(
    ("where", "config"),
    [
        (CPU, LoadConfig(context=4096)),
        (CPU, LoadConfig(dtype="bfloat16", context=4096, draft=False)),
        (CARD, LoadConfig(quantize="bnb-nf4", context=4096)),
        (CARD, LoadConfig(engine="reference", context=4096)),
        (CARD, LoadConfig(engine="fused", context=8192, drafter_precision="8bit", kv_cache="int8")),
        (CARD, LoadConfig(context=8192, exact=True)),
    ],
)
def test_it_is_what_the_plan_says_that_loading_takes(where: Machine, config: LoadConfig) -> None:
    found = plan(TARGET, DRAFTER, where, config)
    precision = found.load.drafter_precision
    loaded = replace(
        found.load,
        engine=found.engine,
        dtype=found.dtype,
        device=where.device,
        drafter_precision="full" if precision == "auto" else precision,
    )
    facts = SessionFacts(
        target="target",
        drafter="drafter" if config.draft else None,
        block_size=found.block_size or 1,
        has_tokenizer=True,
        load=loaded,
    )
    assert held(TARGET, DRAFTER, facts) == found.ledger.loading.bytes
    assert 2**30 < held(TARGET, DRAFTER, facts) <= (found.ledger.peak or 0)
