"""Tiny byte-level tokenizers, trained here: ChatML with think tags, harmony, and a base one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
HARMONY_SPECIAL = (
    "<|startoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
# In the manner of Qwen3: old thinking is dropped, no thinking means an empty block in the prompt.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\nReturn <tool_call>JSON</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today?",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i)\n",
    "système utilisateur <think> tool_call im_start im_end channel analysis final message",
    "one two three four five six seven eight nine ten, thinking about an answer",
] * 4


def byte_level(added: tuple[str, ...], special: tuple[str, ...], vocab: int = 420) -> tokenizers.Tokenizer:
    """A trained byte-level BPE with these added tokens behind the vocabulary."""
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=sorted(alphabet), show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    for text in added:
        token = tokenizers.AddedToken(text, special=text in special, normalized=False)
        library.add_special_tokens([token]) if token.special else library.add_tokens([token])
    return library


def write_folder(folder: Path, library: tokenizers.Tokenizer, config: dict[str, Any], **files: Any) -> Path:
    """A checkpoint's text files: tokenizer.json, tokenizer_config.json and what else is given by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for stem, value in {"tokenizer_config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


CHATML_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "bos_token": None,
    "chat_template": CHATML,
    "clean_up_tokenization_spaces": False,
}


@pytest.fixture(scope="session")
def chatml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = byte_level(CHATML_SPECIAL + CHATML_PLAIN, CHATML_SPECIAL)
    return write_folder(tmp_path_factory.mktemp("chatml"), library, CHATML_CONFIG)


@pytest.fixture(scope="session")
def chatml(chatml_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(open_source(chatml_folder))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    library = byte_level(HARMONY_SPECIAL, HARMONY_SPECIAL)
    config = {"eos_token": "<|return|>", "bos_token": "<|startoftext|>"}
    tokenizer = Tokenizer.load(open_source(write_folder(tmp_path_factory.mktemp("harmony"), library, config)))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """No template and no tags: think tags can only be plain text."""
    library = byte_level(("<|endoftext|>",), ("<|endoftext|>",))
    config = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "add_bos_token": True}
    tokenizer = Tokenizer.load(open_source(write_folder(tmp_path_factory.mktemp("plain"), library, config)))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def with_template(chatml_folder: Path, tmp_path: Path) -> Callable[[str], Tokenizer]:
    """The ChatML tokenizer with another template (in its own file, which wins over the settings)."""

    def build(template: str) -> Tokenizer:
        for path in chatml_folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        tokenizer = Tokenizer.load(open_source(tmp_path))
        assert tokenizer is not None
        return tokenizer

    return build
