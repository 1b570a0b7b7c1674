"""DSpark drafters: the configuration, published shapes to the parameter, and a block by the definition spelled out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.shapes import shape
from dflash_local.drafters.dflash.reference import DrafterModel
from dflash_local.drafters.dspark.layout import CONFIDENCE, EMBEDDING, FOLLOWING, HEAD, PREVIOUS, DSparkConfig
from dflash_local.drafters.dspark.reference import own_tables
from dflash_local.errors import CheckpointError, PairError
from dflash_local.kernels.choose import best_with_margin
from dflash_local.kernels.markov_walk import MarkovWeights, walk
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import check_pair
from tests.drafter_configs import decoder_of_shape, read_decoder
from tests.dspark_checkpoints import DRAFTS, HIDDEN, TARGET, VOCAB, raw, save_drafter, without_confidence
from tests.models.test_drafter import naive

HERE = Path("some/config.json")


def read(nested: dict[str, Any] | None = None, **changes: Any) -> DSparkConfig:
    found = read_decoder(raw(nested, **changes), HERE)
    assert isinstance(found, DSparkConfig)
    return found


def test_a_block_of_so_many_drafts_is_verified_with_its_anchor() -> None:
    config = read()
    assert (config.block_size, config.draft_rows, config.first_draft) == (DRAFTS + 1, DRAFTS, 0)
    assert config.fingerprint()["block"] == DRAFTS and config.causal == (False, False)
    assert (config.vocab_size, config.markov_rank, config.confidence_inputs) == (VOCAB, 12, HIDDEN + 12)
    assert read(confidence_head_with_markov=False).confidence_inputs == HIDDEN
    assert read(enable_confidence_head=False, markov_rank=0) == replace(config, markov_rank=0, confidence_inputs=0)
    assert read(layer_types=["sliding_attention"] * 2, sliding_window=24).causal == (False, False)


def test_specforge_has_the_same_under_another_name() -> None:
    assert read({}) == read() and read({"block_size": 5}).draft_rows == 5


def test_published_drafters_have_as_many_parameters_as_quoted() -> None:
    """2.8 GB and 64 tensors are quoted for Qwen3-4B's, and to the parameter what RadixArk's has, without the tables."""
    name = "deepseek-ai/dspark_qwen3_4b_block7"
    config = decoder_of_shape(shape(name) or {}, name)
    whole = {**config.tensors(2560), **config.optional_tensors()}
    assert len(whole) == 64 and 2 * sum(map(math.prod, whole.values())) / 1e9 == pytest.approx(2.8, abs=0.05)
    name = "RadixArk/Qwen3.8-27B-DSpark"
    config = decoder_of_shape(shape(name) or {}, name)
    found = {**config.tensors(5120), **config.optional_tensors()}
    assert sum(math.prod(size) for each, size in found.items() if each not in (EMBEDDING, HEAD)) == 1_359_284_737


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another head": ({"markov_head_type": "gated"}, "markov_head_type 'gated' is not supported"),
    "DeepSeek's layers": ({"model_type": "deepseek_v4"}, "of model_type 'deepseek_v4' is not supported"),
    "Gemma's layers": ({"architectures": ["Gemma4DSparkModel"]}, "is a dspark drafter of other layers"),
    "speculators": ({"transformer_layer_config": {}}, "in the layout of speculators is not supported"),
    "rows as DFlash": ({"sample_from_anchor": False}, "sample_from_anchor False is not supported"),
    "causal": ({"is_causal": True}, "is_causal True is not supported"),
    "fewer drafted ids": ({"draft_vocab_size": 64}, "draft_vocab_size 64 is not its vocab_size 96"),
    "rank": ({"markov_rank": 10**6}, "markov_rank 1000000 is outside 0..4096"),
    "the embedding as a tap": ({"target_layer_ids": [-1, 2]}, "target_layer_ids -1 is outside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_another_layout_is_refused_in_a_line(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        read(**changes)
    assert str(HERE) in caught.value.message and caught.value.exit_code == 6


@pytest.mark.parametrize("length", [1, 9, 40])
def test_a_block_is_what_its_definition_says(length: int, tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw())
    drafter, tensors = DrafterModel.load(Checkpoint.open(folder)), load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(length)
    taps, block = torch.randn(length, 3 * HIDDEN, generator=generator), torch.randn(DRAFTS, HIDDEN, generator=generator)
    cache = drafter.new_cache(capacity=4)
    drafter.write_context(cache, taps, 0)
    found = drafter.draft_hidden(cache, block, length)
    config = drafter.config
    torch.testing.assert_close(found.double(), naive(tensors, config, taps, block), atol=1e-4, rtol=1e-4)
    assert (found[:-1] - naive(tensors, config, taps, block[:-1])).abs().max() > 1e-3, "earlier rows see later ones"


@pytest.mark.parametrize("ids", [20, 15])
def test_each_draft_is_chosen_by_its_row_and_the_one_before(ids: int) -> None:
    """A target may have fewer ids than the head."""
    generator = torch.Generator().manual_seed(ids)
    first, second = torch.randn(20, 3, generator=generator), torch.randn(20, 3, generator=generator)
    logits, before, expected = torch.randn(7, ids, generator=generator), 4, []
    for row in range(7):
        before = max(range(ids), key=lambda i: float(logits[row, i] + first[before] @ second[i]))  # noqa: B023
        expected.append(before)
    head, anchor = MarkovWeights(first, second), torch.tensor([4])
    found, _ = walk(logits, head, anchor, lambda row, scores: best_with_margin(scores))
    assert found.tolist() == expected != logits.argmax(-1).tolist()
    assert walk(logits[:0], head, anchor, lambda row, scores: best_with_margin(scores))[0].shape == (0,)


@pytest.mark.parametrize("with_markov", [True, False])
def test_the_confidence_head_reads_the_row_and_the_id_before(with_markov: bool, tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw(confidence_head_with_markov=with_markov))
    tensors = load_file(folder / "model.safetensors")
    found = own_tables(Checkpoint.open(folder), None, None, torch.device("cpu"), torch.float32).confidence
    assert found is not None
    hidden, before = torch.randn(3, HIDDEN), tensors[PREVIOUS][[5, 9, 5]]
    weight, bias = tensors[f"{CONFIDENCE}.weight"][0], tensors[f"{CONFIDENCE}.bias"]
    wanted = hidden @ weight[:HIDDEN] + bias
    if with_markov:
        wanted += before @ weight[HIDDEN:]
    torch.testing.assert_close(found.log_odds(hidden, before), wanted)
    without_confidence(folder)
    assert own_tables(Checkpoint.open(folder), None, None, torch.device("cpu"), torch.float32).confidence is None


@pytest.mark.parametrize("change", ["none", "embedding", "head", "shape"])
def test_tables_that_are_the_targets_are_not_kept_twice(change: str, tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw())
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors[EMBEDDING].clone(), tensors[HEAD].clone()
    if change == "embedding":
        embedding[3, 4] += 1
    elif change != "none":
        head = head[:-1] if change == "shape" else 2 * head
    own = own_tables(Checkpoint.open(folder), embedding, head, torch.device("cpu"), torch.bfloat16)
    assert (own.embedding is not None) == (change == "embedding")
    assert (own.head is not None) == (change in ("head", "shape"))
    for found, name in ((own.embedding, EMBEDDING), (own.head, HEAD)):
        assert found is None or torch.equal(found, tensors[name].bfloat16())


def test_an_embedding_has_a_row_for_each_id_of_the_target(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw())
    tensors, cpu = load_file(folder / "model.safetensors"), torch.device("cpu")
    padded = torch.cat((tensors[EMBEDDING], torch.full((4, HIDDEN), 3.0)))
    own = own_tables(Checkpoint.open(folder), padded, tensors[HEAD], cpu, torch.float32)
    assert own.embedding is not None and torch.equal(own.embedding, padded) and own.head is None


def checked(drafter: Path) -> None:
    check_pair(Checkpoint.open(TARGET), Checkpoint.open(drafter))


def test_files_with_and_without_what_drafting_does_without_pass(tmp_path: Path) -> None:
    for name, tables in (("whole", True), ("lean", False)):
        checked(save_drafter(tmp_path / name, raw() if tables else raw({}), tables=tables))
        without_confidence(tmp_path / name)
        checked(tmp_path / name)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw())
    whole = load_file(folder / "model.safetensors")
    for name, tensor, message in (
        ("markov_head.gate_proj.weight", torch.zeros(12, 76), "tensors that a DFlash drafter does not have"),
        (EMBEDDING, torch.zeros(95, HIDDEN), r"embed_tokens.weight has shape \[95, 64\], expected \[96, 64\]"),
        (FOLLOWING, torch.zeros(VOCAB, 13), r"markov_w2.weight has shape \[96, 13\], expected \[96, 12\]"),
    ):
        save_file({**whole, name: tensor}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            checked(folder)
    save_file({name: tensor for name, tensor in whole.items() if name != PREVIOUS}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensors are missing: markov_head.markov_w1.weight"):
        checked(folder)


def test_a_head_of_fewer_ids_than_the_target_has_is_refused(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw(), tables=False)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name][:95].clone() for name in (PREVIOUS, FOLLOWING)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw(vocab_size=95)))
    with pytest.raises(PairError, match="the drafter's Markov head has 95 rows, the target's vocabulary 96 ids"):
        check_pair(Checkpoint.open(TARGET), Checkpoint.open(folder), allow_mismatch=True)
