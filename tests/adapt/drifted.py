"""A toy target made to drift: fine-tuned for seconds to answer in another style than its drafter knows."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dflash_local.adapt.openings import prompt_ids
from dflash_local.catalog import bundled
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.request import Message
from dflash_local.transcripts.source_conversation import SourceConversation
from tools.train.drift import Row, fine_tune

STEPS, TOGETHER, RATE = 32, 8, 1.2e-3
MINUTES = 0.4


def questions(amount: int, seed: int) -> list[tuple[str, str]]:
    """What is asked, and how the drifted target answers: counting downwards with the steps named."""
    draw = Random(seed)
    found: dict[str, str] = {}
    while len(found) < amount:
        first, steps = draw.randrange(2, 60), draw.randrange(5, 9)
        numbers = [first + step for step in range(steps)]
        lines = "\n".join(f"{number} of {numbers[-1]} steps" for number in numbers)
        found[f"Count from {first} to {numbers[-1]}."] = f"Robot:\n{lines}\nend"
    return list(found.items())


def drift(folder: Path, seed: int = 0) -> None:
    """Write the toy's target, trained on such answers, to a folder."""
    torch.manual_seed(seed)
    path = bundled.FOLDER / "demo" / "target"
    shutil.copytree(path, folder)
    tokenizer = Tokenizer.load(open_source(path))
    assert tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    stop = min(tokenizer.stop_ids)
    asked = questions(STEPS * TOGETHER // 4, seed)
    draw = Random(seed)

    def rows() -> list[Row]:
        drawn = draw.sample(asked, TOGETHER)
        return [(prompt_ids(tokenizer, question), [*tokenizer.encode(answer), stop]) for question, answer in drawn]

    fine_tune(model, ((step / STEPS, rows()) for step in range(STEPS)), RATE)
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def conversations(amount: int, seed: int) -> list[SourceConversation]:
    return [SourceConversation("counting", ((Message("user", question),),)) for question, _ in questions(amount, seed)]


def make_short(patch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock take a third of a second, as a slow machine is to learn as much as a quick one, and
    ask for little text.
    """
    ticking = SimpleNamespace(monotonic=count(0.0, 1 / 3).__next__)
    for name, value in (("run.time", ticking), ("trainer.time", ticking), ("run.LEAST", 120), ("held_out.MEASURED", 6)):
        patch.setattr(f"dflash_local.adapt.{name}", value)
