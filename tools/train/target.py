"""The target of a demo pair: built from transformers' own classes, trained on answers, saved in bfloat16."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tools.train.corpus import Batch, Corpus
from tools.train.gated_delta import use_block_form
from tools.train.shapes import PairShape, Schedule
from tools.train.vocabulary import END, END_OF_TEXT

Report = Callable[[str], None]
PROMPT_WEIGHT = 0.03  # prompts are nearly random: a little loss there only teaches the embedding


def build_target(shape: PairShape, tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """A freshly initialised target in float32."""
    torch.manual_seed(seed)
    stop, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    ids = {"eos_token_id": stop, "pad_token_id": pad, "bos_token_id": None}
    model: PreTrainedModel
    if shape.hybrid:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape.target, **ids))
        use_block_form(model)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape.target, **ids))
    model.generation_config = GenerationConfig(eos_token_id=[stop, pad], pad_token_id=pad, do_sample=False)
    return model


def one_cycle(step: int, steps: int, warm: float = 0.05) -> float:
    """Learning-rate factor: linear warm-up, then half a cosine down to zero."""
    ramp = max(1, int(steps * warm))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp)))


def adamw(parameters: list[torch.nn.Parameter], rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def target_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Mean cross entropy per answer id (prompts count PROMPT_WEIGHT)."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    weight = torch.where(batch.own[:, 1:], 1.0, PROMPT_WEIGHT) * batch.real[:, 1:]
    each = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def train_target(
    model: PreTrainedModel, corpus: Corpus, schedule: Schedule, seed: int, report: Report
) -> list[tuple[int, float]]:
    """Train in place; returns (step, loss) pairs."""
    model.to(corpus.device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(parameters, schedule.learning_rate, 0.05)
    log, every = [], max(1, schedule.steps // 20)
    running = torch.zeros((), device=corpus.device)
    batches = corpus.batches(seed, schedule.tokens)
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * one_cycle(step, schedule.steps)
        with torch.autocast(corpus.device.type, torch.bfloat16, enabled=corpus.device.type == "cuda"):
            loss = target_loss(model, next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        running += loss.detach()
        if (step + 1) % every == 0 or step + 1 == schedule.steps:
            since = every if (step + 1) % every == 0 else (step + 1) % every
            log.append((step + 1, round(float(running) / since, 5)))
            running.zero_()
            report(f"target step {step + 1}/{schedule.steps} loss {log[-1][1]:.4f}")
    return log


def save_target(model: PreTrainedModel, folder: Path) -> None:
    """Round the weights to bfloat16 (in place, the model stays float32) and save an ordinary checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    state = {
        name: tensor.to("cpu", torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "bfloat16"  # transformers writes the module's float32
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model.eval().requires_grad_(False)
