"""gpt-oss as it is published: experts in MXFP4, decoded to 16 or 32 bits at load, exactly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.errors import CheckpointError
from tests.engine_sessions import ask, random_prompt
from tests.families import save_model
from tests.quantised_checkpoints import Tensors, experts_in_mxfp4

SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A random target whose experts are codes, and what these stand for."""
    folder = save_model("gpt_oss", tmp_path_factory.mktemp("gpt-oss"), **SIZES)
    return folder, experts_in_mxfp4(folder)


@pytest.fixture
def folder(stored: tuple[Path, Tensors]) -> Path:
    return stored[0]


def opened(folder: Path, dtype: str) -> Session:
    return load(find(str(folder)), LoadConfig(dtype=dtype, device="cpu", draft=False))


@pytest.mark.parametrize("name", ["(a+)+$", "model.*.*.*.x"])
def test_names_of_modules_are_no_regular_expressions(name: str, folder: Path, tmp_path: Path) -> None:
    """transformers takes them for some, and matches each module with each."""
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(name)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"leaves out '{re.escape(name)}', which is no name of a module"):
        opened(tmp_path / "other", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_experts_are_decoded_exactly(stored: tuple[Path, Tensors], dtype: str) -> None:
    folder, meant = stored
    model = opened(folder, dtype).runner.target.model
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            prefix = f"model.layers.{index}.mlp.experts.{name}"
            got = getattr(layer.mlp.experts, name)
            assert got.dtype == getattr(torch, dtype)
            assert torch.equal(got.float(), meant[prefix]), prefix


def test_mxfp4_target_decodes_text(folder: Path) -> None:
    session = opened(folder, "float32")
    prompt = random_prompt(9)
    ids = list(prompt)
    model = session.runner.target.model
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert ask(session, prompt, 12, mode="ar").ids == ids[len(prompt) :]
