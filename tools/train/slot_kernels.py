"""Decode attention of one new token in each slot, and the draw of the next one: Triton, with PyTorch beside it."""

from __future__ import annotations

import torch
from torch.nn import functional

from dflash_local.kernels.jit import jit, tl

TILE = 64  # keys at a time
CHUNK = 4096  # logits at a time
ROWS = 16  # the fewest query heads that tl.dot takes


def attend_slots(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """Store k and v [b, kv, d] at places ``at`` [b] and attend from q [b, h, d], scaled already, to all up to there.

    Args:
        keys, values: [b, kv, room, d], written in place.

    Returns:
        [b, h, d].
    """
    if not q.is_cuda:
        return attend_slots_reference(q, k, v, keys, values, at)
    batch, heads, dim = q.shape
    kv, room = keys.shape[1], keys.shape[2]
    group, out = heads // kv, torch.empty_like(q)
    padded_dim, padded_group = _power_of_two(dim), max(ROWS, _power_of_two(group))
    _attend[(batch, kv)](q, k, v, keys, values, at, out, room, kv, group, dim, padded_group, padded_dim, TILE)
    return out


def attend_slots_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """What ``attend_slots`` computes."""
    every = torch.arange(len(q), device=q.device)
    keys[every, :, at], values[every, :, at] = k, v
    seen = torch.arange(keys.shape[2], device=q.device) <= at.unsqueeze(1)
    group = q.shape[1] // k.shape[1]
    wide_keys, wide_values = (x.repeat_interleave(group, 1) for x in (keys, values))
    found = functional.scaled_dot_product_attention(
        q.unsqueeze(2), wide_keys, wide_values, attn_mask=seen[:, None, None], scale=1.0
    )
    return found.squeeze(2)


def choose(
    logits: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor, log_min_p: float, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next ids [b] of logits [b, vocabulary], and the likeliest ones [b].

    Args:
        temperature: [b]. greedy: [b], True takes the likeliest.
        log_min_p: logarithm of the least share of the likeliest probability that an id must have.
        seed: [1] int64 on the device; another one for each call.
    """
    if not logits.is_cuda:
        return choose_reference(logits, temperature, greedy, log_min_p, seed)
    rows, width = logits.shape
    chosen, best = (torch.empty(rows, dtype=torch.int64, device=logits.device) for _ in range(2))
    _choose[(rows,)](logits, temperature, greedy, seed, chosen, best, width, log_min_p, CHUNK)
    return chosen, best


def choose_reference(
    logits: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor, log_min_p: float, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``choose`` draws from, with other noise."""
    draw = torch.Generator(logits.device).manual_seed(int(seed))
    best = logits.argmax(-1)
    score = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature.unsqueeze(1)
    noise = -torch.log(torch.empty_like(score).exponential_(generator=draw))
    drawn = torch.where(score < log_min_p, float("-inf"), score + noise).argmax(-1)
    return torch.where(greedy, best, drawn), best


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    at_ptr,
    out_ptr,
    room,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """One slot and key head a program: the new key opens the running softmax, stored ones follow by tiles."""
    slot, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(at_ptr + slot)
    row, column, key = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.arange(0, TILE)
    inside = (row[:, None] < GROUP) & (column[None, :] < DIM)
    q_at = ((slot * KV + head) * GROUP + row[:, None]) * DIM + column[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    own = (slot * KV + head) * DIM + column
    k_new = tl.load(k_ptr + own, mask=column < DIM, other=0.0)
    v_new = tl.load(v_ptr + own, mask=column < DIM, other=0.0)
    base = (slot * KV + head).to(tl.int64) * room * DIM
    tl.store(keys_ptr + base + at * DIM + column, k_new, mask=column < DIM)
    tl.store(values_ptr + base + at * DIM + column, v_new, mask=column < DIM)
    peak = tl.sum(q.to(tl.float32) * k_new[None, :].to(tl.float32), 1)
    total = tl.full([PADDED_GROUP], 1.0, tl.float32)
    mixed = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32) + v_new[None, :].to(tl.float32)
    for first in range(0, at, TILE):
        there = first + key < at
        place = base + (first + key[:, None]) * DIM + column[None, :]
        seen = there[:, None] & (column[None, :] < DIM)
        k = tl.load(keys_ptr + place, mask=seen, other=0.0)
        v = tl.load(values_ptr + place, mask=seen, other=0.0)
        score = tl.where(there[None, :], tl.dot(q, tl.trans(k)), -1e30)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        share, kept = tl.exp(score - new_peak[:, None]), tl.exp(peak - new_peak)
        total = total * kept + tl.sum(share, 1)
        mixed = mixed * kept[:, None] + tl.dot(share.to(v.dtype), v)
        peak = new_peak
    tl.store(out_ptr + q_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _choose(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    seed_ptr,
    chosen_ptr,
    best_ptr,
    width,
    log_min_p,
    CHUNK: tl.constexpr,
):
    """One row a program: a pass for the likeliest, and unless greedy one for the largest score plus Gumbel noise."""
    row = tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * width
    column = tl.arange(0, CHUNK)
    peak, best = -float("inf"), 0
    for first in range(0, width, CHUNK):
        score = tl.load(base + first + column, mask=first + column < width, other=-float("inf")).to(tl.float32)
        value, place = tl.max(score, 0, return_indices=True)
        best = tl.where(value > peak, first + place, best)
        peak = tl.maximum(peak, value)
    chosen = best
    if tl.load(greedy_ptr + row) == 0:
        seed, heat = tl.load(seed_ptr), tl.load(temperature_ptr + row)
        highest = -float("inf")
        for first in range(0, width, CHUNK):
            score = tl.load(base + first + column, mask=first + column < width, other=-float("inf")).to(tl.float32)
            score = (score - peak) / heat
            uniform = tl.maximum(tl.rand(seed, row * width + first + column), 1e-10)
            noisy = score - tl.log(-tl.log(uniform))
            noisy = tl.where(score < log_min_p, -float("inf"), noisy)
            value, place = tl.max(noisy, 0, return_indices=True)
            chosen = tl.where(value > highest, first + place, chosen)
            highest = tl.maximum(highest, value)
    tl.store(chosen_ptr + row, chosen)
    tl.store(best_ptr + row, best)
