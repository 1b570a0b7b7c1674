"""Faults planted into loaded targets of true shape: the layers' check names each in its line, and no sound target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.random_checkpoint import build
from dflash_local.catalog.bundled import Pair
from dflash_local.check.layers import check_layers
from dflash_local.check.products import check_products
from dflash_local.engine.load_pair import load
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused.target import FusedTarget
from tests.check import faults

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LAYERS = 4  # one period of the hybrids
Planted = tuple[Callable[[FusedTarget], None], str]

DENSE: tuple[Planted, ...] = (
    (faults.drop_plus_one_of_the_mlp, "layer 2 (MLP)"),
    (faults.change_rope_base, "layer 0 (attention)"),
    (faults.swap_gate_and_up, "layer 2 (MLP)"),
    (faults.scale_embedding, "the embedding"),
    (faults.lose_final_norm, "the final norm"),
    (faults.untie_head, "the head"),
)
HYBRID: tuple[Planted, ...] = (
    (faults.drop_plus_one, "layer 1 (Gated-DeltaNet)"),
    (faults.drop_plus_one_of_the_mlp, "layer 2 (MLP)"),
    (faults.change_rope_base, "layer 3 (attention)"),
    (faults.lose_final_norm, "the final norm"),
)
MIXTURE: tuple[Planted, ...] = (
    (faults.permute_experts, "layer 1 (256 of 256 experts)"),
    (faults.permute_rows_of_an_expert, "layer 2 (expert 5)"),
    (faults.forget_to_norm_chosen, "layer 1 (mixture of experts)"),
)
CASES: tuple[tuple[str, str | None, tuple[Planted, ...]], ...] = (
    ("qwen3-8b", None, DENSE),
    ("llama3.1-8b", None, ((faults.change_rope_base, "layer 0 (attention)"),)),
    ("qwen3.5-9b", None, HYBRID),
    ("qwen3.5-9b", "int4-g128", ((faults.swap_nibbles, "layer 1 (MLP)"),)),
    ("qwen3.5-9b", "autoround-g128", ((faults.lose_negative_scales, "layer 3 (attention)"),)),
    ("qwen3.5-35b-a3b", None, MIXTURE),
    ("qwen3.5-35b-a3b", "int4-g128", ((faults.swap_nibbles_of_an_expert, "layer 1 (expert 7)"),)),
    (
        "gpt-oss-20b",
        None,
        (
            (faults.ignore_window, "layer 2 (sliding-window attention)"),
            (faults.swap_nibbles_of_an_expert, "layer 1 (expert 7)"),
            (faults.double_scales_of_two_experts, "layer 0 (experts 0, 6)"),
        ),
    ),
)


@pytest.mark.parametrize(("model", "stored", "planted"), CASES, ids=[f"{m} {s or 'published'}" for m, s, _ in CASES])
def test_a_fault_of_a_target_of_true_shape_is_named(
    model: str, stored: str | None, planted: tuple[Planted, ...]
) -> None:
    with TemporaryDirectory() as folder:
        build(model, Path(folder), layers=LAYERS, stored=stored)
        pair = Pair(model, Path(folder, "target"), Path(folder, "drafter"), bundled=False)
        for plant, word in ((None, ""), *planted):
            session = load(pair, LoadConfig(device="cuda", engine="fused", context=512, skip_check=True))
            try:
                if plant is None:
                    products = check_products(session)
                    assert products.state == "ok", products.text
                else:
                    target: Any = session.runner.target
                    plant(target)
                found = check_layers(session, pair).finding()
            finally:
                session.close()
            if plant is None:
                assert found.state == "ok", found.text
            else:
                assert found.state == "failed" and f"{word} differs" in found.text, found.text
