"""What counts the tokens of somebody's own texts: the tokenizer of a pair that is here, or an estimate. Says which."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dflash_local.app.models import registry
from dflash_local.app.resolve import resolve
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import DFlashError
from dflash_local.settings import Settings

Encode = Callable[[str], list[int]]
ESTIMATE = (
    "estimated, a word of seven letters, a digit or a run of signs or of spaces each: no pair with a tokenizer is here"
)
CHUNK = 2**18  # characters that are encoded at once
# Of the bundled toys' 1,023 tokens a text takes twice as many as of a real vocabulary, so that these do not count it.
_WORDS = re.compile(r" ?[^\W\d_]{1,7}|\d|\s+| ?[^\w\s]+|_")


@contextmanager
def work_tokens(model: str | None, user: Settings) -> Iterator[tuple[Encode, str]]:
    """Within, texts can be encoded; the words say by what.

    Args:
        model: whose tokenizer is taken if it is here; None: that of the first pair of the registry that is.
    """
    rows = [row.name for row in registry(user).rows if not row.bundled]
    for name in [model] if model is not None else rows:
        tokenizer = _tokenizer(name, user)
        if tokenizer is not None:
            try:
                yield _in_chunks(tokenizer.encode), f"those of {name}"
            finally:
                tokenizer.close()
            return
    yield _in_chunks(lambda text: [hash(word) for word in _WORDS.findall(text)]), ESTIMATE


def _tokenizer(name: str, user: Settings) -> Tokenizer | None:
    """Load the tokenizer of a target that is on this machine; None where it is not, or is damaged."""
    with suppress(DFlashError):
        return Tokenizer.load(open_source(resolve(name, None, user, lambda _event: None, draft=False).target))
    return None


def _in_chunks(encode: Encode) -> Encode:
    def encoded(text: str) -> list[int]:
        return [token for at in range(0, len(text), CHUNK) for token in encode(text[at : at + CHUNK])]

    return encoded
