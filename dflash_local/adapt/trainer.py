"""Training a drafter on its target's own text: anchors, labels and loss of one step, and the run by the clock."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dflash_local.adapt.low_rank import tables_by_id
from dflash_local.adapt.muon import Muon
from dflash_local.adapt.windows import Windows
from dflash_local.drafters.dflash.training import DraftModule, block_inputs
from dflash_local.models.shared_windows import drafted, mask_of

Packed = Callable[..., torch.Tensor]  # DraftModule.packed


class Teacher(Protocol):
    """A target, or what was kept of one: all that a drafter learns from.

    Attributes:
        head: [vocabulary, w]. dtype: of the rows that it takes.
    """

    head: torch.Tensor
    device: torch.device
    dtype: torch.dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [..., w] of ids [...]."""

    def taps_of(self, windows: Windows, layers: Sequence[int]) -> torch.Tensor:
        """Return what the drafter's ``fc`` takes [b, s, layers x w]."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter is trained.

    Attributes:
        anchors: of each window and round. rounds: updates on one look of the target; from the second on, anchors are
            where the drafter's cycles would begin after those of the round before.
        at_once: windows that go through the drafter together; the rest of an update's comes behind them.
        gamma: the loss of slot k is weighted by exp(-(k - 1) / gamma).
        seconds: of training until the rate has come down to zero, compilation and evaluation left out.
    """

    windows: int = 16
    length: int = 1024
    anchors: int = 256
    rounds: int = 2
    at_once: int = 16
    gamma: float = 4.0
    matrix_rate: float = 3e-3
    norm_rate: float = 2e-3  # of all that is no matrix, and of tables by id
    warm_up: int = 100
    average: float = 0.995
    seconds: float = 720.0
    seed: int = 1


