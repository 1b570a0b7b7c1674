"""Our tokens of a GGUF file against llama.cpp's own: ``python -m tools.gguf_tokens [FILE COUNT]``.

With a file and a number: so many seeded texts of each form (plain, and as a rendered template) through both; prints
how many are equal and the first that are not. Without: writes ``tests/golden/gguf_tokens.json``, what llama.cpp makes
of a small vocabulary under every name of the table of pre-tokenizers. Takes llama-cpp-python, last 0.3.36.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.gguf_pretokenizers import PRE_TOKENIZERS
from dflash_local.checkpoint_files.source import open_source

GOLDEN = Path(__file__).resolve().parents[1] / "tests/golden/gguf_tokens.json"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
CONTROLS = ("<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>")
UNREACHABLE = "qvxz"  # a token of the golden vocabulary that no merges make
SHOWN = 10  # differences

# What the texts are made of, by kind.
PIECES: dict[str, list[str]] = json.loads(Path(__file__).with_name("gguf_pieces.json").read_text(encoding="utf-8"))


def encoder(file: Path) -> Callable[[str, bool], list[int]]:
    """What llama.cpp makes of a text by this file's tokenizer; True: control tokens spelled in it are those tokens."""
    library = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    return lambda text, special: library.tokenize(text.encode(), False, special)


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
    while True:
        character = chr(rng.randrange(rng.choice((0x250, 0x3100, 0x20000))))
        if unicodedata.category(character) not in ("Cn", "Cs", "Co"):
            return character


def approximated(pre: str, text: str) -> bool:
    """True where llama.cpp's rules of this name are known to differ from the model's own."""
    if pre != "gpt-4o":
        return False
    # Its expression takes every letter outside ASCII for both upper and lower case, marks for no letters, and a word
    # that is a token goes through the merges all the same.
    odd = (c for c in text if ord(c) > 127 and unicodedata.category(c) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me"))
    return any(odd) or UNREACHABLE in text


def compare(file: Path, count: int) -> None:
    """Print how many of ``count`` texts give equal ids in both forms, and the first that do not."""
    theirs, tokenizer = encoder(file), Tokenizer.load(open_source(file))
    assert tokenizer is not None, "the file has no tokenizer"
    pre = gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents()
    nfc = PRE_TOKENIZERS[pre].nfc
    user_defined = [token.text for token in tokenizer.added.values() if not token.special]
    equal, apart, known = 0, list[str](), 0
    for kind, text in texts(count, seed=34):
        # llama.cpp knows no normal forms; a token that is not special it reads from plain text as well.
        given = unicodedata.normalize("NFC", text) if nfc else text
        forms = [(True, tokenizer.encode(tokenizer.with_controls(text)))]
        if not any(token in text for token in user_defined):
            forms.append((False, tokenizer.encode(text)))
        if all(ids == theirs(given, special) for special, ids in forms):
            equal += 1
        elif approximated(pre, text):
            known += 1
        else:
            apart.append(f"  {kind}: {text!r}\n    ours  {forms[0][1]}\n    llama {theirs(given, True)}")
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


def golden() -> None:
    """Write what llama.cpp makes of the golden texts: for each rule the ids of a text, or null where it errs."""
    keys = vocabulary(1500)
    chosen = [f"a {UNREACHABLE} b", *(text for _, text in texts(300, seed=2))]
    ids: dict[str, list[list[int] | None]] = {}
    for pre, rules in PRE_TOKENIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_vocabulary(file := Path(folder, "vocab.gguf"), keys, pre)
            theirs = encoder(file)
        forms = (unicodedata.normalize("NFC", text) if rules.nfc else text for text in chosen)
        found = [None if approximated(pre, text) else theirs(text, True) for text in forms]
        first = next(name for name, other in PRE_TOKENIZERS.items() if other == rules)
        assert ids.setdefault(first, found) == found, f"llama.cpp takes {first} and {pre} for different rules"
    lines = (f"{json.dumps(key)}: {_row(value)}" for key, value in keys.items())
    lists = {"texts": map(_row, chosen), **{pre: map(_row, rows) for pre, rows in ids.items()}}
    tables = (f"{json.dumps(name)}: [\n" + ",\n".join(rows) + "\n]" for name, rows in lists.items())
    GOLDEN.write_text("{\n" + ",\n".join([*lines, *tables]) + "\n}\n", encoding="ascii")
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {len(chosen)} texts, {len(ids)} rules")


def _row(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    if sys.argv[1:]:
        compare(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        golden()
