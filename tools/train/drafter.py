"""The drafter as a trainable module: ``models.drafter`` over many anchors at once, and its recipe.

Tensor names are the published ones. It knows the target only through taps, embeddings and head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from dflash_local.config.drafter_config import DrafterConfig
from tools.train.corpus import Batch, Corpus
from tools.train.packing import Mask, attend
from tools.train.shapes import BLOCK, MASK_ID, TAPS, PairShape, Schedule
from tools.train.target import Report, adamw, one_cycle

GAMMA = 4.0
ANCHORS = 24


class Norm(nn.Module):
    """Qwen3's RMSNorm (weight starts at one; never the 1 + weight form of Qwen3.5 targets)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate-half RoPE over the whole head; x [b, h, n, d], positions [b, n]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions.unsqueeze(-1).float() * rates).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Attention(nn.Module):
    """Block queries over context keys (from c) and block keys (from u), one set of weights for both."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, heads, kv, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv, self.theta = heads, kv, config.rope.theta
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv * dim, bias=False)
        self.v_proj = nn.Linear(width, kv * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.q_norm, self.k_norm = Norm(dim, config.rms_norm_eps), Norm(dim, config.rms_norm_eps)

    def forward(
        self, u: torch.Tensor, c: torch.Tensor, places: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        """u [b, n, w] at positions [b, n], c [b, s, w] at places [b, s], mask over [n, s + n]."""
        both, everywhere = torch.cat((c, u), 1), torch.cat((places, positions), 1)
        q = rotate(self.q_norm(self.q_proj(u).unflatten(-1, (self.heads, -1))).transpose(1, 2), positions, self.theta)
        k = rotate(self.k_norm(self.k_proj(both).unflatten(-1, (self.kv, -1))).transpose(1, 2), everywhere, self.theta)
        v = self.v_proj(both).unflatten(-1, (self.kv, -1)).transpose(1, 2)
        return self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer; only the block stream is updated, the context feature c is not."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = Mlp(width, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)

    def forward(
        self, x: torch.Tensor, c: torch.Tensor, places: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), c, places, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def visible(anchors: torch.Tensor, length: int, window: int | None, size: int = BLOCK) -> torch.Tensor:
    """Who sees whom, [b, 1, a * size, length + a * size]: context strictly before the anchor, own block only.

    With a window the layer is causal and sliding: at most `window` keys back, the own one included.
    """
    batch, amount = anchors.shape
    slot = torch.arange(size, device=anchors.device)
    query = (anchors.unsqueeze(-1) + slot).flatten(1).unsqueeze(-1)
    start = anchors.repeat_interleave(size, 1).unsqueeze(-1)
    key = torch.arange(length, device=anchors.device)
    context = key < start
    owner = torch.arange(amount, device=anchors.device).repeat_interleave(size)
    block = (owner.unsqueeze(0) == owner.unsqueeze(1)).expand(batch, -1, -1)
    if window is not None:
        context = context & (key > query - window)
        own_key = query.transpose(1, 2)
        block = block & (own_key <= query) & (own_key > query - window)
    return torch.cat((context, block), -1).unsqueeze(1)


class DraftModule(nn.Module):
    """All blocks of a batch in one forward.

    Args:
        target_hidden: width of the target, whose taps ``fc`` takes.
    """

    def __init__(self, config: DrafterConfig, target_hidden: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.windows = config, config.windows
        self.fc = nn.Linear(len(config.taps) * target_hidden, width, bias=False)
        self.hidden_norm = Norm(width, eps)
        self.layers = nn.ModuleList(Layer(config) for _ in self.windows)
        self.norm = Norm(width, eps)

    def forward(self, taps: torch.Tensor, x: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Rows that are whole texts: taps [b, s, T * w], block embeddings x [b, a, BLOCK, w], anchors [b, a].

        Returns:
            hidden after the norm, shaped as x.
        """
        length, block = taps.shape[1], x.shape[2]
        places = torch.arange(length, device=anchors.device).expand(len(taps), -1)
        positions = (anchors.unsqueeze(-1) + torch.arange(block, device=anchors.device)).flatten(1)
        masks = {window: visible(anchors, length, window, block) for window in set(self.windows)}
        return self.packed(taps, x.flatten(1, 2), places, positions, masks).view_as(x)

    def packed(
        self,
        taps: torch.Tensor,
        x: torch.Tensor,
        places: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[int | None, Mask],
    ) -> torch.Tensor:
        """Rows of any texts: taps [b, s, T * w] at places [b, s], block rows x [b, n, w] at positions [b, n].

        Args:
            masks: who sees whom over [n, s + n], by a layer's window.

        Returns:
            hidden after the norm, shaped as x.
        """
        c = self.hidden_norm(self.fc(taps))
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, c, places, positions, masks[window])
        return self.norm(x)