def pick_anchors(
    windows: Windows, amount: int, wanted: torch.Tensor | None, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places p in an answer whose next id is of the same answer: [b, amount], ascending, and which of them count.

    Args:
        wanted: [b, s] bool, places that are taken first; the rest is drawn. None: all are drawn.
    """
    same = windows.texts[:, :-1] == windows.texts[:, 1:]
    fit = torch.nn.functional.pad(windows.own[:, :-1] & windows.own[:, 1:] & same, (0, 1))
    score = torch.rand(fit.shape, generator=draw, device=fit.device)
    score = torch.where(fit, score if wanted is None else score + wanted, -1.0)
    found = score.topk(amount, 1)
    anchors, order = found.indices.sort(1)
    return anchors, found.values.gather(1, order) >= 0


def labels(windows: Windows, anchors: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's greedy continuation of each anchor: ids and validity, both [b, a, slots].

    It is known as long as the text agrees with it; the first id where it does not is still a label.
    """
    length = windows.ids.shape[1]
    at = anchors.unsqueeze(-1) + torch.arange(1, slots + 1, device=anchors.device)
    inside, at = at < length, at.clamp_max(length - 1)
    batch = torch.arange(len(at), device=at.device)[:, None, None]
    wanted = windows.best[batch, at]
    agrees = (wanted == windows.ids[batch, at]).long().cumprod(-1)
    before = torch.nn.functional.pad(agrees[..., :-1], (1, 0), value=1).bool()
    same = windows.texts[batch, at] == windows.texts.gather(1, anchors).unsqueeze(-1)
    return wanted, before & inside & same & windows.own[batch, at]


def ids_before(windows: Windows, anchors: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The ids behind which each slot drafts while all before it are right: the anchors', then ``wanted`` [b, a, slots].

    A drafter that chooses by the id before is judged so, too: behind a wrong draft nothing counts.
    """
    return torch.cat((windows.ids.gather(1, anchors).unsqueeze(-1), wanted[..., :-1]), -1)


class Trainer:
    """A drafter, its running average, its optimisers and its place in the schedule.

    Args:
        drafter: on the device of the target.

    Attributes:
        used: seconds of training so far. updates: of the weights so far. passes: over all text, of calls before this.
    """

    def __init__(self, target: Teacher, drafter: DraftModule, recipe: Recipe) -> None:
        self.target, self.recipe, self.device = target, recipe, target.device
        self.drafter = drafter.train()
        learnt = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self._names = list(learnt)
        self.average = copy.deepcopy(drafter, {id(p): p for p in drafter.parameters()}).eval()  # shares what is frozen
        for name, p in learnt.items():
            part, _, own = name.rpartition(".")
            setattr(self.average.get_submodule(part), own, nn.Parameter(p.detach().clone(), requires_grad=False))
        # Muon would give a table's few rows with a gradient what is meant for all of them.
        by_id = {id(p) for p in tables_by_id(drafter)}
        matrices = [p for p in learnt.values() if p.ndim == 2 and id(p) not in by_id]
        others = [p for p in learnt.values() if p.ndim != 2 or id(p) in by_id]
        cuda = self.device.type == "cuda"
        self._muon = Muon(matrices, recipe.matrix_rate)
        self._adam = torch.optim.AdamW(others, recipe.norm_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        self._packed = torch.compile(drafter.packed, dynamic=False) if cuda else drafter.packed
        self._draw = torch.Generator(self.device).manual_seed(recipe.seed)
        size = drafter.config.block_size
        self._decay = torch.exp(-torch.arange(size - 1, device=self.device) / recipe.gamma)
        self.used, self.updates, self.passes = 0.0, 0, 0.0

    def _learnt(self, module: DraftModule) -> list[torch.Tensor]:
        """Return what is trained, of the drafter or of the average."""
        return [module.get_parameter(name) for name in self._names]

    def _set_rates(self) -> None:
        done = min(1.0, self.used / self.recipe.seconds)
        factor = min(1.0, (self.updates + 1) / self.recipe.warm_up) * 0.5 * (1 + math.cos(math.pi * done))
        for optimiser, rate in ((self._muon, self.recipe.matrix_rate), (self._adam, self.recipe.norm_rate)):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor

    def step(self, windows: Windows) -> torch.Tensor:
        """All rounds on a batch. Returns the last round's loss a label and accepted drafts an anchor [2]."""
        taps = self.target.taps_of(windows, self.drafter.config.taps)
        wanted: torch.Tensor | None = None
        for _ in range(self.recipe.rounds):
            anchors, counts = pick_anchors(windows, self.recipe.anchors, wanted, self._draw)
            found, accepted = self._update(windows, taps, anchors, counts)
            wanted = next_anchors(windows, anchors, counts, accepted)
        return found

    def _forward(self, drafter: Packed, windows: Windows, taps: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return hidden rows [b x a x slots, w] of the blocks behind anchors [b, a]."""
        config, size = self.drafter.config, self.drafter.config.draft_rows
        x = block_inputs(windows.ids, anchors, self.target.embed, size, config.mask_token_id).flatten(1, 2)
        first = windows.places.gather(1, anchors)
        positions = (first.unsqueeze(-1) + torch.arange(size, device=self.device)).flatten(1)
        rows, length = anchors.shape[1] * size, taps.shape[1]
        masks = {
            sight: mask_of(
                drafted(windows.texts, anchors, size, *sight), len(anchors), rows, length + rows, self.device
            )
            for sight in set(self.drafter.sights)
        }
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.target.dtype != torch.float32):
            hidden = drafter(taps, x, windows.places, positions, masks)
        return hidden.unflatten(1, (-1, size))[:, :, config.first_draft :].flatten(0, 2).to(self.target.dtype)

    def _update(
        self, windows: Windows, taps: torch.Tensor, anchors: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted, valid = labels(windows, anchors, self.drafter.config.block_size - 1)
        weights = self._decay * (valid & counts.unsqueeze(-1))
        weights /= weights.sum()
        self._set_rates()
        loss, likeliest = torch.zeros((), device=self.device), torch.empty_like(wanted)
        for first in range(0, len(anchors), self.recipe.at_once):
            part = slice(first, first + self.recipe.at_once)
            args = windows.rows(part), taps[part], anchors[part], wanted[part], weights[part]
            own, likeliest[part] = self._backward(*args)
            loss += own
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0, foreach=True)
        self._muon.step()
        self._adam.step()
        self.drafter.zero_grad(set_to_none=True)
        self.updates += 1
        keep = min(self.recipe.average, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            torch._foreach_lerp_(self._learnt(self.average), self._learnt(self.drafter), 1 - keep)
        accepted = accepted_drafts(likeliest, wanted, valid)
        mean = (accepted * counts).sum() / counts.sum().clamp_min(1)
        return torch.stack((loss, mean)), accepted

    def _backward(
        self,
        windows: Windows,
        taps: torch.Tensor,
        anchors: torch.Tensor,
        wanted: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the gradients; returns the loss, and the likeliest ids as ``wanted`` [b, a, slots]."""
        hidden = self._forward(self._packed, windows, taps, anchors)
        before = ids_before(windows, anchors, wanted)
        loss, likeliest = self.drafter.loss(
            hidden, self.target.head, before.flatten(), wanted.flatten(), weights.flatten()
        )
        loss.backward()
        return loss.detach(), likeliest.view_as(wanted)

    @torch.no_grad()
    def measure(self, teacher: Teacher, batches: Iterable[Windows]) -> float:
        """Return tokens a cycle of the running average, were a cycle begun at any token of an answer.

        Args:
            teacher: of these windows, which may be others than it is trained on.
        """
        draw = torch.Generator(self.device).manual_seed(0)
        emitted, cycles = 0.0, 0
        for windows in (each.to(self.device) for each in batches):
            anchors, counts = pick_anchors(windows, min(self.recipe.anchors, windows.ids.shape[1]), None, draw)
            taps = teacher.taps_of(windows, self.drafter.config.taps)
            hidden = self._forward(self.average.packed, windows, taps, anchors)
            wanted, valid = labels(windows, anchors, self.drafter.config.block_size - 1)
            before = ids_before(windows, anchors, wanted)
            _, likeliest = self.average.loss(
                hidden, self.target.head, before.flatten(), wanted.flatten(), valid.flatten().float()
            )
            accepted = accepted_drafts(likeliest.view_as(wanted), wanted, valid)
            emitted += float(((accepted + 1) * counts).sum())
            cycles += int(counts.sum())
        return emitted / max(1, cycles)

    def state(self) -> dict[str, Any]:
        """Everything that ``load`` takes up."""
        return {
            "drafter": self._learnt(self.drafter),
            "average": self._learnt(self.average),
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
            "used": self.used,
            "updates": self.updates,
            "passes": self.passes,
            "draw": self._draw.get_state(),
        }

    def load(self, file: Path) -> None:
        """Go on where ``state`` was saved to a file with torch.save."""
        state = torch.load(file, map_location="cpu", weights_only=True)  # each tensor goes to its place by itself
        with torch.no_grad():
            for name, module in (("drafter", self.drafter), ("average", self.average)):
                torch._foreach_copy_(self._learnt(module), state[name])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        self.used, self.updates, self.passes = state["used"], state["updates"], state["passes"]
        self._draw.set_state(state["draw"])


def accepted_drafts(likeliest: torch.Tensor, wanted: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Count drafts [b, a] before the first wrong one; all arguments [b, a, slots]."""
    return ((likeliest == wanted) & valid).long().cumprod(-1).sum(-1)


def next_anchors(windows: Windows, anchors: torch.Tensor, counts: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Where the cycles behind those of ``anchors`` begin, [b, s] bool: at the bonus token."""
    marked = torch.zeros_like(windows.own)
    there = (anchors + accepted + 1).clamp_max(marked.shape[1] - 1)
    return marked.scatter_(1, torch.where(counts, there, 0), True)


def train(
    trainer: Trainer,
    batches: Iterator[tuple[float, Windows]],
    stop_at: float,
    every: float,
    evaluate: Callable[[Trainer, float, float], None],
) -> None:
    """Train until ``stop_at`` seconds of training are used, evaluating about every so many of them and at the end.

    Args:
        evaluate: called with the trainer, how often all text was gone through, and the last loss a label; its time is
            not counted.
    """
    wait = torch.cuda.synchronize if trainer.device.type == "cuda" else lambda: None
    for _ in range(2):  # compile on the clock of nobody
        passes, batch = next(batches)
        found = trainer.step(batch.to(trainer.device))
    wait()
    due, steps, began = trainer.used + every, 0, time.monotonic()
    start, before = trainer.used, trainer.passes
    while trainer.used < stop_at:
        passes, batch = next(batches)
        passes += before
        found = trainer.step(batch.to(trainer.device))
        steps += 1
        if steps % 10 == 0 or trainer.device.type == "cpu":
            wait()
        trainer.used = start + time.monotonic() - began
        if trainer.used >= due and trainer.used + every / 3 < stop_at:
            wait()
            pause = time.monotonic()
            evaluate(trainer, passes, float(found[0]))
            began += time.monotonic() - pause
            due = trainer.used + every
    wait()
    trainer.passes = passes
    evaluate(trainer, passes, float(found[0]))
