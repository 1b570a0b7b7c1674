"""gpt-oss's mixture as a part of the fused engine: against transformers' own router and experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.config.features import ClampedSwiGLU, MoEConfig
from dflash_local.errors import CheckpointError
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.delta_step import CycleState
from dflash_local.kernels.quantized_weight import Fp4Weight
from dflash_local.layout.linear import FormatOf, unquantized
from dflash_local.layout.moe import MoELayout
from dflash_local.layout.part_layout import EngineSpec, WeightSpec
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places
from dflash_local.models.fused.moe import MoE, MoEWeights
from dflash_local.models.fused.part import RunState
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.stored_formats import formats_in
from dflash_local.models.target_facts import TargetFacts
from tests.both_engines import reference
from tests.families import random_model
from tests.models.test_moe import by_both
from tests.quantized_checkpoints import experts_in_mxfp4, rewritten

CPU = torch.device("cpu")
WIDTH, INNER, EXPERTS, CHOSEN, ROWS = 64, 96, 4, 2, 8
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "head_dim": 16}
AT = "model.layers.1.mlp"


def built(folder: Path, changes: dict[str, Any]) -> Any:
    """A random model, saved as it is."""
    model = random_model("gpt_oss", **{**SIZES, **changes})
    model.save_pretrained(folder)
    return model


def read(folder: Path) -> MoE:
    """The mixture of layer 1, from its tensors in the files."""
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    config = facts.model.layers[1].mlp
    assert isinstance(config, MoEConfig)
    weights = allocated(config, checkpoint.tensors, formats_in(checkpoint, facts.model.quantization))
    fill_places(checkpoint, [name for name in checkpoint.tensors if name.startswith(AT)], weights.places)
    weights.finish()
    run = EngineSpec("float32", 64, ROWS)
    start = torch.zeros(1, dtype=torch.int32)
    layout = MoELayout(config)
    buffers = Tensors([*layout.activations("target", run), *layout.state(AT, run)], CPU)
    return weights.bind(AT, RunState("target", buffers, run, start, CycleState(start, start)))


def allocated(config: MoEConfig, stored: Any = (), format_of: FormatOf = unquantized) -> MoEWeights:
    spec = WeightSpec(WIDTH, "float32", False, format_of)
    return MoEWeights.of(
        config, AT, WeightTensors(Tensors(MoELayout(config).weights(AT, spec), CPU), spec, 1e-6, stored)
    )


def in_mxfp4(folder: Path, model: Any) -> None:
    """Store random codes in place of the experts, and give the model what they stand for."""
    for name, meant in experts_in_mxfp4(folder).items():
        model.get_parameter(name).copy_(meant)


@torch.no_grad()
@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("changes", [{}, {"swiglu_alpha": 1.2, "swiglu_limit": 0.5}])
def test_a_part_is_transformers_own(changes: dict[str, Any], mxfp4: bool, tmp_path: Path) -> None:
    model = built(tmp_path, changes)
    if mxfp4:
        in_mxfp4(tmp_path, model)
    part, own = read(tmp_path), model.model.layers[1].mlp
    assert part.weights.config.activation == ClampedSwiGLU(
        changes.get("swiglu_alpha", 1.702), changes.get("swiglu_limit", 7.0)
    )
    assert isinstance(part.weights.experts.gate_up.weight, Fp4Weight if mxfp4 else torch.Tensor)
    for rows, scale in ((1, 1.0), (ROWS, 1.0), (ROWS, 30.0)):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)) * scale
        want = own(x.unsqueeze(0))[0][0]
        for found in by_both(part, x):
            assert torch.allclose(found, want, atol=1e-5 * scale, rtol=1e-4)


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    model = built(tmp_path, {})
    with torch.no_grad():
        in_mxfp4(tmp_path, model)
    with rewritten(tmp_path) as tensors:
        tensors[f"{AT}.experts.gate_up_proj_scales"][1, 2, 0] = 255
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj_scales holds NaN"):
        read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_engine_decodes_experts_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    built(tmp_path, {})
    meant = experts_in_mxfp4(tmp_path)
    found = reference(tmp_path, dtype).state_dict()
    assert meant and all(torch.equal(found[name].float(), each) for name, each in meant.items())


@pytest.mark.parametrize("name", ["(a+)+$", "model.*.*.*.x"])
def test_names_of_modules_are_no_regular_expressions(name: str, tmp_path: Path) -> None:
    """transformers takes them for some, and matches each module with each."""
    built(tmp_path, {})
    experts_in_mxfp4(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"leaves out '{re.escape(name)}', which is no name of a module"):
        reference(tmp_path)
