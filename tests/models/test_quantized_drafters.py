"""Quantized drafters: they draft as the plain weights that their codes stand for, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.bundled import find
from dflash_local.drafters.dflash.reference import DrafterModel
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_tensors import coded_matrices
from dflash_local.models.drafter_weights import MATRICES, random_on_device, with_matrices
from dflash_local.models.fused.formats import format_of
from dflash_local.models.pair import check_pair
from tests.drafter_configs import read_decoder
from tests.engine_sessions import ask
from tests.quantized_checkpoints import CODED, DIALECTS, quantize_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
DFLASH, DFLASH2 = "qwen3-v1-b8", "qwen3-dflash2-b8"
PARTS = (*CODED, "fc")
CPU32 = LoadConfig(dtype="float32", device="cpu")
# As the published W4A16 drafter of Qwen3.8-27B has it.
IGNORED = ["re:.*kernel_projection$", "re:.*candidate_selector.*", "re:.*hidden_projection$"]


def quantized(
    pair: str, folder: Path, dialect: str = "pack_quantized", coded: Any = PARTS, **changes: Any
) -> tuple[Path, Path]:
    """A golden pair's drafter quantized, and the plain weights that it stands for."""
    twin = folder / "twin"
    shutil.copytree(GOLDEN / pair / "drafter", twin)
    config = json.loads((twin / "config.json").read_text())
    quantize_checkpoint(twin, folder / "quantized", dialect, coded=coded, changes=changes)
    assert json.loads((folder / "quantized" / "config.json").read_text()).keys() - config.keys()
    return folder / "quantized", twin


def rows(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a drafter makes of some context and a block."""
    drafter = DrafterModel.load(Checkpoint.open(folder), dtype=dtype)
    config, generator = drafter.config, torch.Generator().manual_seed(4)
    cache = drafter.new_cache()
    taps = torch.randn(9, len(config.taps) * config.hidden_size, generator=generator)
    drafter.write_context(cache, taps.to(dtype), 0)
    block = torch.randn(config.block_size, config.hidden_size, generator=generator)
    return drafter.draft_hidden(cache, block.to(dtype), 9)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def checked(drafter: Path, pair: str = DFLASH) -> None:
    check_pair(Checkpoint.open(GOLDEN / pair / "target"), Checkpoint.open(drafter))


@pytest.mark.parametrize(("dialect", "pair"), list(zip(DIALECTS, cycle((DFLASH, DFLASH2)))))
def test_it_drafts_as_the_weights_that_its_codes_stand_for(dialect: str, pair: str, tmp_path: Path) -> None:
    folder, twin = quantized(pair, tmp_path, dialect)
    assert torch.equal(rows(folder), rows(twin))
    assert not torch.equal(rows(folder), rows(GOLDEN / pair / "drafter"))
    checked(folder, pair)


def published(bits_of_fc: int) -> Mapping[str, Any]:
    """The quantization_config that the published W4A16 drafters' recipe writes, in groups of 32 for a tiny one."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "memoryless_minmax", "strategy": "group", "symmetric": True, "type": "int", "zp_dtype": None,
    }  # fmt: skip
    group = {"format": "pack-quantized", "input_activations": None, "targets": ["Linear"], "weights": weights}
    groups = {"group_0": group}
    if bits_of_fc == 8:
        groups["group_1"] = {**group, "targets": [r"re:.*\.fc$"], "weights": {**weights, "num_bits": 8}}
    return {
        "config_groups": groups, "ignore": [*IGNORED, *([r"re:.*\.fc$"] if bits_of_fc == 16 else [])],
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "version": "0.17.0",
    }  # fmt: skip


@pytest.mark.parametrize("bits_of_fc", [8, 16])
def test_the_published_recipe_is_read(bits_of_fc: int, tmp_path: Path) -> None:
    """Whose patterns name the modules as servers do, below ``model.``; the file's own names have no prefix."""
    coded = dict.fromkeys(CODED, "pack_quantized")
    if bits_of_fc < 16:
        coded["fc"] = "pack_quantized" if bits_of_fc == 4 else "pack_quantized_8"
    folder, twin = quantized(DFLASH2, tmp_path, coded=coded, **published(bits_of_fc))
    assert torch.equal(rows(folder), rows(twin))
    files = Checkpoint.open(folder)
    config = read_decoder(files.config, folder)
    found = coded_matrices(files, config)
    assert len(found) == 7 * config.num_layers + (bits_of_fc < 16)
    assert not any("conv" in module or "selector" in module for module in found)
    assert found["layers.0.mlp.up_proj"].name == "int4 g32"
    assert bits_of_fc == 16 or found["fc"].name == f"int{bits_of_fc} g32"
    checked(folder, DFLASH2)


def fused(pair: str, drafter: Path, **options: Any) -> Session:
    return load(find(str(GOLDEN / pair / "target"), str(drafter)), replace(CPU32, engine="fused", **options))


def kept(session: Session) -> list[bool]:
    """Of each of the drafter's products, whether it multiplies codes."""
    proposer = cast(FusedRunner, session.runner).proposer
    assert proposer is not None
    return [not isinstance(product.weight, torch.Tensor) for product in proposer.matrices]


# Every way codes are kept; the dialects that share one are read as those of targets are.
WAYS = ("pack_quantized", "pack_quantized_8", "awq", "gptq_zeros", "fp8", "nvfp4_pack_quantized")


