"""Greedy answers and acceptance lengths without any cache: slow, batched, obviously right. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import PreTrainedModel

from tools.train.data import Conversation
from tools.train.drafter import DraftModule, block_inputs, look
from tools.train.phrasing import Turn
from tools.train.shapes import BLOCK
from tools.train.vocabulary import END, render


@dataclass(frozen=True, slots=True)
class Answers:
    """Per prompt: the ids written (stop id included) and each cycle's acceptance length (none without a drafter)."""

    ids: list[list[int]]
    cycles: list[list[int]]

    def mean_acceptance(self) -> float:
        """Mean over all cycles; accepted drafts uncut and the bonus token, as ``events.Stats`` counts."""
        lengths = [length for row in self.cycles for length in row]
        return sum(lengths) / max(1, len(lengths))


def stop_id(tokenizer: Tokenizer) -> int:
    """The id that ends a reply."""
    return int(tokenizer.token_to_id(END) or 0)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A single user turn up to and including the generation prompt."""
    pieces = render(Conversation("", (Turn("", prompt, "", ""),)))
    return list(tokenizer.encode(pieces[0][0], add_special_tokens=False).ids)


@torch.no_grad()
def answer(
    model: PreTrainedModel, drafter: DraftModule | None, prompts: list[list[int]], stop: int, limit: int
) -> Answers:
    """Greedy text of every prompt; with a drafter in blocks, verified by the target each cycle.

    The first id comes from the prompt pass and belongs to no cycle.
    """
    device, rows = next(model.parameters()).device, len(prompts)
    room = max(map(len, prompts)) + limit + 2 * BLOCK
    ids = torch.zeros(rows, room, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    size = torch.tensor([len(prompt) for prompt in prompts], device=device)
    written: list[list[int]] = [[] for _ in prompts]
    cycles: list[list[int]] = [[] for _ in prompts]
    every = torch.arange(rows, device=device)
    taps, greedy = look(model, ids[:, : int(size.max())])
    ids[every, size] = greedy[every, size - 1]
    for row, first in enumerate(ids[every, size].tolist()):
        written[row].append(first)
    slots = torch.arange(1, BLOCK, device=device)
    while open_rows := [r for r in range(rows) if written[r][-1] != stop and len(written[r]) < limit]:
        end = int(size.max())
        drafts = torch.zeros(rows, 0, dtype=torch.long, device=device)
        if drafter is not None:
            x = block_inputs(ids, size.unsqueeze(1), model.get_input_embeddings())
            hidden = drafter(taps[:, :end], x, size.unsqueeze(1))[:, 0, 1:]
            drafts = F.linear(hidden, model.get_input_embeddings().weight).argmax(-1)
            ids[every.unsqueeze(1), size.unsqueeze(1) + slots] = drafts
        taps, greedy = look(model, ids[:, : end + BLOCK])
        chosen = greedy[every.unsqueeze(1), size.unsqueeze(1) + torch.arange(drafts.shape[1] + 1, device=device)]
        accepted = (drafts == chosen[:, :-1]).long().cumprod(1).sum(1)
        new, kept = chosen.tolist(), accepted.tolist()
        for row in open_rows:
            gained = new[row][: kept[row] + 1]
            gained = gained[: gained.index(stop) + 1] if stop in gained else gained
            written[row] += gained
            cycles[row].append(kept[row] + 1)
        moving = torch.tensor([r in set(open_rows) for r in range(rows)], device=device)
        size = torch.where(moving, size + accepted + 1, size)
        ids[every, size] = torch.where(moving, chosen[every, accepted], ids[every, size])
    return Answers(written, cycles if drafter is not None else [[] for _ in prompts])


def right_answers(tokenizer: Tokenizer, turns: list[Turn], answers: Answers) -> list[bool]:
    """Whether each reply is, to the letter and the stop id, the expected one."""
    stop = stop_id(tokenizer)
    return [
        row[-1] == stop and tokenizer.decode(row[:-1]) == turn.answer
        for turn, row in zip(turns, answers.ids, strict=True)
    ]
