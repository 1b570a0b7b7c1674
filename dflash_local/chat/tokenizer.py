"""A checkpoint's tokenizer, on the ``tokenizers`` library: text to ids and back.

Plain text can never become a control token: inside this process those tokens carry random private
names, and only ``encode_rendering`` knows which of a rendering's tags are the template's own.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dflash_local.chat.detokenizer import StreamDecoder, TokenBytes
from dflash_local.chat.stop_ids import config_stop_ids, tokenizer_stop_ids
from dflash_local.chat.tokenizer_files import AddedToken, TokenizerFiles, read_files, read_json, token_text
from dflash_local.errors import CheckpointError


class Tokenizer:
    """Text <-> ids of one checkpoint.

    Attributes:
        vocab_size: highest id + 1 (added tokens included).
        template: the chat template's source, None for a base model.
        stop_ids: ids that end a reply.
        bos_text, eos_text: as the template sees them; empty when the tokenizer names none.
        begin: ids that go before a prompt without template (BOS, where the tokenizer adds one).
        added: the added tokens by id.
        control_texts, control_pattern: texts of the control tokens, longest first, and their matcher.
    """

    def __init__(self, files: TokenizerFiles, stop_ids: frozenset[int]) -> None:
        nonce = secrets.token_hex(12)
        controls = [token for token in files.added if token.control]
        self._private = {token.text: f"{nonce}x{token.id:08x}" for token in controls}
        self.added: dict[int, AddedToken] = {token.id: token for token in files.added}
        self._added_texts = frozenset(token.text for token in files.added)
        self.template = files.template
        self.stop_ids = stop_ids
        self.bos_text = token_text(files.config.get("bos_token")) or ""
        self.eos_text = token_text(files.config.get("eos_token")) or ""
        self.vocab_size = _highest_id(files) + 1
        self._rules = TokenBytes(files.spec.get("decoder"))
        self._library = _build(files, self._private)
        self._bytes: dict[int, bytes] = {}
        self._check_ids()
        self.begin = self._begin(files.config.get("add_bos_token"))
        # Longest first makes the alternation leftmost-longest, as the library's own matching is.
        self.control_texts = sorted(self._private, key=lambda text: (-len(text), text))
        self.control_pattern = re.compile("|".join(map(re.escape, self.control_texts))) if controls else None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer in ``folder``; None without ``tokenizer.json``, CheckpointError when it is damaged."""
        files = read_files(folder)
        if files is None:
            return None
        tokens = {token.text: token.id for token in files.added}
        vocabulary = files.spec["model"].get("vocab")
        if isinstance(vocabulary, dict):
            tokens = {**vocabulary, **tokens}
        tokenizer = cls(files, config_stop_ids(folder) | tokenizer_stop_ids(folder, tokens))
        config = read_json(folder / "config.json")
        text_config = config.get("text_config")
        _check_vocabulary(files, config if not isinstance(text_config, dict) else text_config)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Control tokens spelled in it stay text; a lone surrogate counts as U+FFFD."""
        return list(self._library.encode(clean(text), add_special_tokens=False).ids)

    def encode_rendering(self, text: str, reveal: Callable[[str], str] = str) -> list[int]:
        """Ids of a rendered template, where control texts are control tokens.

        ``reveal`` then puts hidden texts back, which are plain text whatever they spell (see
        ``template.Concealer``). Spaces around tags behave as the tokenizer says: the library does the split.
        """
        if self.control_pattern is not None:
            text = self.control_pattern.sub(lambda match: self._private[match[0]], text)
        return self.encode(reveal(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids, exactly as written by the model: no clean-up of spaces. Unknown ids are empty."""
        decoder = self.decoder(skip_special)
        return "".join(map(decoder.push, ids)) + decoder.finish()

    def decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A fresh incremental decoder; its text equals ``decode`` of all the ids it was given."""
        return StreamDecoder(self.visible_bytes if skip_special else self.token_bytes, self._rules)

    def token_bytes(self, token_id: int) -> bytes | None:
        """UTF-8 bytes a token stands for (possibly part of a character); None for an unknown id."""
        if token_id not in self._bytes:
            added = self.added.get(token_id)
            text = added.text if added else self._library.id_to_token(token_id) if token_id >= 0 else None
            if text is None:
                return None
            spelled = added is not None and (added.special or self._rules.byte_level)
            self._bytes[token_id] = text.encode("utf-8", "replace") if spelled else self._rules(text)
        return self._bytes[token_id]

    def visible_bytes(self, token_id: int) -> bytes | None:
        """As ``token_bytes``, but None for special tokens and stop ids, which are never shown."""
        return None if self.is_hidden(token_id) else self.token_bytes(token_id)

    def is_hidden(self, token_id: int) -> bool:
        """True for special tokens and stop ids."""
        added = self.added.get(token_id)
        return token_id in self.stop_ids or (added is not None and added.special)

    def is_added(self, text: str) -> bool:
        """True when ``text`` is an added token."""
        return text in self._added_texts

    def token_id(self, text: str) -> int | None:
        """The id of a token given by its exact vocabulary text."""
        token_id = self._library.token_to_id(self._private.get(text, text))
        return None if token_id is None else int(token_id)

    def check_probes(self, probes: Mapping[str, Sequence[int]]) -> None:
        """Compare encodings with recorded ones (RELIABILITY CK-22): CheckpointError on the first difference."""
        for text, expected in probes.items():
            ids = self.encode(text)
            if ids != list(expected):
                raise CheckpointError(
                    f"the tokenizer encodes {text!r} as {ids}, the recorded ids are {list(expected)}",
                    "tokenizer.json belongs to another model; fetch it again",
                )

    def _check_ids(self) -> None:
        for token in self.added.values():
            found = self.token_id(token.text)
            if found != token.id:
                raise CheckpointError(
                    f"added token {token.text!r} has the id {token.id}, but the vocabulary gives it {found}",
                    "tokenizer.json and its added tokens belong to different models; fetch them again",
                )

    def _begin(self, add_bos: object) -> tuple[int, ...]:
        bos = self.token_id(self.bos_text) if self.bos_text else None
        if isinstance(add_bos, bool):
            return (bos,) if add_bos and bos is not None else ()
        first = self._library.encode("", add_special_tokens=True).ids[:1]
        return tuple(first) if bos is not None and first == [bos] else ()


def clean(text: str) -> str:
    """``text`` as valid Unicode: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _build(files: TokenizerFiles, private: dict[str, str]) -> Any:
    """The library's tokenizer with every control token renamed to its private name."""
    spec = files.spec
    model = dict(spec["model"])
    entries = [{**entry, "content": private.get(entry["content"], entry["content"])} for entry in spec["added_tokens"]]
    model["vocab"], renamed = _renamed(model.get("vocab"), private)
    if renamed and isinstance(model.get("merges"), list):
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, renamed)]
    if model.get("unk_token") in renamed:
        model["unk_token"] = private[model["unk_token"]]
    data = json.dumps({**spec, "model": model, "added_tokens": entries}).encode()
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except ValueError as error:
        raise CheckpointError(f"tokenizer.json is damaged: {error}", "fetch it again") from error