@pytest.mark.parametrize(("dialect", "pair"), list(zip(WAYS, cycle((DFLASH, DFLASH2)))))
def test_the_fused_engine_multiplies_its_codes(pair: str, dialect: str, tmp_path: Path) -> None:
    """All but the projections of convolutions and selector, which no recipe codes; and in what it drafts."""
    folder, twin = quantized(pair, tmp_path, dialect)
    case = json.loads((GOLDEN / pair / "expected.json").read_text())["cases"][0]
    found = []
    for drafter in (folder, twin):
        session = fused(pair, drafter)
        reply = ask(session, case["prompt_ids"], 30)
        assert reply.ids == ask(session, case["prompt_ids"], 30, mode="ar").ids
        found.append((reply.ids, reply.finished.stats.acceptance_lengths))
        layers = 2
        plain = 0 if pair == DFLASH else 2 * layers + 1
        assert sum(kept(session)) == (4 * layers + 2 if drafter == folder else 0)
        assert len(kept(session)) == 4 * layers + 2 + plain
    assert found[0] == found[1]


def test_random_weights_are_in_the_drafters_own_formats() -> None:
    """As a benchmark measures them."""
    values = json.loads((GOLDEN / DFLASH2 / "drafter" / "config.json").read_text())
    stored = {"quant_method": "compressed-tensors", "format": "pack-quantized", **published(4)}
    config = read_decoder({**values, "quantization_config": stored}, "x")
    weights = random_on_device(config, 64, torch.device("cpu"), torch.float32)
    codes = [weights.fc, weights.context_kv, *(getattr(layer, name) for layer in weights.layers for name in MATRICES)]
    assert not any(isinstance(weight, torch.Tensor) for weight in codes)
    plain = with_matrices(weights, lambda weight: weight if isinstance(weight, torch.Tensor) else decoded(weight))
    drafter = DrafterModel(config, plain)
    cache = drafter.new_cache()
    taps = torch.randn(9, len(config.taps) * 64, generator=torch.Generator().manual_seed(4))
    drafter.write_context(cache, taps, 0)
    found = drafter.draft_hidden(cache, torch.randn(config.block_size, 64), 9)
    assert torch.isfinite(found).all() and found.std() > 0.1


def decoded(weight: Any) -> torch.Tensor:
    """By its product with the unit matrix."""
    return format_of(weight).prefill(torch.eye(weight.shape[1]), weight).T.contiguous()


def test_eight_bits_are_for_what_is_plain(tmp_path: Path) -> None:
    folder, _ = quantized(DFLASH2, tmp_path)
    session = fused(DFLASH2, folder, drafter_precision="8bit")
    assert all(kept(session))
    proposer = cast(FusedRunner, session.runner).proposer
    assert proposer is not None
    case = json.loads((GOLDEN / DFLASH2 / "expected.json").read_text())["cases"][0]
    assert ask(session, case["prompt_ids"], 30).ids == ask(session, case["prompt_ids"], 30, mode="ar").ids


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scales": (lambda t: t.pop("layers.1.mlp.up_proj.weight_scale"), "lacks the tensor layers.1.mlp.up_proj.weight"),
    "no codes": (lambda t: t.pop("fc.weight_packed"), "fc.weight"),
    "more tensors": (lambda t: t.update({"fc.extra": torch.zeros(1)}), "fc.extra"),
    "other scales": (
        lambda t: t.update({"layers.0.self_attn.q_proj.weight_scale": torch.zeros(64, 3)}),
        r"q_proj.weight_scale has shape \[64, 3\], expected \[64, 2\]",
    ),
    "codes of another width": (
        lambda t: t.update({"layers.0.mlp.down_proj.weight_packed": torch.zeros(64, 8, dtype=torch.int32)}),
        r"down_proj.weight_packed has shape \[64, 8\], expected \[64, 16\]",
    ),
    "codes that are numbers": (
        lambda t: t.update({"layers.0.mlp.up_proj.weight_packed": torch.zeros(128, 8)}),
        "up_proj.weight_packed is stored as F32, expected torch.int32",
    ),
    "no norm": (lambda t: t.pop("norm.weight"), "1 of 10 tensors are missing: norm.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_by_the_headers_alone_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    folder, _ = quantized(DFLASH, tmp_path)
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        checked(folder)
    with pytest.raises(CheckpointError, match=message):
        DrafterModel.load(Checkpoint.open(folder))


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder, _ = quantized(DFLASH, tmp_path)
    edit(folder, lambda t: t["fc.weight_scale"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="tensor fc.weight_scale in .* holds NaN or infinity"):
        DrafterModel.load(Checkpoint.open(folder))


def test_a_configuration_of_codes_is_no_matter_where_the_weights_are_plain(tmp_path: Path) -> None:
    """A drafter's config.json often begins as a copy of its target's, which may be quantized."""
    for number, dialect in enumerate([{"quant_method": "mxfp4"}, DIALECTS["fp8"].config]):
        folder = tmp_path / str(number)
        shutil.copytree(GOLDEN / DFLASH / "drafter", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(dialect)}))
        checked(folder)
        assert torch.equal(rows(folder), rows(GOLDEN / DFLASH / "drafter"))


UNREAD: dict[str, tuple[object, str]] = {
    "3 bits": ({"quant_method": "gptq", "bits": 3}, "a drafter in the format gptq in 3 bits is not supported"),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"},
        "a drafter in the format bnb-nf4 is not supported",
    ),
    "no object": ([4], "quantization_config must be an object"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_format_that_is_not_read_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    settings, message = UNREAD[name]
    shutil.copytree(GOLDEN / DFLASH / "drafter", tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    with pytest.raises(CheckpointError, match=message) as caught:
        checked(tmp_path / "drafter")
    assert str(file) in caught.value.message and caught.value.message.isprintable() and caught.value.exit_code == 6
