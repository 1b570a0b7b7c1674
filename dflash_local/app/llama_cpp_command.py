"""The command that serves a pair with llama.cpp on this machine: its GGUF file, and what it drafts with.

A drafter that is a GGUF file is llama.cpp's ``draft-dflash``. Drafters in safetensors are none that it reads: it then
drafts by looking up what the text has said before (``ngram-simple``), which any target takes.
"""

from __future__ import annotations

from pathlib import Path

from dflash_local.app.models import ModelStore
from dflash_local.app.resolve import Choice
from dflash_local.catalog.row import Repo
from dflash_local.errors import UsageError

CONTEXT = 8192  # tokens, where the model takes as many
LOOKUP = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")


def llama_cpp_words(choice: Choice, store: ModelStore | None, drafts: bool) -> tuple[tuple[str, ...], str]:
    """Return the program and its arguments, and what is to be said of them; empty where nothing is.

    Raises:
        UsageError: the target is no GGUF file on this machine.
    """
    target = _gguf(choice.target, store)
    if target is None:
        raise UsageError(
            f"llama.cpp reads GGUF files, and none of {choice.name} is on this machine",
            "dflash show names those of a pair (NAME:Q4_K_M); dflash pull brings one",
        )
    context = min(CONTEXT, (choice.row.context if choice.row is not None else None) or CONTEXT)
    words = ["llama-server", "--model", str(target), "--ctx-size", str(context), "--parallel", "1"]
    if not drafts:
        return tuple(words), ""
    drafter = _gguf(choice.drafter, store)
    if drafter is None:
        return (*words, *LOOKUP), f"llama.cpp reads GGUF drafters: {choice.name} is drafted by lookup in the text"
    return (*words, "--spec-type", "draft-dflash", "--spec-draft-model", str(drafter)), ""


def _gguf(part: Repo | Path | None, store: ModelStore | None) -> Path | None:
    """The file of a part that is here and in llama.cpp's format."""
    if isinstance(part, Repo) and part.file is not None and store is not None:
        found = store.find(part)
        part = None if found is None or found.missing else found.folder / part.file
    return part.resolve() if isinstance(part, Path) and part.suffix == ".gguf" and part.is_file() else None