def _renamed(vocabulary: Any, private: dict[str, str]) -> tuple[Any, set[str]]:
    """The model's vocabulary (a map, or the list of a Unigram model) without the controls' own texts."""
    if isinstance(vocabulary, dict):
        present = private.keys() & vocabulary.keys()
        return {private.get(text, text): token_id for text, token_id in vocabulary.items()}, set(present)
    if isinstance(vocabulary, list) and all(isinstance(row, list) and len(row) == 2 for row in vocabulary):
        present = private.keys() & {row[0] for row in vocabulary}
        return [[private.get(row[0], row[0]), row[1]] for row in vocabulary], set(present)
    return vocabulary, set()


def _touches(pair: object, texts: set[str]) -> bool:
    """True for a BPE merge that needs or makes one of ``texts``: plain text could reach a control token."""
    parts = pair.split(" ") if isinstance(pair, str) else pair
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return False
    return "".join(parts) in texts or not texts.isdisjoint(parts)


def _vocabulary_ids(files: TokenizerFiles) -> int:
    vocabulary = files.spec["model"].get("vocab")
    if isinstance(vocabulary, dict):
        return max((token_id for token_id in vocabulary.values() if isinstance(token_id, int)), default=-1)
    return len(vocabulary) - 1 if isinstance(vocabulary, list) else -1


def _highest_id(files: TokenizerFiles) -> int:
    return max([_vocabulary_ids(files), *(token.id for token in files.added)])


def _check_vocabulary(files: TokenizerFiles, config: dict[str, Any]) -> None:
    """Refuse a tokenizer whose learned vocabulary does not fit the model's embedding."""
    size = config.get("vocab_size")
    highest = _vocabulary_ids(files)
    if isinstance(size, int) and not isinstance(size, bool) and highest >= size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {highest}, config.json says vocab_size {size}",
            "tokenizer.json belongs to another model; fetch it again",
        )
