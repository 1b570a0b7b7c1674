"""A layer for multi-token prediction in a target's checkpoint: how it is found, checked, and read in any format."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.shapes import shape
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.kinds import drafter_of_shape
from dflash_local.drafters.mtp.reference import MTPProposer
from dflash_local.engine import LoadConfig, load
from dflash_local.errors import CheckpointError, PairError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import PairFacts, check_pair, open_drafter
from tests.engine_sessions import ask, random_prompt
from tests.families import save_model
from tests.gguf_models import GOLDEN
from tests.mtp_checkpoints import add, config_of, own_pair, random_layer, save_quantized, save_target, split_experts
from tests.quantized_checkpoints import SIZES

CPU32 = LoadConfig(device="cpu", dtype="float32")
EXPERTS = "mtp.layers.0.mlp.experts"


def of_shape(name: str) -> Drafter:
    return drafter_of_shape(shape(name) or {}, name)


def checked(folder: Path, drafter: Path | None = None) -> PairFacts:
    return check_pair(Checkpoint.open(folder), open_drafter(drafter or folder))


def proposer_of(folder: Path) -> MTPProposer:
    found = load(own_pair(folder), CPU32).runner.proposer
    assert isinstance(found, MTPProposer)
    return found


def drop(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(names)}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "tensors"),
    [("Qwen/Qwen3.5-4B", 15), ("Qwen/Qwen3.5-9B", 15), ("Qwen/Qwen3.8-27B", 15), ("Qwen/Qwen3.5-35B-A3B", 19)],
)
def test_published_layers_have_as_many_parameters_as_quoted(name: str, tensors: int) -> None:
    config = of_shape(name)
    found = config.tensors(config.hidden_size or 0)
    assert len(found) == tensors
    assert sum(map(math.prod, found.values())) == (shape(name) or {})["_sizes"]["mtp_params"]


def test_it_taps_the_last_layer_and_drafts_four(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    facts = checked(folder)
    assert (facts.drafter.kind, facts.drafter.taps, facts.block_size) == ("mtp", (3,), 5)
    assert facts.drafter.draft_rows == facts.drafter.passes == 4 and facts.notices == ()
    assert config_of(folder).normed and facts.drafter.context_size == 2 * 2 * 8 + 32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mtp_block_size": 7}, "mtp_block_size 7 is outside 2..6"),
        ({"mtp_final_norm": "no"}, "mtp_final_norm must be true or false"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
    ],
)
def test_a_wrong_value_is_named(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        save_target("qwen3_5", tmp_path / "target", keys)
    assert caught.value.exit_code == 6


def test_a_target_without_the_layer_says_what_to_do(tmp_path: Path) -> None:
    folder = save_model("qwen3_5", tmp_path / "target")
    with pytest.raises(CheckpointError, match="has no tensors mtp") as caught:
        load(own_pair(folder), CPU32)
    assert caught.value.exit_code == 6 and "name the original checkpoint" in (caught.value.hint or "")
    original = save_target("qwen3_5", tmp_path / "original")
    assert checked(folder, original).drafter.kind == "mtp"


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_gguf_file_takes_the_layer_of_its_original(engine: str) -> None:
    file = GOLDEN / "qwen35.gguf"
    with pytest.raises(CheckpointError, match="kind mtp is not read out of a GGUF file") as caught:
        checked(file)
    assert "--drafter" in (caught.value.hint or "")
    session = load(Pair("x", file, GOLDEN / "qwen35", bundled=False), replace(CPU32, engine=engine))
    replies = [ask(session, random_prompt(9), 12, mode=mode).ids for mode in ("ar", "dflash")]
    assert session.facts.block_size == 5 and replies[0] == replies[1]


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    norm, query = "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight"
    drop(folder, norm)
    with pytest.raises(CheckpointError, match=f"1 of 15 tensors are missing: {norm}"):
        checked(folder)
    add(folder, {norm: torch.zeros(32), query: torch.zeros(32, 32)})
    with pytest.raises(CheckpointError, match=r"q_proj.weight has shape \[32, 32\], expected \[64, 32\]"):
        checked(folder)
    add(folder, {query: torch.zeros(64, 32), "mtp.embed_tokens.weight": torch.zeros(96, 32)})
    with pytest.raises(CheckpointError, match="does not have: mtp.embed_tokens.weight"):
        checked(folder)


def test_the_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    one, other = save_target("qwen3_5", tmp_path / "one"), save_target("qwen3_5", tmp_path / "other", **SIZES)
    with pytest.raises(PairError, match="the drafter expects target hidden size 64, the target has 32"):
        checked(one, other)


def test_each_expert_may_have_tensors_of_its_own(tmp_path: Path) -> None:
    folder, apart = (save_target("qwen3_5_moe", tmp_path / name) for name in ("fused", "apart"))
    split_experts(apart)
    one, two = (proposer_of(each).layer.state_dict() for each in (folder, apart))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    drop(apart, f"{EXPERTS}.5.up_proj")
    with pytest.raises(CheckpointError, match=f"1 of 41 tensors are missing: {EXPERTS}.5.up_proj.weight"):
        checked(apart)


@pytest.mark.parametrize(
    ("family", "dialect"),
    [*(("qwen3_5", each) for each in ("fp8", "modelopt_nvfp4", "pack_quantized")), ("qwen3_5_moe", "fp8")],
)
def test_quantised_layers_are_decoded_as_their_targets(family: str, dialect: str, tmp_path: Path) -> None:
    """In a file of codes the fc stays plain, and so may all of the layer."""
    coded, twin = save_quantized(family, dialect, tmp_path)
    own, layer = (proposer_of(each).layer.state_dict() for each in (twin, coded))
    stored = load_file(coded / "model.safetensors")
    assert "mtp.layers.0.self_attn.q_proj.weight" not in stored or dialect.endswith(("fp8", "nvfp4"))
    assert all(torch.equal(layer[name], own[name]) for name in own)
    plain = random_layer(config_of(twin), 64, seed=5)
    drop(coded, "mtp.")
    add(coded, plain)
    layer = proposer_of(coded).layer.state_dict()
    assert all(torch.equal(layer[name.removeprefix("mtp.")], each) for name, each in plain.items())


def test_a_random_layer_drafts(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    session = load(own_pair(folder), CPU32)
    made = session.runner.proposer
    expected = ask(session, random_prompt(9), 12).ids
    session.runner.proposer = MTPProposer.random(made.config, made.target)
    session.reset()
    assert ask(session, random_prompt(9), 12).ids == expected
