"""A GGUF file's tokenizer as the objects of a folder's files: what each key becomes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from dflash_local.chat.detokenizer import byte_characters
from dflash_local.checkpoint_files.gguf_tokenizer import tokenizer_of
from dflash_local.errors import CheckpointError

BYTES = list(byte_characters())
TOKENS = [*BYTES, "<|im_start|>", "<|im_end|>", "<think>", "12", "ĠI", "[PAD261]", "<|unk|>"]
TYPES = [1] * len(BYTES) + [3, 3, 4, 1, 1, 5, 2]
MERGES = ["1 2", "Ġ I"]
END, THINK, TWELVE, PADDING, UNKNOWN = 257, 258, 259, 261, 262


def metadata(**changes: Any) -> dict[str, Any]:
    """Keys of a small file, without ``tokenizer.ggml.``; a change to ``...`` takes a key out."""
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 256,
        "eos_token_id": END,
    }
    keys = {f"tokenizer.ggml.{name}": value for name, value in (keys | changes).items() if value is not ...}
    return {"general.architecture": "llama"} | keys


def objects(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    found = tokenizer_of(metadata(**changes))
    assert found is not None
    return found


def library(**changes: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(objects(**changes)[0]))


@pytest.mark.parametrize("model", [..., "none", "no_vocab"])
def test_a_file_without_tokenizer_gives_none(model: object) -> None:
    assert tokenizer_of(metadata(model=model)) is None


def test_the_library_reads_the_object_and_keeps_every_id() -> None:
    built = library()
    assert built.encode("<|im_start|>12 I<|im_end|>").ids == [256, BYTES.index("1"), BYTES.index("2"), 260, END]
    assert built.decode([TWELVE, 260, END], skip_special_tokens=True) == "12 I"
    assert [built.token_to_id(text) for text in ("<think>", "<|unk|>")] == [THINK, UNKNOWN]


def test_types_make_added_tokens_and_an_unused_row_none() -> None:
    spec, _ = objects()
    assert {e["content"]: e["special"] for e in spec["added_tokens"]} == {
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<think>": False,
        "<|unk|>": True,
    }
    assert "[PAD261]" not in spec["model"]["vocab"]
    assert library().id_to_token(PADDING) is None


def test_special_tokens_go_by_the_names_of_tokenizer_config() -> None:
    changes = {"unknown_token_id": UNKNOWN, "padding_token_id": END, "eot_token_id": THINK, "eom_token_id": 256}
    config = objects(**changes)[1]
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert config["unk_token"] == "<|unk|>"
    assert config["extra_special_tokens"] == {"eot_token": "<think>", "eom_token": "<|im_start|>"}


@pytest.mark.parametrize(("changes", "expected"), [({}, False), ({"pre": "llama-bpe"}, True)])
def test_bos_is_added_as_the_pre_tokenizer_has_it_unless_the_file_says(changes: dict[str, Any], expected: bool) -> None:
    assert objects(**changes)[1]["add_bos_token"] is expected
    assert objects(add_bos_token=not expected, **changes)[1]["add_bos_token"] is not expected


def test_the_template_without_a_name_wins_then_the_default_one() -> None:
    names = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.default": "named"}
    tools = {"tokenizer.chat_template.tool_use": "tools"}

    def template(keys: dict[str, str]) -> object:
        found = tokenizer_of(metadata() | keys)
        assert found is not None
        return found[1].get("chat_template")

    assert template(names | tools) == "plain"
    assert template({"tokenizer.chat_template.default": "named"} | tools) == "named"
    assert template(tools) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, ["'llama'", "gpt2"]),
        ({"model": 7}, ["7"]),
        ({"pre": "poro-chat"}, ["'poro-chat'", "llama-bpe, llama-v3", "smollm"]),
        ({"pre": ...}, ["tokenizer.ggml.pre", "newer conversion"]),
        ({"pre": ["smollm"]}, ["['smollm']"]),
        ({"tokens": ...}, ["tokenizer.ggml.tokens", "is missing"]),
        ({"tokens": "abc"}, ["tokenizer.ggml.tokens", "'abc'"]),
        ({"tokens": [*TOKENS[:-1], 3]}, ["tokenizer.ggml.tokens", "holds 3"]),
        ({"tokens": [*TOKENS[:-1], "1"]}, ["tokenizer.ggml.tokens", "'1' twice"]),
        ({"token_type": TYPES[:-1]}, ["tokenizer.ggml.token_type", "262 entries for 263 tokens"]),
        ({"token_type": [*TYPES[:-1], True]}, ["tokenizer.ggml.token_type", "True"]),
        ({"token_type": ...}, ["tokenizer.ggml.token_type", "is missing"]),
        ({"merges": []}, ["tokenizer.ggml.merges"]),
        ({"merges": ["12"]}, ["tokenizer.ggml.merges", "'12'"]),
        ({"merges": ["1 2 3"]}, ["'1 2 3'"]),
        ({"merges": ["1 3"]}, ["'1 3'"]),
        ({"merges": ["Ġ I", " I"]}, ["' I'"]),
        ({"merges": [["1", "2"]]}, ["['1', '2']"]),
        ({"eos_token_id": 263}, ["tokenizer.ggml.eos_token_id", "263"]),
        ({"eos_token_id": -1}, ["-1"]),
        ({"bos_token_id": True}, ["tokenizer.ggml.bos_token_id", "True"]),
        ({"bos_token_id": 2**70}, ["tokenizer.ggml.bos_token_id"]),
        ({"padding_token_id": "0"}, ["'0'"]),
        ({"add_bos_token": 1}, ["tokenizer.ggml.add_bos_token", "1"]),
    ],
)
def test_a_hostile_value_is_one_line_that_names_it(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer_of(metadata(**changes))
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize("template", [7, "x" * 1_000_001])
def test_a_template_that_is_none_is_refused(template: object) -> None:
    with pytest.raises(CheckpointError, match=r"chat_template is 7|1000001 characters, 1000000 allowed"):
        tokenizer_of(metadata() | {"tokenizer.chat_template": template})
