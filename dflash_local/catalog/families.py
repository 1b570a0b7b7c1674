"""The architectures that targets may have, under the family names used everywhere. Knows no torch."""

from __future__ import annotations

# Architecture -> family. The family names the text model; multimodal wrappers share it.
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
}

# Family -> the ``model_type`` that a configuration of it may carry; the first is that of its text model.
MODEL_TYPES = {
    "llama": ("llama",),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_5": ("qwen3_5_text", "qwen3_5"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe"),
    "gpt_oss": ("gpt_oss",),
    "deepseek_v3": ("deepseek_v3", "kimi_k2", "kimi_k25"),
}

# Family -> the kinds of layers that its targets may mix.
_SLIDING, _LINEAR = ("full_attention", "sliding_attention"), ("full_attention", "linear_attention")
LAYER_TYPES = {
    "llama": ("full_attention",),
    **dict.fromkeys(("qwen3", "qwen3_moe", "gpt_oss"), _SLIDING),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _LINEAR),
    "deepseek_v3": ("full_attention",),
}
