"""Describe how text is cut into words before BPE: the names of ``tokenizer.ggml.pre`` and what each stands for.

A GGUF file carries vocabulary and merges, but of these rules a name alone. Each entry is what the tokenizer.json of
the models that the name is written for says; llama.cpp's rules of that name give the same ids but where it
approximates them: it knows no normalizer, and in ``gpt-4o`` no upper and lower case outside ASCII.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The part of a tokenizer that a GGUF file names and does not hold.

    Attributes:
        splits: steps of tokenizer.json's ``pre_tokenizer`` in front of the last one, which maps bytes to characters.
        words: the last step also cuts words as GPT-2's does.
        nfc: text is brought into the normal form C first.
        ignore_merges: a word that is a token as a whole becomes that token, whatever the merges would make of it.
        add_bos: BOS goes before a text where the file does not say.
    """

    splits: tuple[dict[str, Any], ...] = ()
    words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """Return the ``pre_tokenizer`` of a tokenizer.json."""
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.words}
        return {"type": "Sequence", "pretokenizers": [*self.splits, last]}


def _split(pattern: str) -> dict[str, Any]:
    """Return a step that makes every match a word of its own, and what lies between two matches as well."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str) -> dict[str, Any]:
    """Return words of these letters after at most one other character, numbers, signs with their line feeds, spaces.

    Args:
        letters: categories inside a class. digits: the expression of one number.
    """
    first, signs = r"[^\r\n\p{L}\p{N}]", rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return _split(rf"{_CONTRACTIONS}|{first}?[{letters}]+|{digits}|{signs}|{_SPACES}")


def _cased_words() -> dict[str, Any]:
    """Split as ``_words``; a word ends where upper case follows lower case, and takes its contraction along."""
    first, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    either = (rf"{first}{upper}*{lower}+{_CONTRACTIONS}?", rf"{first}{upper}+{lower}*{_CONTRACTIONS}?")
    return _split("|".join((*either, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)))


_LLAMA_3 = PreTokenizer((_words(r"\p{L}", r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
# What llama.cpp takes for a file whose converter did not know the model: words of GPT-2 between runs of signs, and
# long numbers in groups of three. No other step may come after the one that maps bytes to characters.
_GPT_2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(tuple(map(_split, _DEFAULT))),
    "gpt-2": PreTokenizer(words=True),
    "smollm": PreTokenizer(({"type": "Digits", "individual_digits": True},), words=True),
    "qwen2": PreTokenizer((_words(r"\p{L}", r"\p{N}"),), nfc=True),
    "qwen35": PreTokenizer((_words(r"\p{L}\p{M}", r"\p{N}"),), nfc=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    # Whole words first is what OpenAI's own library does; llama.cpp leaves it to the merges.
    "gpt-4o": PreTokenizer((_cased_words(),), ignore_merges=True),
}
