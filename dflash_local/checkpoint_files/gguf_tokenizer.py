"""A GGUF file's tokenizer as the two files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

Owns the meaning of the keys ``tokenizer.*`` and their bounds. The rules that cut words are ``gguf_pretokenizers``'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from dflash_local.checkpoint_files.json_file import MAX_TEMPLATE_CHARS
from dflash_local.errors import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # of tokenizer.ggml.token_type; 1 is normal, 6 a byte
_DAMAGED = "the file is damaged or was converted wrongly; get another one of this model"
# The names of special tokens here and there. What a reply ends with besides eos goes under a name of its own.
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = {"eot": "eot_token", "eom": "eom_token"}


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return tokenizer.json and tokenizer_config.json as objects; None for a file without tokenizer, as drafters are.

    Args:
        metadata: keys and values of a GGUF file's head; arrays are lists.

    Raises:
        CheckpointError: a kind of tokenizer or a pre-tokenizer that is not known here, naming it, or values that
            contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model != "gpt2":
        raise CheckpointError(
            f"the tokenizer of this file is of the kind {shown(model)}, which is not read",
            "gpt2 (byte-level BPE) is, which the models of the registry have",
        )
    rules = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise _wrong("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    # Rows of the embedding that no token has are listed as unused ones, of any text.
    ids = {i: text for i, text in enumerate(tokens) if text and types[i] != UNUSED}
    vocabulary = {text: i for i, text in ids.items()}
    if len(vocabulary) != len(ids):
        twice = next(text for i, text in ids.items() if vocabulary[text] != i)
        raise _wrong("tokens", f"holds {shown(twice)} twice")
    added = [_added(i, text, types[i]) for i, text in ids.items() if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)]
    spec = _spec(vocabulary, _merges(_list(metadata, "merges", str), vocabulary), added, rules)
    return spec, _config(metadata, ids, len(tokens), rules)


def _pre_tokenizer(name: object) -> PreTokenizer:
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None:
        what = "the file does not say how its tokenizer cuts words (tokenizer.ggml.pre): it is older than that key"
        raise CheckpointError(what, "get a newer conversion of this model")
    raise CheckpointError(f"tokenizer.ggml.pre {shown(name)} is not known", f"known are {known}")


def _spec(
    vocabulary: dict[str, int], merges: list[str], added: list[dict[str, Any]], rules: PreTokenizer
) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rules.nfc else None,
        "pre_tokenizer": rules.spec,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,  # a byte that the vocabulary lacks (SmolLM2 lacks some) is left out, as in training
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rules.ignore_merges,
            # With the added tokens: the library then keeps their ids, whatever rows are unused before them.
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _config(metadata: Mapping[str, Any], ids: dict[int, str], count: int, rules: PreTokenizer) -> dict[str, Any]:
    def named(names: dict[str, str]) -> dict[str, str]:
        found = {name: _token_id(metadata, key, count) for key, name in names.items()}
        return {name: ids[i] for name, i in found.items() if i in ids}

    add_bos = metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos)
    if not isinstance(add_bos, bool):
        raise _wrong("add_bos_token", f"is {shown(add_bos)}, neither true nor false")
    config: dict[str, Any] = {**named(_SPECIAL), "add_bos_token": add_bos, "clean_up_tokenization_spaces": False}
    if ends := named(_ENDS):
        config["extra_special_tokens"] = ends
    if template := _template(metadata):
        config["chat_template"] = template
    return config


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise _wrong(f"{name}_token_id", f"is {shown(value)}; there are {count} tokens")
    return value


def _template(metadata: Mapping[str, Any]) -> str | None:
    """Return the chat template: the one without a name, or else the one named default."""
    keys = ("tokenizer.chat_template", "tokenizer.chat_template.default")
    key, template = next(((key, metadata[key]) for key in keys if key in metadata), ("", None))
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(f"{key} is {shown(template)}, no text", _DAMAGED)
    if len(template) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(f"the chat template has {len(template)} characters, {MAX_TEMPLATE_CHARS} allowed")
    return template


def _added(token_id: int, text: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": kind != USER_DEFINED}


def _merges(merges: Sequence[str], vocabulary: dict[str, int]) -> list[str]:
    """Return the merges in order, each once: the first one counts."""
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (space and left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise _wrong("merges", f"holds {shown(merge)}, which is no pair of tokens that make a token")
    return list(dict.fromkeys(merges))


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise _wrong(name, "is missing" if value is None else f"is {shown(value)}, no list of entries")
    if not all(type(entry) is kind for entry in value):
        odd = next(entry for entry in value if type(entry) is not kind)
        raise _wrong(name, f"holds {shown(odd)}, no {'text' if kind is str else 'number'}")
    return value


def _wrong(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.ggml.{name} {what}", _DAMAGED)
