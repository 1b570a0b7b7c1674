"""A checkpoint's tokenizer: text to ids in a child process, on the ``tokenizers`` library, and ids to text here.

Plain text can never become a control token: in the child those tokens carry random private names, and only
``with_controls`` knows which of a rendering's tags are the template's own.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_local.chat.detokenizer import StreamDecoder, TokenBytes
from dflash_local.chat.stop_ids import config_stop_ids, tokenizer_stop_ids
from dflash_local.chat.tokenizer_files import AddedToken, TokenizerFiles, merged, token_text
from dflash_local.checkpoint_files.source import Source
from dflash_local.errors import CheckpointError, ContextError, TokenizerError
from dflash_local.worker.process import ChildLimits, WorkerError, WorkerProcess

HUGE_BYTES = 2**20  # after a text like this the child starts anew: the library gives little memory back
_MIB = 2**20
# Of a text with more characters than this for each id that is wanted the beginning is looked at first, so that a
# hopeless one takes as long as the context is large. Cut there, its last word may come to a few ids more.
CHARS_PER_ID, BORDER_IDS = 16, 64
# Threads of the library would take address space and gain nothing: it gets one text at a time.
_ENVIRON = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


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
        self.vocab_size = max([_highest_id(files), *(token.id for token in files.added)]) + 1
        self.begin: tuple[int, ...] = ()
        self._add_bos = files.config.get("add_bos_token")
        self._rules = TokenBytes(files.spec.get("decoder"))
        self._ids = _vocabulary(files.spec["model"].get("vocab"))
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        self._ids.update({token.text: token.id for token in files.added})
        self._bytes: dict[int, bytes] = {}
        # Longest first makes the alternation leftmost-longest, as the library's own matching is.
        self.control_texts = sorted(self._private, key=lambda text: (-len(text), text))
        self.control_pattern = re.compile("|".join(map(re.escape, self.control_texts))) if controls else None
        self._worker = self._child(json.dumps(renamed_spec(files.spec, self._private)).encode())
        self._worker.begin()

    @classmethod
    def load(cls, source: Source, wait: bool = True) -> Tokenizer | None:
        """Return the tokenizer of a checkpoint; None where it has none.

        Args:
            wait: False leaves the rest to the child process and ``check``, which must then be called.

        Raises:
            CheckpointError: a file is damaged, or made to hang or to take all memory.
        """
        parts = source.tokenizer()
        if parts is None:
            return None
        files = merged(parts)
        tokens = {token.text: token.id for token in files.added}
        vocabulary = files.spec["model"].get("vocab")
        if isinstance(vocabulary, dict):
            tokens = {**vocabulary, **tokens}
        tokenizer = cls(files, config_stop_ids(source) | tokenizer_stop_ids(parts, tokens))
        config = source.config() or {}
        text_config = config.get("text_config")
        _check_vocabulary(files, config if not isinstance(text_config, dict) else text_config)
        if wait:
            tokenizer.check()
        return tokenizer

    def check(self) -> None:
        """Wait until the child has read tokenizer.json, and compare its ids with those of the other files.

        Raises:
            CheckpointError: it is damaged, is made to hang or to take all memory, or does not fit the other files.
        """
        try:
            greeting = json.loads(self._worker.greeting())
        except WorkerError as error:
            what = "takes too long to read" if error.late else "breaks the process that reads it, or takes all memory"
            raise TokenizerError(f"tokenizer.json {what}", "use a checkpoint you trust") from error
        if "error" in greeting:
            raise CheckpointError(f"tokenizer.json is damaged: {greeting['error'][:500]}", "fetch it again")
        for token, found in zip(self.added.values(), greeting["ids"], strict=True):
            if found != token.id:
                raise CheckpointError(
                    f"added token {token.text!r} has the id {token.id}, but the vocabulary gives it {found}",
                    "tokenizer.json and its added tokens belong to different models; fetch them again",
                )
        self.begin = self._begin(greeting["around"])

    @cached_property
    def vocabulary(self) -> str:
        """Name the meaning of its ids: equal for tokenizers that have the same texts at the same ids, but for added
        tokens.
        """
        texts = json.dumps(sorted(self._texts.items())).encode()
        return hashlib.sha256(texts).hexdigest()[:16]

    def close(self) -> None:
        """End the child process; the next text starts another one."""
        self._worker.close()

    def encode(self, text: str, limit: int | None = None, cancelled: Callable[[], bool] = lambda: False) -> list[int]:
        """Return the ids of plain text. Control tokens spelled in it stay text; a lone surrogate counts as U+FFFD.

        Args:
            limit: no more ids than this are wanted.
            cancelled: polled while the child works; True ends it.

        Raises:
            ContextError: there are more ids than ``limit``.
            TokenizerError: tokenizer.json cannot read this text in the time and memory that its length allows.
            Interrupted: cancelled.
        """
        text = clean(text)
        if limit is not None and len(text) > CHARS_PER_ID * limit:
            least = len(self.encode(text[: CHARS_PER_ID * limit], None, cancelled)) - BORDER_IDS
            if least > limit:
                raise _too_long(f"at least {least}", limit)
        request = b'{"do": "encode", "limit": %s}\n' % json.dumps(limit).encode() + text.encode()
        size = len(request)
        limits = ChildLimits(10 + 20 * size / _MIB, self._memory + max(size, HUGE_BYTES) * 512 // _MIB)
        try:
            head, _, data = self._worker.request(request, limits, cancelled).partition(b"\n")
        except WorkerError as error:
            seconds, memory = f"{limits.seconds:.0f} s", f"{limits.mebibytes} MiB"
            needs = f"takes over {seconds}" if error.late else f"takes over {memory} of memory or breaks its process"
            raise TokenizerError(
                f"tokenizer.json {needs} on a text of {len(text)} characters",
                "the tokenizer is faulty or hostile; use a checkpoint you trust",
            ) from error
        if size > HUGE_BYTES:
            self._worker.close()
            self._worker.begin()
        count = json.loads(head)["count"]
        if limit is not None and count > limit:
            raise _too_long(str(count), limit)
        ids = array("I", data)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()

    def with_controls(self, text: str) -> str:
        """Return ``text`` as ``encode`` takes one whose control texts are control tokens.

        Spaces around tags behave as the tokenizer says: the library does the split.
        """
        if self.control_pattern is None:
            return text
        return self.control_pattern.sub(lambda match: self._private[match[0]], text)

    def encode_prompt(
        self, text: str, limit: int | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Return the ids of a prompt that its author wrote whole: with control tokens, and ``begin`` comes first.

        A text that begins with the same tokens itself does not get them twice. Errors are those of ``encode``.
        """
        ids = self.encode(self.with_controls(text), limit, cancelled)
        begin = list(self.begin)
        return ids if ids[: len(begin)] == begin else begin + ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ids, exactly as written by the model: no clean-up of spaces. Unknown ids are empty."""
        decoder = self.decoder(skip_special)
        return "".join(map(decoder.push, ids)) + decoder.finish()

    def decoder(self, skip_special: bool = True, goes_on: bool = False) -> StreamDecoder:
        """Return a fresh incremental decoder; its text equals ``decode`` of all the ids it was given, or what they add
        to a text that ``goes_on``.
        """
        return StreamDecoder(self.visible_bytes if skip_special else self.token_bytes, self._rules, goes_on)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes that a token stands for (possibly part of a character); None for an unknown id."""
        if token_id not in self._bytes:
            added = self.added.get(token_id)
            text = added.text if added else self._texts.get(token_id)
            if text is None:
                return None
            spelled = added is not None and (added.special or self._rules.byte_level)
            self._bytes[token_id] = text.encode("utf-8", "replace") if spelled else self._rules(text)
        return self._bytes[token_id]

    def visible_bytes(self, token_id: int) -> bytes | None:
        """Return what ``token_bytes`` does, but None for special tokens and stop ids, which are never shown."""
        added = self.added.get(token_id)
        hidden = token_id in self.stop_ids or (added is not None and added.special)
        return None if hidden else self.token_bytes(token_id)

    def in_reply(self, token_id: int, first: bool) -> tuple[str, bytes | None]:
        """Return the text of one token alone, and the bytes that it adds to a reply: None for what is never shown.

        Bytes that are no whole character are spelled ``\\xNN`` in the text. ``first``: no token is shown before it.
        """
        data = self.visible_bytes(token_id)
        if data is None:
            return (self.token_bytes(token_id) or b"").decode("utf-8", "backslashreplace"), None
        data = self._rules.placed(data, first)
        return data.decode("utf-8", "backslashreplace"), data

    def is_added(self, text: str) -> bool:
        return text in self._added_texts

    def token_id(self, text: str) -> int | None:
        """Return the id of a token given by its exact vocabulary text."""
        return self._ids.get(text)

    def _begin(self, around: Sequence[int]) -> tuple[int, ...]:
        """Return BOS, where the settings or else the library's post-processor put it before a text."""
        bos = self.token_id(self.bos_text) if self.bos_text else None
        first = self._add_bos if isinstance(self._add_bos, bool) else list(around[:1]) == [bos]
        return (bos,) if first and bos is not None else ()

    def _child(self, data: bytes) -> WorkerProcess:
        """Return the process that reads this tokenizer.json; what it may take grows with the file."""
        self._memory = 512 + 32 * len(data) // _MIB
        tokens = [self._private.get(token.text, token.text) for token in self.added.values()]
        setup = json.dumps({"do": "load", "tokens": tokens}).encode() + b"\n" + data
        limits = ChildLimits(30 + 5 * len(data) / _MIB, self._memory)
        return WorkerProcess(Path(__file__).with_name("tokenizer_worker.py"), ("tokenizers",), setup, limits, _ENVIRON)


