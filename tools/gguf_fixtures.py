"""Tiny random models of every family that is read from GGUF files, and what llama.cpp's own converter makes of them.

``python -m tools.gguf_fixtures LLAMA_CPP`` writes ``tests/golden/gguf``: for each family ``NAME.gguf`` and ``NAME/``,
the checkpoint it was converted from; for drafters of the golden pairs the file alone. Weights are seeded, but a torch
of another version may draw others: so all of it is written anew, together.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
DRAFTERS = ("qwen35-v2-swa-b8", "qwen3-dflash2-b16")
VOCAB = 96  # of the golden pairs, too
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHARED = {"shared_expert_intermediate_size": 32}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,  # three a key head: two over two would come out right in the wrong order, too
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
PARTIAL = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
MROPE = {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
HARMONY = {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "rope_parameters": HARMONY,
}
# Of each file: transformers' name of the model, settings beside SIZES, the dtype that is stored.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {"hidden_size": 64, "rope_parameters": LLAMA3}, "bf16"),
    "llama-biased": ("Llama", {**BIASED, "num_hidden_layers": 1, "tie_word_embeddings": True}, "f32"),
    "qwen3": ("Qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}, "f16"),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 1}, "bf16"),
    "qwen3next": ("Qwen3Next", {**EXPERTS, **SHARED, **RECURRENT, "rope_parameters": PARTIAL}, "bf16"),
    "qwen35": ("Qwen3_5", {**RECURRENT, "rope_parameters": MROPE}, "bf16"),
    "qwen35moe": ("Qwen3_5Moe", {**EXPERTS, **SHARED, **RECURRENT, "rope_parameters": MROPE}, "bf16"),
    "gpt-oss": ("GptOss", GPT_OSS, "bf16"),
    "gpt-oss-mxfp4": ("GptOss", GPT_OSS, "bf16"),
}
# Further arguments of the converter: what puts several matrices in one tensor, and what leaves out layers that are not
# there.
ARGUMENTS = {
    "llama-biased": ("--fuse-qkv",),
    "qwen3next": ("--no-mtp",),
    "qwen35moe": ("--no-mtp", "--fuse-gate-up-exps"),
}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
PLUS_ONE = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
TEXT = "the quick brown fox jumps over the lazy dog. what is 1 + 2 ? it is 3, and 4567890 is more.\nthen the end.\n"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of the characters of ``TEXT`` alone, which leaves room for merges in so small a vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 8, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def random_model(name: str, settings: dict[str, Any]) -> Any:
    """Every parameter is drawn, so that none is what it would be if it were forgotten."""
    import transformers

    plain = name.startswith("Qwen3_5")  # their configurations of the text model have a name of their own
    config = getattr(transformers, f"{name}{'Text' * plain}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    torch.manual_seed(20)
    for key, weight in model.named_parameters():
        drawn = torch.randn_like(weight) * (0.3 if weight.ndim < 2 else 0.12)
        is_norm = key.endswith("norm.weight") and not (name in PLUS_ONE and "linear_attn" not in key)
        weight.data = (drawn + 1.0 if is_norm else drawn).contiguous()
    return model


def write_source(name: str, folder: Path) -> None:
    kind, settings, dtype = MODELS[name]
    model = random_model(kind, settings).to(DTYPES[dtype])
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "qwen35":
        _wrap(folder, model)
    if name == "gpt-oss-mxfp4":
        _code_experts(folder, model)


def _save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _wrap(folder: Path, model: Any) -> None:
    """As Qwen3.5 is published: the text model inside another, and layers that predict further ahead beside it."""
    inside = {
        key if key.startswith("lm_head") else key.replace("model.", "model.language_model.", 1): value
        for key, value in model.state_dict().items()
    }
    ahead = {
        key.replace("model.layers.1.", "mtp.layers.0."): value.flip(0)
        for key, value in model.state_dict().items()
        if key.startswith("model.layers.1.")
    }
    hidden = model.config.hidden_size
    ahead["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
    ahead |= {
        f"mtp.{norm}.weight": torch.randn(hidden).bfloat16()
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    text = {**model.config.to_dict(), "mtp_num_hidden_layers": 1}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": text,
    }
    _save(folder, inside | ahead, config)


def _code_experts(folder: Path, model: Any) -> None:
    """As gpt-oss is published: experts as MXFP4 codes, all of them drawn, and scales from 2^-5 to 2^-2."""
    tensors = {key: value for key, value in model.state_dict().items() if not key.endswith(("up_proj", "down_proj"))}
    config = model.config.to_dict()
    experts, inner, hidden = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        for matrix, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            at, shape = f"model.layers.{layer}.mlp.experts.{matrix}", (experts, rows, columns // 32)
            tensors[f"{at}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{at}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _save(folder, tensors, {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}})


def converter(llama_cpp: Path) -> Callable[..., None]:
    """llama.cpp's ``convert_hf_to_gguf.main`` of these arguments, which takes our vocabulary as it is."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]
    from conversion.qwen import Qwen3_5MoeTextModel, Qwen3NextModel  # type: ignore[import-not-found]

    def missing(*_: object) -> None:
        raise FileNotFoundError

    TextModel.get_vocab_base_pre = lambda *_: "qwen2"  # or it would not know so small a vocabulary
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_llama_hf = missing

    def convert(*arguments: object) -> None:
        sys.argv = ["convert_hf_to_gguf.py", *map(str, arguments)]
        Qwen3NextModel.no_mtp = Qwen3_5MoeTextModel.no_mtp = False  # --no-mtp outlives its call otherwise
        convert_hf_to_gguf.main()

    return convert


def write_all(llama_cpp: Path, out: Path) -> None:
    convert = converter(llama_cpp)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, (_, _, dtype) in MODELS.items():
        write_source(name, out / name)
        convert(out / name, "--outfile", out / f"{name}.gguf", "--outtype", dtype, *ARGUMENTS.get(name, ()))
        for part in ("tokenizer.json", "tokenizer_config.json"):
            (out / name / part).unlink()
    for pair in DRAFTERS:
        with TemporaryDirectory() as scratch:
            shutil.copy(GOLDEN / pair / "target" / "config.json", scratch)
            write_tokenizer(Path(scratch))
            outfile, drafter = out / f"drafter-{pair}.gguf", GOLDEN / pair / "drafter"
            convert(drafter, "--target-model-dir", scratch, "--outfile", outfile, "--outtype", "q8_0")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), GOLDEN / "gguf")
