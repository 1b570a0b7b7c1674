"""A drafter with the target's own layer beside it, as plans count it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.kinds import LOOKUP, folder_of, read_drafter
from dflash_local.drafters.mtp.layout import MTPConfig
from dflash_local.drafters.with_mtp import drafters_of
from dflash_local.layout.buffer import group_bytes
from dflash_local.layout.target import block_buffers
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.planner.fused_memory import engine_spec
from dflash_local.planner.ledger import RINGS, Ledger
from dflash_local.planner.load import SNAPSHOTS, Load
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import held, plan
from dflash_local.planner.speed import predict
from tests.drafter_configs import published_drafter, published_target

TARGET, DRAFTER = published_target("Qwen/Qwen3.8-27B"), published_drafter("z-lab/Qwen3.8-27B-DFlash2")
PLAIN, PLAIN_DRAFTER = published_target("Qwen/Qwen3-8B"), published_drafter("z-lab/Qwen3-8B-DFlash-b16")
LAYER = MTPConfig.of_model(TARGET)
CARD = Machine("NVIDIA H200", "cuda", 2**50, 2**50, "", "cuda:0")
HIDDEN, BYTES = 5120, 2  # of a number in bfloat16
CONTEXT = 4096
ASKED = LoadConfig(context=CONTEXT, prefill_chunk=CONTEXT)


def sizes(book: Ledger) -> dict[str, int]:
    return {each.name: each.bytes or 0 for each in (*book.lines, *book.host)}


@pytest.mark.parametrize("precision", ["full", "8bit", "frequent"])
def test_the_layer_adds_what_it_holds_itself(precision: str) -> None:
    """Under the drafter's names it holds other tensors; those that it shares with the target are there already."""
    asked = replace(ASKED, drafter_precision=precision)
    alone, both = (sizes(plan(TARGET, DRAFTER, CARD, replace(asked, mtp=mtp)).ledger) for mtp in (False, True))
    spec = engine_spec(DRAFTER, Load.of("cuda", asked, CONTEXT, DRAFTER.block_size))
    of_target = {each.name for each in block_buffers(TARGET, TARGET.vocab_size, spec)}
    beside = [each for each in LAYER.buffers(TARGET.vocab_size, spec) if each.name not in of_target]
    weights = LAYER.weights(HIDDEN, spec.dtype, LAYER.formats, spec.precision)
    expected = {str(group): size for group, size in group_bytes([*weights, *beside]).items()}
    expected["buffers"] += spec.rows * HIDDEN * BYTES  # the last layer is tapped, too
    expected[RINGS] = SNAPSHOTS * LAYER.snapshot_bytes(spec)
    added = {name: size - alone[name] for name, size in both.items() if size != alone[name]}
    assert added.pop("workspace") == CONTEXT * HIDDEN * BYTES  # and so are a prompt's rows
    assert added == expected


@pytest.mark.parametrize("engine", ["fused", "reference"])
def test_a_load_holds_both(engine: str) -> None:
    found = plan(TARGET, DRAFTER, CARD, replace(ASKED, engine=engine, mtp=True))
    loaded = replace(found.load, engine=engine, dtype=found.dtype, device="cuda:0", drafter_precision="full")
    both, alone = (
        held(TARGET, DRAFTER, SessionFacts("t", "d", DRAFTER.block_size, True, each))
        for each in (loaded, replace(loaded, mtp=False))
    )
    assert both == found.ledger.loading.bytes and both - alone > 2**28


LOOKED_UP = read_drafter(json.loads((folder_of(LOOKUP) / "config.json").read_text()), LOOKUP)
GGUF = published_target("Qwen/Qwen3.8-27B", quantization_config={"quant_method": "gguf", "type": "Q4_K"})


@pytest.mark.parametrize(
    ("target", "drafter", "config"),
    [
        (PLAIN, PLAIN_DRAFTER, ASKED),
        (GGUF, DRAFTER, ASKED),
        (TARGET, LAYER, ASKED),
        (TARGET, LOOKED_UP, ASKED),
        (TARGET, DRAFTER, replace(ASKED, draft=False)),
    ],
    ids=["another target", "GGUF", "the layer itself", "copies", "no drafts"],
)
def test_where_there_is_nothing_to_add_nothing_changes(
    target: ModelConfig, drafter: Drafter, config: LoadConfig
) -> None:
    asked = replace(config, mtp=True)
    assert plan(target, drafter, CARD, asked).ledger == plan(target, drafter, CARD, config).ledger
    assert drafters_of(target, drafter, asked) is (drafter if config.draft else None)


def test_a_cycle_runs_its_context_rows_through_the_layer_too() -> None:
    spec = engine_spec(DRAFTER, Load.of("cuda", ASKED, CONTEXT, DRAFTER.block_size))
    both = drafters_of(TARGET, DRAFTER, replace(ASKED, mtp=True))
    assert both is not None
    read = [sum(each.bytes * n for each, n in one.traffic(TARGET, spec).products.items()) for one in (DRAFTER, both)]
    assert read[1] - read[0] == BYTES * HIDDEN * (2 * HIDDEN + LAYER.attention.qkv_size)
    found = plan(TARGET, DRAFTER, CARD, replace(ASKED, mtp=True))
    one, two = (predict(replace(found, load=replace(found.load, mtp=mtp)), TARGET, DRAFTER) for mtp in (False, True))
    assert one is not None and two is not None
    assert one.times[0].step_ms == two.times[0].step_ms
    assert 0 < (one.times[0].cycle_ms or 0) < (two.times[0].cycle_ms or 0)
