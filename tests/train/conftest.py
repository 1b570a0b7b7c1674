"""The shipped pairs, loaded once for the tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tools.train.drafter import DraftModule
from tools.train.shapes import HIDDEN, PAIRS

DEMO = Path(__file__).parents[2] / "dflash_local" / "demo"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "demo" / "target" / "tokenizer.json"))


@pytest.fixture(scope="session", params=list(PAIRS))
def trained(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel, DraftModule]:
    """Name, target and drafter of a shipped pair, float32 on CPU."""
    folder = DEMO / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    drafter = DraftModule(PAIRS[request.param].drafter_config, HIDDEN)
    state = load_file(folder / "drafter" / "model.safetensors")
    drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return request.param, target, drafter.eval().requires_grad_(False)
