"""Tiny random models of every family that is read from GGUF files, and what llama.cpp's own converter makes of them.

``python -m tools.gguf_fixtures LLAMA_CPP`` writes ``tests/golden/gguf``: weights for each ``NAME/config.json`` in it,
and ``NAME.gguf`` of both; for drafters of the golden pairs the file alone. Weights are seeded, but a torch of another
version may draw others: so all of it is written anew, together.
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
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
DRAFTERS = ("qwen35-v2-swa-b8", "qwen3-dflash2-b16")
VOCAB = 96  # of the golden pairs, too
Tensors = dict[str, torch.Tensor]
# Further arguments of the converter: what puts several matrices in one tensor, what leaves out layers that are missing.
ARGUMENTS = {
    "llama-biased": ("--fuse-qkv",),
    "qwen3next": ("--no-mtp",),
    "qwen35moe": ("--no-mtp", "--fuse-gate-up-exps"),
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
PLUS_ONE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
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


def random_model(config: Any) -> Any:
    """Every parameter is drawn, so that none is what it would be if it were forgotten."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(20)
    for key, weight in model.named_parameters():
        drawn = torch.randn_like(weight) * (0.3 if weight.ndim < 2 else 0.12)
        is_norm = key.endswith("norm.weight") and not (config.model_type in PLUS_ONE and "linear_attn" not in key)
        weight.data = (drawn + 1.0 if is_norm else drawn).contiguous()
    return model


def write_weights(folder: Path) -> torch.dtype:
    """Draw those of the model that config.json describes; returns the dtype in which they are stored."""
    told = (folder / "config.json").read_text()
    config = AutoConfig.from_pretrained(folder).get_text_config()
    dtype: torch.dtype = config.dtype
    model = random_model(config).to(dtype)
    model.save_pretrained(folder)
    if folder.name in PUBLISHED:
        tensors = PUBLISHED[folder.name](model).items()
        save_file({key: each.contiguous() for key, each in tensors}, folder / "model.safetensors", {"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(told)
    return dtype


def _wrapped(model: Any) -> Tensors:
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
    return inside | ahead


def _with_coded_experts(model: Any) -> Tensors:
    """As gpt-oss is published: experts as MXFP4 codes, all of them drawn, and scales from 2^-5 to 2^-2."""
    tensors = model.state_dict()
    for key in [key for key in tensors if key.endswith(("up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape  # in memory [E, in, out], stored by output row
        shape = experts, rows, columns // 32
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    return tensors


# What files hold otherwise than transformers saves it.
PUBLISHED: dict[str, Callable[[Any], Tensors]] = {"qwen35": _wrapped, "gpt-oss-mxfp4": _with_coded_experts}


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
    for config in sorted(out.glob("*/config.json")):
        folder = config.parent
        dtype = TYPES[write_weights(folder)]
        write_tokenizer(folder)
        convert(folder, "--outfile", f"{folder}.gguf", "--outtype", dtype, *ARGUMENTS.get(folder.name, ()))
        for part in ("tokenizer.json", "tokenizer_config.json"):
            (folder / part).unlink()
    for pair in DRAFTERS:
        with TemporaryDirectory() as scratch:
            shutil.copy(GOLDEN / pair / "target" / "config.json", scratch)
            write_tokenizer(Path(scratch))
            outfile, drafter = out / f"drafter-{pair}.gguf", GOLDEN / pair / "drafter"
            convert(drafter, "--target-model-dir", scratch, "--outfile", outfile, "--outtype", "q8_0")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), GOLDEN / "gguf")
