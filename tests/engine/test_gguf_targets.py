"""Targets in GGUF files: the fused engine keeps their blocks, and writes what the reference engine writes, decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks import random_checkpoint
from dflash_local.catalog.bundled import Pair
from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.engine import LoadConfig, load
from dflash_local.kernels.quantized_weight import GgufWeight
from dflash_local.models.fused.gated_delta_net import GatedDeltaNetWeights
from dflash_local.request import Limits, Request
from tests.both_engines import PROMPT, fused, reference, weights_of
from tests.engine_sessions import Reply
from tests.gguf_models import MODELS, all_of, mixed, write_model


def check_engines(file: Path) -> None:
    """Of a prompt, and of single rows and blocks behind it."""
    text = torch.cat((PROMPT, PROMPT.flip(0)))
    with torch.inference_mode():
        expected = reference(file)(input_ids=text[None], use_cache=False).logits[0]
        model = fused(file)
        rows = [model.prefill(PROMPT, False).hidden]
        for part in text[len(PROMPT) :].split((1, 1, 4, 1, 4)):
            rows.append(model.verify(part, False).hidden)
            model.commit(len(part))
        found = model.head(torch.cat(rows))
    assert expected.std() > 0.5 and expected.std(0).mean() > 0.05  # by ids, and by positions
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", GGUF_TYPES)
def test_engines_agree_on_every_type(dtype: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", all_of(dtype))
    weights, facts = weights_of(file)
    assert facts.model.quantization is not None and facts.model.quantization.name == dtype
    kept = {type(product.weight).__name__ for product in weights.products}
    assert kept == {"IntWeight" if dtype in ("Q4_0", "Q8_0") else "Fp4Weight" if dtype == "MXFP4" else "GgufWeight"}
    check_engines(file)


@pytest.mark.parametrize("name", MODELS[1:])
def test_engines_agree_on_every_architecture(name: str, tmp_path: Path) -> None:
    """Rows of queries and of Gated DeltaNet are put in order in their blocks; experts are cut out of stacked ones."""
    file = write_model(tmp_path / "model.gguf", name, mixed)
    weights, facts = weights_of(file)
    assert facts.model.quantization is not None
    assert set(facts.model.quantization.name.split(" and ")) == {"Q4_K", "Q6_K", "Q8_0"}
    assert any(isinstance(product.weight, GgufWeight) for product in weights.products)
    if name.startswith("qwen35"):  # three value heads of 128 columns to each of two key heads, in super-blocks of 256
        mixer = weights.layers[0].mixer
        assert isinstance(mixer, GatedDeltaNetWeights) and mixer.turns == 3
        assert isinstance(mixer.output.products[0].weight, GgufWeight)
    check_engines(file)


@pytest.mark.parametrize("dtype", ["Q4_K", "Q6_K", "Q5_1", "MXFP4"])
def test_rows_that_go_by_key_heads_are_put_in_order_with_all_that_is_beside_them(dtype: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "qwen3next", all_of(dtype))
    mixer = weights_of(file)[0].layers[0].mixer
    assert isinstance(mixer, GatedDeltaNetWeights) and not mixer.config.split_projections
    assert not isinstance(mixer.in_proj.products[0].weight, torch.Tensor)
    check_engines(file)


@pytest.mark.parametrize(
    "model", ["qwen3-8b", "qwen3.5-9b", pytest.param("Qwen3-Coder-30B-A3B", marks=pytest.mark.slow)]
)
def test_sessions_write_the_same_with_a_drafter_and_without(model: str, tmp_path: Path) -> None:
    """Pairs of toy widths, whose random drafters are never right."""
    random_checkpoint.build(model, tmp_path, layers=4, tiny=True, device="cpu", stored="q4_1")
    pair = Pair("random", tmp_path / "target", tmp_path / "drafter", bundled=False)
    replies = []
    modes: tuple[tuple[str, Literal["dflash", "ar"]], ...] = (("fused", "dflash"), ("fused", "ar"), ("reference", "ar"))
    for engine, mode in modes:
        config = LoadConfig(device="cpu", dtype="float32", context=128, engine=engine)
        session = load(pair, config)
        assert session.facts.loaded_as.startswith("fused Q4_1 and Q8_0" if engine == "fused" else "reference")
        request = Request(prompt_ids=tuple(range(5, 25)), mode=mode, limits=Limits(max_new_tokens=16))
        replies.append(Reply(list(session.generate(request))).ids)
        session.close()
    assert replies[0] == replies[1] == replies[2] and len(replies[0]) == 16


@pytest.mark.parametrize("dtype", ["Q8_0", "Q6_K"])
def test_an_embedding_that_is_the_head_stays_in_blocks(dtype: str, tmp_path: Path) -> None:
    """Once, for its rows and for the logits."""
    file = write_model(tmp_path / "model.gguf", "qwen3", all_of(dtype), tied=True)
    weights, facts = weights_of(file)
    assert facts.model.tie_word_embeddings and weights.head is weights.table
    assert not isinstance(weights.embedding, torch.Tensor) and weights.measured[-1] is weights.head
    check_engines(file)
