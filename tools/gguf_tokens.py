"""Our tokens of a GGUF file against llama.cpp's own: ``python -m tools.gguf_tokens LIBLLAMA [FILE COUNT]``.

With a file and a number: so many seeded texts of each form (plain, and as a rendered template) through both; prints
how many are equal and the first that are not. With the library alone: writes ``tests/golden/gguf_tokens.json``, what
llama.cpp makes of a small vocabulary under every name of the table of pre-tokenizers. LIBLLAMA is a built
``libllama.so``, of the version that llama-cpp-python 0.3.36 holds: ``Params`` below is that version's struct.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tokenizer_files import AddedToken, TokenizerFiles
from dflash_local.checkpoint_files.gguf_pretokenizers import PRE_TOKENIZERS
from dflash_local.checkpoint_files.gguf_tokenizer import tokenizer_of

GOLDEN = Path(__file__).resolve().parents[1] / "tests/golden/gguf_tokens.json"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
CONTROLS = ("<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>")
UNREACHABLE = "qvxz"  # a token of the golden vocabulary that no merges make
SHOWN = 10  # differences

# What the texts are made of, by kind.
PIECES: dict[str, list[str]] = json.loads(Path(__file__).with_name("gguf_pieces.json").read_text(encoding="utf-8"))


class Params(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "callback", "user_data", "kv_overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check", "bufts", "no_host", "no_alloc", "load_mtp")),
    )


class Llama:
    """The tokenizer of llama.cpp, of one file."""

    def __init__(self, library: Path, file: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.llama_model_default_params.restype = Params
        self._lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
        self._lib.llama_model_load_from_file.restype = ctypes.c_void_p
        self._lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        self._lib.llama_model_get_vocab.restype = ctypes.c_void_p
        text, ids = (ctypes.c_char_p, ctypes.c_int32), (ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)
        self._lib.llama_tokenize.argtypes = [ctypes.c_void_p, *text, *ids, ctypes.c_bool, ctypes.c_bool]
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._lib.llama_log_set(self._quiet, None)
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        model = self._lib.llama_model_load_from_file(str(file).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp does not load {file}")
        self._vocab = self._lib.llama_model_get_vocab(model)

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text; ``special``: control tokens spelled in it are those tokens."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, special)
        return list(ids[:count])


def texts(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Texts with their kinds, the same for the same seed. The last two kinds mix all of them, and all of Unicode."""
    rng = random.Random(seed)
    every = [piece for pieces in PIECES.values() for piece in pieces]
    kinds = [*PIECES, "mixed", "unicode"]
    for i in range(count):
        kind = kinds[i % len(kinds)]
        length = rng.randint(1, 12)
        if kind == "unicode":
            yield kind, "".join(_character(rng) + rng.choice(("", "", " ", "a", "1")) for _ in range(length))
        else:
            yield kind, "".join(rng.choices(PIECES.get(kind, every), k=length))


def _character(rng: random.Random) -> str:
    """Any assigned character but surrogates and those of private use."""
    while unicodedata.category(character := chr(rng.randrange(rng.choice((0x250, 0x3100, 0x20000))))) in (
        "Cn",
        "Cs",
        "Co",
    ):
        pass
    return character


