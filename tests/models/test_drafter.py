"""The drafter against golden data, against a naive forward in float64, and against itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash.reference import DrafterModel, drafter_dtype
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.rope import inverse_frequencies
from tests.drafter_configs import read_decoder

GOLDEN = Path(__file__).parents[1] / "golden"
PAIRS = ("llama31-v1-b10", "qwen3-v1-b8", "qwen3-v2-swa-b16", "qwen35-v2-swa-b8")
WIDTH = 48  # target hidden of the random drafters


def config(**changes: object) -> DFlashConfig:
    """A small drafter: 2 full layers, 2 taps, block 8; ``changes`` are config.json keys."""
    raw: dict[str, object] = {
        "architectures": ["DFlashDraftModel"], "hidden_size": WIDTH, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "block_size": 8, "rope_theta": 1e4, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    return read_decoder({**raw, **changes}, Path("config.json"))


def taps_of(count: int) -> dict[str, object]:
    return {"mask_token_id": 5, "target_layer_ids": list(range(count))}


SWA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding causal": SWA,
    "sliding not causal": {**SWA, "is_causal": False},
    "window below block": {**SWA, "sliding_window": 3, "is_causal": False},
    "full causal": {"is_causal": True},
    "biases": {"attention_bias": True},
    "yarn": {"rope_scaling": YARN},
    "5 taps 8 layers": {"num_hidden_layers": 8, "dflash_config": taps_of(5)},
    "8 taps 6 layers": {
        "num_hidden_layers": 6,
        "dflash_config": taps_of(8),
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 12,
    },
}


def checkpoint_tensors(drafter: DrafterModel) -> dict[str, torch.Tensor]:
    """The random drafter's tensors in the checkpoint's layout, drawn again from the same seed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in drafter.config.tensors(WIDTH).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else noise
        if len(shape) == 2:
            tensors[name] = noise / shape[1] ** 0.5
    return tensors