def block_inputs(
    ids: torch.Tensor,
    anchors: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    size: int = BLOCK,
    mask_id: int = MASK_ID,
) -> torch.Tensor:
    """Embeddings [b, a, size, w] of [anchor, mask_id, ...] for anchors [b, a] in ids [b, s]."""
    block = torch.full((*anchors.shape, size), mask_id, device=ids.device)
    block[..., 0] = ids.gather(1, anchors)
    return embed(block)


@torch.no_grad()
def look(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's taps [b, s, T * w] and its greedy next ids [b, s]."""
    seen = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    taps = torch.cat([seen.hidden_states[tap + 1] for tap in TAPS], -1)
    return taps, seen.logits.argmax(-1)


def pick_anchors(batch: Batch, amount: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random anchors p with own[p] and own[p + 1]: [b, amount] and which of them count."""
    fit = batch.own[:, :-1] & batch.own[:, 1:]
    score = torch.rand(fit.shape, generator=draw, device=fit.device) + fit
    amount = min(amount, fit.shape[1])
    anchors = score.topk(amount, 1).indices
    return anchors, fit.gather(1, anchors)


def labels(batch: Batch, greedy: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's own greedy continuation: ids and validity, both [b, a, BLOCK - 1].

    Slot k's label is the target's choice at p + k. It is known from one forward over the corpus as long as the
    target agrees with the corpus before p + k; the first disagreement is still a label, what follows is not.
    """
    at = anchors.unsqueeze(-1) + torch.arange(1, BLOCK, device=anchors.device)
    inside = at < batch.ids.shape[1]
    at = at.clamp_max(batch.ids.shape[1] - 1)
    rows = torch.arange(batch.ids.shape[0], device=anchors.device)[:, None, None]
    wanted = greedy[rows, at - 1]
    agrees = (wanted == batch.ids[rows, at]).long().cumprod(-1)
    before = torch.cat((torch.ones_like(agrees[..., :1]), agrees[..., :-1]), -1).bool()
    return wanted, before & inside & batch.own[rows, at]


def drafter_loss(
    model: PreTrainedModel, drafter: DraftModule, batch: Batch, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross entropy, and the estimated acceptance length (bonus included)."""
    taps, greedy = look(model, batch.ids)
    anchors, counts = pick_anchors(batch, ANCHORS, draw)
    wanted, valid = labels(batch, greedy, anchors)
    valid = valid & counts.unsqueeze(-1)
    table = model.get_input_embeddings().weight
    with torch.autocast(taps.device.type, torch.bfloat16, enabled=taps.is_cuda):
        hidden = drafter(taps, block_inputs(batch.ids, anchors, model.get_input_embeddings()), anchors)[:, :, 1:]
        logits = nn.functional.linear(hidden, table)
    each = nn.functional.cross_entropy(logits.float().flatten(0, 2), wanted.flatten(), reduction="none").view_as(wanted)
    weight = torch.exp(-torch.arange(BLOCK - 1, device=taps.device) / GAMMA) * valid
    right = ((logits.argmax(-1) == wanted) & valid).long().cumprod(-1).sum(-1)
    whole = valid.all(-1)  # blocks cut by the end of the answer would pull the estimate down
    return (each * weight).sum() / weight.sum(), 1 + (right * whole).sum() / whole.sum().clamp_min(1)


def train_drafter(
    model: PreTrainedModel, drafter: DraftModule, corpus: Corpus, schedule: Schedule, seed: int, report: Report
) -> list[tuple[int, float, float]]:
    """Train in place against the frozen target; returns (step, loss, estimated acceptance length)."""
    drafter.to(corpus.device).train()
    parameters = list(drafter.parameters())
    optimizer = adamw(parameters, schedule.learning_rate, 0.01)
    draw = torch.Generator(corpus.device).manual_seed(seed)
    log, every = [], max(1, schedule.steps // 20)
    running = torch.zeros(2, device=corpus.device)
    batches = corpus.batches(seed, schedule.tokens)
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * one_cycle(step, schedule.steps)
        loss, length = drafter_loss(model, drafter, next(batches), draw)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        running += torch.stack((loss.detach(), length))
        if (step + 1) % every == 0:
            mean = (running / every).tolist()
            log.append((step + 1, round(mean[0], 5), round(mean[1], 3)))
            running.zero_()
            report(f"drafter step {step + 1}/{schedule.steps} loss {mean[0]:.4f} acceptance about {mean[1]:.2f}")
    return log


def save_drafter(drafter: DraftModule, shape: PairShape, folder: Path) -> None:
    """Round the weights to bfloat16 (in place) and save them under the published names."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.drafter, indent=1) + "\n", encoding="utf-8")
    drafter.eval().requires_grad_(False)
