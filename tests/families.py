"""Tiny random targets of every family, built with transformers, float32, logits of a useful spread."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

VOCAB = 96
HIDDEN = 32
LOGIT_STD = 4.0  # random heads are scaled to this, so that ties do not decide a test

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": 2048, "initializer_range": 0.08}
_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
FAMILIES = (
    "llama",
    "mistral",
    "gemma2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_wrapped",
    "qwen3_5_moe",
    "gpt_oss",
    "deepseek_v3",
)
# transformers' own, before ``ForCausalLM`` and ``Config``.
NAMES = {
    "llama": "Llama",
    "llama_biased": "Llama",
    "mistral": "Mistral",
    "mistral_full": "Mistral",
    "gemma2": "Gemma2",
    "gemma2_full": "Gemma2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_biased": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "gpt_oss": "GptOss",
    "gpt_oss_dense": "GptOss",
    "deepseek_v3": "DeepseekV3",
}
CONFIG_NAMES = {"qwen3_5": "Qwen3_5Text", "qwen3_5_biased": "Qwen3_5Text", "qwen3_5_moe": "Qwen3_5MoeText"}
BIASED = ("llama_biased", "qwen3_5_biased", "gpt_oss", "gpt_oss_dense")
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_biased", "qwen3_5_wrapped", "qwen3_5_moe")


def _text_settings(family: str) -> dict[str, Any]:
    """Configuration values of a family's language model."""
    base = {**_SIZES, **_ENDS, **_ATTENTION, "num_hidden_layers": 4, "intermediate_size": 48}
    if family == "llama_biased":
        return {**base, "attention_bias": True, "head_dim": 64, "rope_parameters": _YARN}
    if family == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return {**base, "rope_parameters": rope, "tie_word_embeddings": False}
    if family in ("mistral", "mistral_full"):
        return {**base, "sliding_window": 8 if family == "mistral" else None}
    if family in ("gemma2", "gemma2_full"):
        caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 12}
        gemma = {**base, **caps, "sliding_window": 8, "tie_word_embeddings": False}
        if family == "gemma2":
            return gemma
        full = {"attn_logit_softcapping": None, "layer_types": ["full_attention"] * 4, "hidden_activation": "silu"}
        return {**gemma, **full}  # what the fused engine has of it: norms of results, scales, the cap of logits
    if family == "qwen3_moe":
        return {**base, **_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if family == "qwen3_next":
        shared = {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
        return {**base, **_RECURRENT, **_EXPERTS, **shared, "rope_parameters": _PARTIAL_ROPE}
    if family in ("qwen3_5", "qwen3_5_biased", "qwen3_5_wrapped", "qwen3_5_moe"):
        rope = {**_PARTIAL_ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
        extra = {**_EXPERTS, "shared_expert_intermediate_size": 16} if family == "qwen3_5_moe" else {}
        biased = {"attention_bias": family == "qwen3_5_biased"}  # of queries and of what gates their results
        return {**base, **_RECURRENT, **extra, **biased, "rope_parameters": rope}
    if family in ("gpt_oss", "gpt_oss_dense"):
        types = ["sliding_attention", "full_attention"] * 2
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return {**base, **experts, "layer_types": types, "sliding_window": 8, "rope_parameters": _YARN}
    if family == "deepseek_v3":
        latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
        groups = {"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        del base["head_dim"]
        return {**base, **latent, **experts, **groups}
    return base


def _model(family: str, **changes: Any) -> Any:
    import transformers as t

    settings = {**_text_settings(family), **changes}
    if family == "qwen3_5_wrapped":
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN}
        config = t.Qwen3_5Config(text_config=settings, vision_config={**vision, "num_position_embeddings": 16})
        return t.Qwen3_5ForConditionalGeneration(config)
    if family == "gpt_oss_dense":
        return _dense_gpt_oss(t.GptOssConfig(**settings))
    config = getattr(t, f"{CONFIG_NAMES.get(family) or NAMES[family]}Config")(**settings)
    return getattr(t, f"{NAMES[family]}ForCausalLM")(config)


def _dense_gpt_oss(config: Any) -> Any:
    """gpt-oss with Llama's feed-forward parts: sinks, windows and biases without a mixture of experts."""
    from transformers import GptOssForCausalLM, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Dense(LlamaMLP):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x), None  # gpt-oss's layers expect the router's scores as well

    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = Dense(LlamaConfig(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size))
        for weight in layer.mlp.parameters():
            torch.nn.init.normal_(weight, std=config.initializer_range)
    return model


# Most tests ask for a model that another one has had: what was made is kept, by all that it follows from.
_MADE: dict[str, tuple[Any, torch.Tensor]] = {}
_SAVED: dict[str, dict[str, bytes]] = {}


def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of ``family`` in eval mode, the caller's own. ``changes``: of its configuration."""
    key = repr((family, seed, sorted(changes.items())))
    if key not in _MADE:
        _MADE[key] = _made(family, seed, **changes), torch.get_rng_state()
    model, state = _MADE[key]
    torch.set_rng_state(state)  # as if it had been made here
    return copy.deepcopy(model)


@torch.no_grad()
def _made(family: str, seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = _model(family, **changes).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_(mean=3.0 if family == "gpt_oss_dense" else 0.0)  # as much as a window of keys
        elif name.endswith(("_proj.bias", "_proj_bias", "router.bias")) and family in BIASED:
            parameter.normal_(std=0.2)
    ids = torch.randint(0, VOCAB, (1, 64))
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    scale = LOGIT_STD / model(input_ids=ids, use_cache=False).logits.std()
    if tied:
        # A tied head cannot be scaled alone: scale the final norm's gain instead.
        raise AssertionError(f"the {family} test model ties its embeddings")
    head.weight.mul_(scale)
    return model


def save_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random model the way a hub repository holds it."""
    key = repr((family, seed, sorted(changes.items())))
    if key not in _SAVED:
        with TemporaryDirectory() as made:
            random_model(family, seed, **changes).save_pretrained(made)
            _SAVED[key] = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _SAVED[key].items():
        (folder / name).write_bytes(content)
    return folder
