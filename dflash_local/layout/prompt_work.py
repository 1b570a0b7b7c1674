"""Describe what the fused engine does for a prompt: numbers that are multiplied, and weights that are decoded for each
chunk. Knows nothing of cards or times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig, ModelConfig, MoEConfig
from dflash_local.layout.buffer import ITEM_BYTES
from dflash_local.layout.cycle import prompt_chunk
from dflash_local.layout.linear import stored_formats
from dflash_local.layout.moe import MoELayout
from dflash_local.layout.target import part_layout


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Sums a prompt's work.

    Attributes:
        products, attention: 1e12 operations, a multiplication and an addition being two. recurrent: 1e6 tokens of
            recurrent layers. decoded: 1e9 weights of quantised products, for each chunk again. experts: by their
            format, as named, 1e9 weights of all experts, for each chunk again.
    """

    products: float
    attention: float
    recurrent: float
    decoded: float
    experts: Mapping[str, float]


@lru_cache(maxsize=512)
def prompt_work(model: ModelConfig, tokens: int, chunk: int | None = None) -> PromptWork:
    """Sum the work of a prompt of so many tokens. Raise KeyError where the fused engine has no such layer.

    Args:
        chunk: tokens processed at once; the model's own if not given.
    """
    rows = prompt_chunk(model, tokens, chunk)
    chunks = -(-tokens // rows)
    format_of = stored_formats(model.quantization)
    weights, of_token, scores, recurrent = 0, 0, 0.0, 0
    experts: Counter[str] = Counter()
    for index, layer in enumerate(model.layers):
        for config in (layer.mixer, layer.mlp):
            part = part_layout(config)
            at = f"layers.{index}.{part.module}"
            weights += sum(each.in_features * each.out_features for each in part.projections(at, model.hidden_size))
            if isinstance(config, MoEConfig):
                expert, mixture = 3 * config.intermediate_size * model.hidden_size, MoELayout(config)
                of_token += expert * mixture.top_k
                form = format_of(f"{at}.experts.0.gate_proj").name
                parts = -(-rows // mixture.rows_at_once(rows, model.hidden_size, ITEM_BYTES["bfloat16"]))
                experts[form] += expert * config.num_experts * parts
            elif isinstance(config, AttentionConfig):
                seen = min(tokens / 2, config.sliding_window or tokens)
                scores += 4 * config.output_size * seen
            elif isinstance(config, GatedDeltaNetConfig):
                recurrent += 1
    return PromptWork(
        products=2 * (weights + of_token) * tokens / 1e12,
        attention=scores * tokens / 1e12,
        recurrent=recurrent * tokens / 1e6,
        decoded=0.0 if model.quantization is None else weights * chunks / 1e9,
        experts={form: count * chunks / 1e9 for form, count in experts.items()},
    )