def metadata_of(file: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(file).fields
    return {name: field.contents() for name, field in fields.items()}


def tokenizer_from(metadata: Mapping[str, Any]) -> Tokenizer:
    found = tokenizer_of(metadata)
    assert found is not None, "the file has no tokenizer"
    spec, config = found
    added = tuple(AddedToken(e["id"], e["content"], e["special"]) for e in spec["added_tokens"])
    tokenizer = Tokenizer(TokenizerFiles(spec, config, added, config.get("chat_template")), frozenset())
    tokenizer.check()
    return tokenizer


def approximated(pre: str, text: str) -> bool:
    """True where llama.cpp's rules of this name are known to differ from the model's own."""
    if pre != "gpt-4o":
        return False
    # Its expression takes every letter outside ASCII for both upper and lower case, marks for no letters, and a word
    # that is a token goes through the merges all the same.
    odd = (c for c in text if ord(c) > 127 and unicodedata.category(c) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me"))
    return any(odd) or UNREACHABLE in text


def compare(llama: Llama, metadata: Mapping[str, Any], count: int) -> None:
    """Print how many of ``count`` texts give equal ids in both forms, and the first that do not."""
    pre = metadata["tokenizer.ggml.pre"]
    tokenizer, nfc = tokenizer_from(metadata), PRE_TOKENIZERS[pre].nfc
    user_defined = [token.text for token in tokenizer.added.values() if not token.special]
    equal, apart, known = 0, list[str](), 0
    for kind, text in texts(count, seed=34):
        # llama.cpp knows no normal forms; a token that is not special it reads from plain text as well.
        given = unicodedata.normalize("NFC", text) if nfc else text
        forms = [(True, tokenizer.encode(tokenizer.with_controls(text)))]
        if not any(token in text for token in user_defined):
            forms.append((False, tokenizer.encode(text)))
        if all(ids == llama.encode(given, special) for special, ids in forms):
            equal += 1
        elif approximated(pre, text):
            known += 1
        else:
            apart.append(f"  {kind}: {text!r}\n    ours  {forms[0][1]}\n    llama {llama.encode(given, True)}")
    tokenizer.close()
    print(f"{pre}: {equal} of {count} texts equal, {known} apart for known reasons, {len(apart)} apart")
    print("\n".join(apart[:SHOWN]))


def vocabulary(count: int) -> dict[str, Any]:
    """Tokens, types and merges of a small vocabulary whose merges reach over every border of words."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=count, initial_alphabet=alphabet, show_progress=False, max_token_length=6)
    library.train_from_iterator((text for kind, text in texts(4000, seed=1) if kind != "unicode"), trainer)
    model = json.loads(library.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), f"Ġ{UNREACHABLE}"]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(CONTROLS) + [USER_DEFINED] * len(TAGS)
    merges = [" ".join(pair) for pair in model["merges"]]
    return {"tokens": [*tokens, *CONTROLS, *TAGS], "token_type": types, "merges": merges}


def write_vocabulary(file: Path, keys: Mapping[str, Any], pre: str) -> None:
    """A GGUF file without tensors that holds this vocabulary under this name of a pre-tokenizer."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(keys["tokens"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(keys["tokens"])
    writer.add_token_types(keys["token_type"])
    writer.add_token_merges(keys["merges"])
    writer.add_bos_token_id(keys["tokens"].index(CONTROLS[0]))
    writer.add_eos_token_id(keys["tokens"].index(CONTROLS[1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def golden(library: Path) -> None:
    """Write what llama.cpp makes of the golden texts: for each rule the ids of a text, or null where it errs."""
    keys = vocabulary(1500)
    chosen = [f"a {UNREACHABLE} b", *(text for _, text in texts(300, seed=2))]
    ids: dict[str, list[list[int] | None]] = {}
    for pre, rules in PRE_TOKENIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_vocabulary(file := Path(folder, "vocab.gguf"), keys, pre)
            llama = Llama(library, file)
        forms = (unicodedata.normalize("NFC", text) if rules.nfc else text for text in chosen)
        found = [None if approximated(pre, text) else llama.encode(text, True) for text in forms]
        first = next(name for name, other in PRE_TOKENIZERS.items() if other == rules)
        assert ids.setdefault(first, found) == found, f"llama.cpp takes {first} and {pre} for different rules"
    lines = (f"{json.dumps(key)}: {_row(value)}" for key, value in keys.items())
    lists = {"texts": map(_row, chosen), **{pre: map(_row, rows) for pre, rows in ids.items()}}
    tables = (f"{json.dumps(name)}: [\n" + ",\n".join(rows) + "\n]" for name, rows in lists.items())
    GOLDEN.write_text("{\n" + ",\n".join([*lines, *tables]) + "\n}\n", encoding="ascii")
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {len(chosen)} texts, {len(ids)} rules")


def _row(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def main(argv: Sequence[str]) -> None:
    library = Path(argv[0])
    if len(argv) == 1:
        golden(library)
    else:
        compare(Llama(library, Path(argv[1])), metadata_of(Path(argv[1])), int(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
