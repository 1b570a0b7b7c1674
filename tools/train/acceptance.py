"""Acceptance by the exact greedy walk: cycles over the target's own greedy reply, without running the target again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_local.adapt.dialogues import repeat_start
from dflash_local.adapt.openings import SEEDS
from dflash_local.drafters.dflash.training import DraftModule, block_inputs
from dflash_local.models.shared_windows import dense_mask, same_text
from tools.train.frozen_target import FrozenTarget

ROWS = 8  # replies at a time
MOST = 256  # tokens of a reply
BLOCKS = (8, 6, 4)


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt's ids and the target's greedy reply to it, cut at ``MOST`` tokens and where it repeats itself."""

    kind: str
    prompt: tuple[int, ...]
    reply: tuple[int, ...]


def cut(kind: str, prompt: Sequence[int], reply: Sequence[int]) -> Reply:
    kept = reply[:MOST]
    return Reply(kind, tuple(prompt), tuple(kept[: repeat_start(kept)]))


class Walker:
    """Replies, their taps (made once), and the walk of any drafter over them.

    Args:
        replies: those of a single token are left out: no cycle follows it.
    """

    def __init__(self, target: FrozenTarget, replies: Sequence[Reply]) -> None:
        self._target = target
        self.replies = sorted((r for r in replies if len(r.reply) > 1), key=lambda r: len(r.prompt) + len(r.reply))
        self._taps: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    @torch.no_grad()
    def hits(self, drafter: DraftModule) -> list[torch.Tensor]:
        """Of each reply, whether each slot's draft behind each of its ids is the reply's own: [ids - 1, slots] bool."""
        return [hit for first in range(0, len(self.replies), ROWS) for hit in self._hits(first, drafter)]

    def _hits(self, first: int, drafter: DraftModule) -> list[torch.Tensor]:
        config, target, device = drafter.config, self._target, self._target.device
        size, replies = config.block_size, self.replies[first : first + ROWS]
        rows = [[*r.prompt, *r.reply] for r in replies]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        places = torch.arange(width, device=device).expand(len(rows), -1)
        key = (first, config.taps)
        if key not in self._taps:
            seen = dense_mask(same_text(torch.zeros_like(ids)), len(rows), width, width, device)
            self._taps[key] = target.taps(ids, places, seen, config.taps)
        most = max(len(r.reply) for r in replies) - 1
        begin = torch.tensor([[len(r.prompt)] for r in replies], device=device)
        last = torch.tensor([[len(row) - 2] for row in rows], device=device)
        anchors = torch.minimum(begin + torch.arange(most, device=device), last)
        x = block_inputs(ids, anchors, target.embed, size, config.mask_token_id)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = drafter(self._taps[key], x, anchors)[:, :, 1:].to(target.dtype)
        drafts = torch.stack([(each @ target.head.t()).argmax(-1) for each in hidden])  # logits of a reply at a time
        at = anchors.unsqueeze(-1) + torch.arange(1, size, device=device)
        known = torch.where(at < width, ids.gather(1, at.clamp_max(width - 1).flatten(1)).view_as(at), -1)
        right = (drafts == known) & (at <= last.unsqueeze(-1) + 1)
        return [hit[: len(r.reply) - 1].cpu() for hit, r in zip(right, replies, strict=True)]

    def acceptance(self, drafter: DraftModule) -> dict[str, dict[str, float] | list[float]]:
        """Tokens a cycle by kind and ``mean`` over the kinds that are asked for in training, of blocks b8, b6, b4 (the
        same drafts, fewer verified); ``slots``: how often each slot is right behind any id.
        """
        hits = self.hits(drafter)
        result: dict[str, dict[str, float] | list[float]] = {}
        for block in (size for size in BLOCKS if size <= drafter.config.block_size):
            sums: dict[str, list[int]] = {}
            for reply, hit in zip(self.replies, hits, strict=True):
                total = sums.setdefault(reply.kind, [0, 0])
                total[0] += len(hit)
                total[1] += cycles(hit[:, : block - 1])
            by_kind = {kind: tokens / count for kind, (tokens, count) in sorted(sums.items())}
            asked = [value for kind, value in by_kind.items() if kind in SEEDS]
            mean = sum(asked) / len(asked) if asked else float("nan")
            result[f"b{block}"] = {kind: round(value, 3) for kind, value in {"mean": mean, **by_kind}.items()}
        result["slots"] = [round(float(share), 3) for share in torch.cat(hits).float().mean(0)]
        return result


def cycles(hits: torch.Tensor) -> int:
    """Cycles until all ids are written: each adds its drafts up to the first wrong one, and the bonus token."""
    steps = (hits.long().cumprod(1).sum(1) + 1).tolist()
    at = count = 0
    while at < len(steps):
        at += int(steps[at])
        count += 1
    return count
