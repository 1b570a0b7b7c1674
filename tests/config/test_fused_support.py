"""Why the fused engine cannot run a model: by its features, whatever it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash_local.config.features import (
    AttentionConfig,
    ClampedSwiGLU,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from dflash_local.config.fused_support import fused_refusal
from dflash_local.config.quantization import Quantization, StoredFp8, StoredInt, StoredPlain

ATTENTION = AttentionConfig(4, 2, 8, rotary_dim=8)
DELTA = GatedDeltaNetConfig(2, 4, 8, 8, conv_kernel_size=4)
INTERLEAVED = replace(DELTA, split_projections=False)
AT_LOAD = Quantization(
    "fp8", names=(("layers.1.linear_attn.in_proj_qkvz", StoredPlain(StoredFp8((16, 16)))),), at_load=True
)
MLP = MLPConfig(48)
MIXTURE = MoEConfig(8, 2, 16)
DENSE = ModelConfig(
    source="x",
    family="a name that decides nothing",
    hidden_size=32,
    vocab_size=96,
    tie_word_embeddings=False,
    layers=(LayerConfig(ATTENTION, MLP),) * 2,
    rms_norm_eps=None,
    norm_plus_one=False,
    rope=None,
    max_position_embeddings=None,
)


def last(**changes: Any) -> ModelConfig:
    """The dense model, its last layer changed."""
    return replace(DENSE, layers=(DENSE.layers[0], replace(DENSE.layers[1], **changes)))


def in_fp8(model: ModelConfig, rows: int, columns: int) -> ModelConfig:
    return replace(model, quantization=Quantization("fp8", default=StoredFp8((rows, columns))))


# Dense and hybrid models of every feature that it knows.
RUN = (
    DENSE,
    last(mixer=DELTA),
    last(mixer=replace(DELTA, split_projections=False)),
    replace(DENSE, norm_plus_one=True),
    last(mixer=replace(ATTENTION, gated=True, qk_norm=True, rotary_dim=4)),
    last(mixer=replace(ATTENTION, scale=0.1, sliding_window=64)),
    last(mixer=replace(ATTENTION, sinks=True, sliding_window=64)),
    last(mixer=replace(ATTENTION, qkv_bias=True, output_bias=True)),
    last(sandwich_norms=True),
    replace(DENSE, embedding_scale=8.0, final_logit_softcap=30.0),
)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        *((model, "") for model in RUN),
        (last(mixer=LatentAttentionConfig(4, 16, 16, 8, 4, 8)), "its attention is latent"),
        (
            in_fp8(last(mixer=INTERLEAVED), 128, 128),
            "its interleaved Gated-DeltaNet rows cross its fp8 blocks of 128 rows",
        ),
        (
            replace(last(mixer=INTERLEAVED), quantization=AT_LOAD),
            "its interleaved Gated-DeltaNet rows cross its fp8 blocks of 16 rows",
        ),
        (in_fp8(last(mixer=INTERLEAVED), 8, 128), ""),
        (in_fp8(last(mixer=INTERLEAVED), 0, 0), ""),
        (replace(last(mixer=INTERLEAVED), quantization=Quantization("gptq", default=StoredInt("gptq", 128))), ""),
        (last(mlp=replace(MIXTURE, expert_bias=True, router_bias=True)), ""),
        (last(mlp=replace(MIXTURE, activation=ClampedSwiGLU(), interleaved=True)), ""),
        (
            last(mlp=replace(MIXTURE, expert_bias=True, shared_intermediate_size=16)),
            "its shared expert is unlike the others",
        ),
        (last(mlp=replace(MIXTURE, scoring="sigmoid")), "its router takes the sigmoid of its logits"),
        (last(mlp=replace(MIXTURE, num_experts_per_tok=None)), "its num_experts_per_tok is not known"),
        (last(mlp=replace(MIXTURE, activation="gelu")), "its activation is gelu"),
        (in_fp8(last(mlp=MIXTURE), 128, 128), "fp8 blocks of 128 rows do not divide the 16 rows of its experts"),
        (in_fp8(last(mlp=MIXTURE), 16, 16), ""),
        (
            replace(last(mlp=MIXTURE), hidden_size=40, quantization=Quantization("fp8", default=StoredFp8((16, 16)))),
            "fp8 blocks of 16 rows do not divide the 40 rows of its experts",
        ),
        (
            replace(last(mlp=MIXTURE), quantization=Quantization("x", names=(("up_proj", StoredFp8((16, 16))),))),
            "gate and up of its experts differ in format",
        ),
        (replace(DENSE, layers=(LayerConfig(DELTA, MLP),)), "it has no attention"),
        (replace(DENSE, quantization=Quantization("awq", unread="awq")), "its weights are in the format awq"),
        (in_fp8(DENSE, 128, 128), ""),
        (last(mlp=replace(MLP, bias=True)), "its feed-forward projections have biases"),
        (last(mlp=replace(MLP, activation="gelu_pytorch_tanh")), "its activation is gelu_pytorch_tanh"),
        (last(mixer=replace(ATTENTION, logit_softcap=50.0)), "its attention scores have a soft cap"),
        (last(mixer=replace(DELTA, conv_kernel_size=3)), "its convolution is 3 wide, 4 is known"),
        (replace(DENSE, rope_type="longrope"), "its rotary embedding is longrope"),
    ],
)
def test_what_it_does_not_know_is_named(model: ModelConfig, why: str) -> None:
    assert fused_refusal(model) == why