def _too_long(count: str, limit: int) -> ContextError:
    return ContextError(
        f"the prompt has {count} tokens, the context holds {limit}", "shorten it or load a larger context"
    )


def clean(text: str) -> str:
    """Return ``text`` as valid Unicode: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _vocabulary(vocabulary: Any) -> dict[str, int]:
    if isinstance(vocabulary, dict):
        return {text: token_id for text, token_id in vocabulary.items() if isinstance(token_id, int)}
    if isinstance(vocabulary, list):
        rows = enumerate(vocabulary)
        return {row[0]: i for i, row in rows if isinstance(row, list) and row and isinstance(row[0], str)}
    return {}


def _highest_id(files: TokenizerFiles) -> int:
    vocabulary = files.spec["model"].get("vocab")
    if isinstance(vocabulary, dict):
        return max((token_id for token_id in vocabulary.values() if isinstance(token_id, int)), default=-1)
    return len(vocabulary) - 1 if isinstance(vocabulary, list) else -1


def _check_vocabulary(files: TokenizerFiles, config: dict[str, Any]) -> None:
    """Refuse a tokenizer whose learned vocabulary does not fit the model's embedding."""
    size = config.get("vocab_size")
    highest = _highest_id(files)
    if isinstance(size, int) and not isinstance(size, bool) and highest >= size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {highest}, config.json says vocab_size {size}",
            "tokenizer.json belongs to another model; fetch it again",
        )


