"""A layer for multi-token prediction for a target, trained on text that the target writes itself.

First on single drafts, which cost a fifth, then on chains, each draft on the output of the one before. A toy takes
minutes of a CPU. Writes the target's folder with the layer in it; measures that and a random layer.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from dflash_local.adapt.openings import frame_of
from dflash_local.bench.prompts import held_out
from dflash_local.bench.trial import write
from dflash_local.catalog.bundled import Pair
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.drafters.kinds import read_drafter
from dflash_local.drafters.mtp.layout import PREFIX, MTPConfig
from dflash_local.drafters.mtp.reference import MTPLayer, MTPProposer
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.transformers_target import KVCache, LayerInputs, TransformersTarget
from dflash_local.request import Limits, SamplingParams, user_request

CPU32 = LoadConfig(device="cpu", dtype="float32")
LENGTH, TOGETHER = 224, 128  # tokens of a text, and texts that are written together
BATCH, DRAFTS, RATE = 8, 4, 3e-3
ALONE = 0.7  # of the training is with single drafts


class Chain(KVCache):
    """Keys and values of all steps so far, one step behind the other."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self._rows.get(layer, (keys[:, :, :0], values[:, :, :0]))
        self._rows[layer] = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        return self._rows[layer]


def chain_mask(step: int, rows: int) -> torch.Tensor:
    """Additive mask [1, 1, rows, step x rows] of a chain's step, from 1: row p is of the chain whose first row is
    p - step + 1. It sees all first rows up to that one, and of the later steps its own chain's.
    """
    row, key = torch.arange(rows).unsqueeze(1), torch.arange(rows)
    seen = [key <= row - step + 1, *(key == row - step + of for of in range(2, step + 1))]
    return torch.zeros(rows, step * rows).masked_fill(~torch.cat(seen, 1), torch.finfo(torch.float32).min)[None, None]


def chain_loss(
    layer: MTPLayer, target: TransformersTarget, ids: torch.Tensor, hidden: torch.Tensor, drafts: int
) -> list[torch.Tensor]:
    """Cross entropies with the target's own probabilities, one for each draft; ids [b, n], hidden states [b, n, H]."""
    embedded, taken, rows = target.embed(ids[:, 1:]), hidden[:, :-1], ids.shape[1] - 1
    likely = target.head(hidden[:, 1:]).softmax(-1)  # behind the token that each row takes
    known, cache, losses = target.inputs(0, taken[:1]), Chain(), []
    for step in range(1, drafts + 1):
        inputs = LayerInputs(known.positions, known.rotary, {"full_attention": chain_mask(step, rows)})
        output = layer(layer.join(embedded, taken), inputs, cache)
        scores, wanted = target.head(output[:, step - 1 :]), likely[:, step - 1 :]
        losses.append(functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(0, 1)))
        taken = functional.pad(output[:, :-1], (0, 0, 1, 0))
    return losses


@torch.inference_mode()
def own_text(model: Any, before: tuple[int, ...], seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, length] of dialogues that the target wrote, both sides of them, and its hidden states [n, length, H]."""
    start, until, ids = torch.tensor([before] * TOGETHER), time.monotonic() + seconds, list[torch.Tensor]()
    options = {"max_new_tokens": LENGTH - len(before), "eos_token_id": [-1], "pad_token_id": 0}
    while not ids or time.monotonic() < until:
        ids.append(model.generate(start, do_sample=True, top_k=0, **options))
    return torch.cat(ids), torch.cat([model.get_decoder()(input_ids=part).last_hidden_state for part in ids])


def train(args: argparse.Namespace) -> MTPLayer:
    files = Checkpoint.open(args.target)
    tokenizer = cast(Tokenizer, Tokenizer.load(files.source))
    model = load_target(files, TargetFacts.from_checkpoint(files), placement("cpu", "float32"))
    ids, hidden = (part.clone() for part in own_text(model, frame_of(tokenizer).before, args.writing_seconds))
    print(f"{ids.numel()} tokens", flush=True)
    target = TransformersTarget(model)
    config = cast(MTPConfig, read_drafter(files.config, files.source.config_file))
    layer = MTPProposer.random(config, target).layer.requires_grad_(True)
    optimizer = torch.optim.AdamW(layer.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0)
    begun, update = time.monotonic(), 0
    while (spent := (time.monotonic() - begun) / args.seconds) < 1:
        optimizer.param_groups[0]["lr"] = RATE * (1 - spent)
        picked = torch.randint(len(ids), (BATCH,))
        losses = chain_loss(layer, target, ids[picked], hidden[picked], 1 if spent < ALONE else DRAFTS)
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        if (update := update + 1) % 100 == 0:
            print(f"{update} updates, {spent:.0%}: {[round(loss.item(), 3) for loss in losses]}", flush=True)
    return layer


def save(layer: MTPLayer, args: argparse.Namespace) -> None:
    """Write the target's folder with the layer, in bfloat16, among its tensors."""
    shutil.copytree(args.target, args.out)
    tensors = {f"{PREFIX}{name}": each.detach().bfloat16() for name, each in layer.state_dict().items()}
    file = args.out / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def acceptance(session: Session, prompts: Path) -> float:
    """Tokens a cycle over the held-out prompts, greedy."""
    cycles: list[int] = []
    for prompt in held_out(prompts):
        request = user_request(prompt.text, sampling=SamplingParams(), limits=Limits(max_new_tokens=128))
        cycles += [cycle.emitted for cycle in write(session, request).cycles if cycle.drafted]
    return sum(cycles) / len(cycles)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train.mtp", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder that is made")
    parser.add_argument("--held-out", type=Path, required=True, help="JSON list of {kind, prompt}")
    parser.add_argument("--writing-seconds", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=420.0, help="of training")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    save(train(args), args)
    session = load(Pair(str(args.out), args.out, args.out, bundled=False), CPU32)
    print(f"trained: {acceptance(session, args.held_out):.3f} tokens a cycle")
    made = cast(MTPProposer, session.runner.proposer)
    session.runner.proposer = MTPProposer.random(made.config, made.target)
    print(f"random: {acceptance(session, args.held_out):.3f} tokens a cycle")


if __name__ == "__main__":
    main()
