"""The bytes of a reply's tokens beside their log probabilities: joined they are its text, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from dflash_local.chat.detokenizer import byte_characters
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.engine.session import Session
from dflash_local.events import Step
from dflash_local.request import SamplingParams
from tests.chat.conftest import write_folder
from tests.engine_sessions import ask, random_prompt
from tests.families import VOCAB

STOP = VOCAB - 1
PARTS = b"\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xa9\xff"  # of a euro sign, a face and an é, and what belongs to no character
WORDS = ("a", "é", "\ufffd", "\\", "€")


def byte_level() -> tokenizers.Tokenizer:
    """All bytes of ``PARTS`` alone, whole characters, and a space before a word."""
    character = {byte: text for text, byte in byte_characters().items()}
    texts = [bytes((byte,)) for byte in PARTS] + [f"{space}{word}".encode() for word in WORDS for space in ("", " ")]
    texts += [f"w{n} ".encode() for n in range(VOCAB - 1 - len(texts))]
    vocab = {"".join(character[byte] for byte in text): at for at, text in enumerate(texts)}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.decoder = decoders.ByteLevel()
    return built


def byte_fallback() -> tokenizers.Tokenizer:
    """The same in the manner of sentencepiece, which drops a space at the beginning of a text."""
    texts = [f"<0x{byte:02X}>" for byte in PARTS] + [f"{space}{word}" for word in WORDS for space in ("", "▁")]
    texts += [f"▁w{n}" for n in range(VOCAB - 1 - len(texts))]
    vocab = {text: at for at, text in enumerate(texts)}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(parts)
    return built


def words() -> tokenizers.Tokenizer:
    """No decoder at all: words with a space between them."""
    return tokenizers.Tokenizer(models.WordLevel({f"w{n}é": n for n in range(VOCAB - 1)}, unk_token="w0é"))


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, words])
def test_the_bytes_of_all_tokens_are_the_text(
    new_session: Callable[..., Session], tmp_path: Path, kind: Callable[[], tokenizers.Tokenizer]
) -> None:
    library = kind()
    library.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    session = new_session("qwen3", None, stop_ids=frozenset((STOP,)))
    source = open_source(write_folder(tmp_path, library, {"eos_token": "<|end|>"}))
    session.tokenizer = tokenizer = Tokenizer.load(source)
    assert tokenizer is not None and tokenizer.token_id("<|end|>") == STOP
    sampling = SamplingParams(temperature=5.0, seed=0)
    prompt = random_prompt(9)
    reply = ask(session, prompt, 150, mode="ar", logprobs=20, sampling=sampling)
    tokens = [token for step in reply.find(Step) for token in step.logprobs]
    assert [token.token_id for token in tokens] == reply.ids
    text = "".join(piece.text for step in reply.find(Step) for piece in step.pieces)
    joined = b"".join(bytes(token.bytes or ()) for token in tokens)
    assert joined.decode("utf-8", "replace") == text and len(text) > 20
    whole = tokenizer.decode([*prompt, *reply.ids])
    assert whole == tokenizer.decode(prompt) + text, "what is said behind a text keeps the space that parts them"
    assert [token.token_id for token in tokens if token.bytes is None] == [i for i in reply.ids if i == STOP]
    parts = {token.text for token in tokens if token.bytes is not None and token.text.startswith("\\x")}
    assert bool(parts) == (kind is not words), "a part of a character is spelled"
    others: Any = [(token, row) for token in tokens for row in token.top if row[0] == token.token_id]
    assert others and all((token.text, token.logprob, token.bytes) == row[1:] for token, row in others)