def renamed_spec(spec: dict[str, Any], private: dict[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json whose control tokens have ``private`` names: plain text reaches none of them."""
    model = dict(spec["model"])
    entries = [{**entry, "content": private.get(entry["content"], entry["content"])} for entry in spec["added_tokens"]]
    model["vocab"], renamed = _renamed(model.get("vocab"), private)
    if renamed and isinstance(model.get("merges"), list):
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, renamed)]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in renamed:
        model["unk_token"] = private[unknown]
    return {**spec, "model": model, "added_tokens": entries}


def _renamed(vocabulary: Any, private: dict[str, str]) -> tuple[Any, set[str]]:
    """Return the model's vocabulary (a map, or the list of a Unigram model) without the controls' own texts."""
    if isinstance(vocabulary, dict):
        present = private.keys() & vocabulary.keys()
        return {private.get(text, text): token_id for text, token_id in vocabulary.items()}, set(present)
    if isinstance(vocabulary, list) and all(isinstance(row, list) and len(row) == 2 for row in vocabulary):
        present = private.keys() & {row[0] for row in vocabulary}
        return [[private.get(row[0], row[0]), row[1]] for row in vocabulary], set(present)
    return vocabulary, set()


def _touches(pair: object, texts: set[str]) -> bool:
    """Return True for a BPE merge that needs or makes one of ``texts``: plain text could reach a control token."""
    parts = pair.split(" ") if isinstance(pair, str) else pair
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return False
    return "".join(parts) in texts or not texts.isdisjoint(parts)