def naive(tensors: dict[str, torch.Tensor], cfg: DFlashConfig, taps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The published forward, word for word in float64: explicit concatenation, dense mask, repeated key heads."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    taps, x, n, rows, half = taps.double(), x.double(), len(taps), len(x), cfg.head_dim // 2

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name + ".weight"] * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps)

    def linear(y: torch.Tensor, name: str) -> torch.Tensor:
        out = y @ weights[name + ".weight"].T
        return out + weights[name + ".bias"] if name + ".bias" in weights else out

    angle = torch.outer(torch.arange(n + rows).double(), inverse_frequencies(cfg.rope, cfg.head_dim).double())
    cos, sin = (torch.cat((f, f), -1)[:, None] * cfg.rope.attention_factor for f in (angle.cos(), angle.sin()))

    def rope(y: torch.Tensor, at: slice) -> torch.Tensor:
        return y * cos[at] + torch.cat((-y[..., half:], y[..., :half]), -1) * sin[at]

    context = norm(linear(taps, "fc"), "hidden_norm")
    for index in range(cfg.num_layers):
        layer = f"layers.{index}"
        u = norm(x, layer + ".input_layernorm")
        both = torch.cat((context, u))
        q = linear(u, layer + ".self_attn.q_proj").view(rows, -1, cfg.head_dim)
        k = linear(both, layer + ".self_attn.k_proj").view(n + rows, -1, cfg.head_dim)
        v = linear(both, layer + ".self_attn.v_proj").view(n + rows, -1, cfg.head_dim)
        q = rope(norm(q, layer + ".self_attn.q_norm"), slice(n, None))
        k = rope(norm(k, layer + ".self_attn.k_norm"), slice(0, None))
        group = cfg.num_heads // cfg.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * cfg.head_dim**-0.5
        p, s = torch.arange(n, n + rows)[:, None], torch.arange(n + rows)[None]
        window = cfg.windows[index]
        seen = torch.ones(rows, n + rows, dtype=torch.bool) if window is None else (p - s).abs() < window
        if cfg.causal[index]:
            seen = seen & (s <= p)
        weight = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weight, v.repeat_interleave(group, 1)).reshape(rows, -1)
        x = x + linear(mixed, layer + ".self_attn.o_proj")
        u = norm(x, layer + ".post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(u, layer + ".mlp.gate_proj"))
        x = x + linear(gate * linear(u, layer + ".mlp.up_proj"), layer + ".mlp.down_proj")
    return norm(x, "norm")


def inputs(cfg: DFlashConfig, context: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(context, len(cfg.taps) * WIDTH, generator=generator)
    return taps, torch.randn(cfg.block_size, WIDTH, generator=generator)


def draft(drafter: DrafterModel, taps: torch.Tensor, block: torch.Tensor, **cache: int) -> torch.Tensor:
    memory = drafter.new_cache(**{"capacity": 4, **cache})
    drafter.write_context(memory, taps, 0)
    return drafter.draft_hidden(memory, block, len(taps))


@pytest.fixture(params=PAIRS)
def golden(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    folder = GOLDEN / request.param
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    target = dict(Checkpoint.open(folder / "target").read(names=names))
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return (
        DrafterModel.load(Checkpoint.open(folder / "drafter")),
        target,
        cases,
        load_file(folder / "expected.safetensors"),
    )


def golden_block(drafter: DrafterModel, target: dict, case: dict) -> torch.Tensor:
    ids = [case["output_ids"][0]] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
    return target["model.embed_tokens.weight"][torch.tensor(ids)]


def test_golden_hidden_and_logits(golden: Any) -> None:
    """assert_close, not a running max: max(0, nan) is 0, so a running max would pass on NaN."""
    drafter, target, cases, expected = golden
    assert len(cases) == 6
    for number, case in enumerate(cases):
        hidden = draft(drafter, expected[f"case{number}.target_taps"][0], golden_block(drafter, target, case))
        logits = hidden[1:] @ target["lm_head.weight"].T
        torch.testing.assert_close(hidden, expected[f"case{number}.draft_hidden"][0], atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, expected[f"case{number}.draft_logits"][0], atol=1e-4, rtol=0)


def test_golden_data_notices_wrong_inputs(golden: Any) -> None:
    """Scaling the taps would prove nothing (hidden_norm cancels it): these controls must move the answer."""
    drafter, target, cases, expected = golden
    taps, block = expected["case5.target_taps"][0], golden_block(drafter, target, cases[5])
    good = expected["case5.draft_hidden"][0]
    theta = replace(drafter.config, rope=replace(drafter.config.rope, theta=2 * drafter.config.rope.theta))
    assert (draft(drafter, taps.roll(64, 1), block) - good).abs().max() > 0.1  # order of the taps
    assert (draft(drafter, taps.roll(1, 0), block) - good).abs().max() > 0.1  # positions
    assert (draft(drafter, taps[1:], block) - good).abs().max() > 1e-3  # one row lost
    assert (draft(DrafterModel(theta, drafter._weights), taps, block) - good).abs().max() > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("context", [0, 1, 11, 12, 13, 40])
def test_equals_naive_forward(name: str, context: int) -> None:
    cfg = config(**VARIANTS[name])
    drafter = DrafterModel.random(cfg, target_hidden=WIDTH, seed=0)
    taps, block = inputs(cfg, context)
    expected = naive(checkpoint_tensors(drafter), cfg, taps, block)
    torch.testing.assert_close(draft(drafter, taps, block).double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 1, 32], [39, 1], [16, 0, 24]])
def test_incremental_context_equals_batch(sizes: list[int]) -> None:
    cfg = config(**SWA)
    drafter = DrafterModel.random(cfg, target_hidden=WIDTH, seed=0)
    taps, block = inputs(cfg, 40)
    cache = drafter.new_cache(capacity=2)
    for chunk in taps.split(sizes):
        drafter.write_context(cache, chunk, cache.length)
    assert cache.length == 40 and cache.capacity >= 40
    torch.testing.assert_close(drafter.draft_hidden(cache, block, 40), draft(drafter, taps, block), atol=1e-5, rtol=0)


def test_poisoned_rows_behind_the_length_are_never_read() -> None:
    cfg = config(**SWA)
    drafter = DrafterModel.random(cfg, target_hidden=WIDTH, seed=0)
    taps, block = inputs(cfg, 40)
    cache = drafter.new_cache(capacity=128)
    drafter.write_context(cache, taps, 0)
    clean = drafter.draft_hidden(cache, block, 40)
    for buffer in (cache.keys, cache.values):
        buffer[:, :, 40:] = float("nan")
    assert torch.equal(drafter.draft_hidden(cache, block, 40), clean)
    cache.keys[:, :, 39:40] = float("nan")  # the control: a committed row is read
    assert not torch.isfinite(drafter.draft_hidden(cache, block, 40)).all()


def test_truncate_and_write_again() -> None:
    cfg = config(**SWA)
    drafter = DrafterModel.random(cfg, target_hidden=WIDTH, seed=0)
    taps, block = inputs(cfg, 40)
    wrong, _ = inputs(cfg, 15, seed=9)
    cache = drafter.new_cache(capacity=8)
    drafter.write_context(cache, taps[:25], 0)
    drafter.write_context(cache, wrong, 25)
    cache.truncate(25)
    drafter.write_context(cache, taps[25:], 25)
    torch.testing.assert_close(drafter.draft_hidden(cache, block, 40), draft(drafter, taps, block), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="truncate a cache of 40 rows to 41"):
        cache.truncate(41)
    with pytest.raises(ValueError, match="start 7"):
        drafter.write_context(cache, taps[:1], 7)


def test_draft_window_keeps_last_rows_at_absolute_positions() -> None:
    drafter = DrafterModel.random(config(num_hidden_layers=1), target_hidden=WIDTH, seed=0)
    taps, block = inputs(drafter.config, 40)
    assert torch.equal(draft(drafter, taps, block, draft_window=40), draft(drafter, taps, block))
    windowed = draft(drafter, taps, block, draft_window=10)
    other = taps.clone()
    other[:30] = 7.0  # outside the window: must not matter
    assert torch.equal(draft(drafter, other, block, draft_window=10), windowed)
    assert (windowed - draft(drafter, taps, block)).abs().max() > 1e-3


def test_bfloat16_is_close_and_float16_is_refused() -> None:
    cfg = config(**SWA)
    taps, block = inputs(cfg, 40)
    exact = draft(DrafterModel.random(cfg, target_hidden=WIDTH, seed=0), taps, block)
    half = DrafterModel.random(cfg, target_hidden=WIDTH, seed=0, dtype=torch.bfloat16)
    out = draft(half, taps.half(), block.half())  # a float16 target's taps are cast on entry
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).abs().mean() < 0.05
    assert drafter_dtype(torch.float16) == torch.bfloat16 and drafter_dtype(torch.float32) == torch.float32
    with pytest.raises(ValueError, match="float16"):
        DrafterModel.random(cfg, target_hidden=WIDTH, seed=0, dtype=torch.float16)
