"""Which files of a repository we want: configs, tokenizer and safetensors at its root. Every name is judged first."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from dflash_local.checkpoint_files.safetensors_folder import CONFIG, INDEX, MODELOPT_CONFIG, SINGLE
from dflash_local.errors import DownloadError
from dflash_local.store.hub import Listing, RemoteFile
from dflash_local.store.names import file_parts, parts_of, shortened
from dflash_local.tables import listing as enumerated

SMALL = (
    CONFIG,
    MODELOPT_CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
)
# Beside an index: a whole copy in another layout, and what is put on top of weights. The rest may be a shard, whatever
# it is called (mtp.safetensors of official fp8 mixtures): the index tells once it is here.
NO_SHARDS = ("consolidated*", "adapter*")
# What no honest repository holds: a way out of the folder, a drive, a control character.
_HOSTILE = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)|^[/\\]|^[A-Za-z]:|[\x00-\x1f\x7f]")

GGUF = ".gguf"
NEAREST = "IQ4_XS or Q4_K_S"
# Types that are not read, as names of files have them: Q2_K, Q3_K_M, IQ2_XXS, IQ3_S, IQ1_M, TQ1_0, NVFP4.
_TYPES = r"Q[23]_K(?:_[A-Z]+)?|IQ[123]_[A-Z]+|TQ[12]_0|NVFP4"
_UNREAD = re.compile(rf"(?<![A-Za-z0-9])({_TYPES})(?![A-Za-z0-9])", re.IGNORECASE)


def wanted(listing: Listing, gguf: str | None = None) -> tuple[RemoteFile, ...]:
    """Choose the files to fetch, small ones first.

    Args:
        gguf: the one file that is meant, with the other parts that it was split into.

    Raises:
        DownloadError: an unsafe name, no config or safetensors, no such file, or one of a type that is not read.
    """
    refuse_hostile_names(listing)
    if gguf is not None:
        return _gguf(listing, gguf)
    files = {file.path: file for file in listing.files if "/" not in file.path and "\\" not in file.path}
    chosen = [*(files[name] for name in SMALL if name in files), *_weights(listing, files)]
    if CONFIG not in files:
        raise DownloadError(f"{listing.repo} has no {CONFIG}: it is not a model to be run here", "check the name")
    seen: dict[str, str] = {}
    for file in chosen:
        file_parts(listing.repo, file.path)
        other = seen.setdefault(file.path.casefold(), file.path)
        if other != file.path:
            both = f"{listing.repo} has both {other} and {file.path}"
            raise DownloadError(both, "some systems take them for one file")
    return tuple(chosen)


def _gguf(listing: Listing, name: str) -> tuple[RemoteFile, ...]:
    files = {file.path: file for file in listing.files}
    lacking = next((part for part in parts_of(name) if part not in files), None)
    if lacking is not None:
        there = [path for path in files if path.endswith(GGUF)]
        hint = f"it has {enumerated(there)}" if there else "it has no GGUF file"
        raise DownloadError(f"{listing.repo} has no {shortened(lacking)}", hint)
    return tuple(files[part] for part in parts_of(name))


def refuse_unread(name: str) -> None:
    """Raise DownloadError for a GGUF file whose name tells a type that is not read; names the nearest that is."""
    found = _UNREAD.search(name)
    if found is not None:
        text = f"{name} is in {found[1].upper()}, which is not read here"
        raise DownloadError(text, f"the nearest form that is: {NEAREST}")


def refuse_hostile_names(listing: Listing) -> None:
    """Raise DownloadError for a repository with a name that no honest one holds, also of a file nobody wants."""
    for file in listing.files:
        if _HOSTILE.search(file.path):
            file_parts(listing.repo, file.path)  # says why
            raise DownloadError(f"{listing.repo} names a file {shortened(file.path)}, which is refused")


def is_weight(file: RemoteFile) -> bool:
    """Return True for what is fetched last, after everything else of every repository has been looked at."""
    return file.path.endswith((".safetensors", GGUF))


def _weights(listing: Listing, files: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Choose one file, or the shards with their index: as the loader reads them."""
    if SINGLE in files:
        return [files[SINGLE]]
    if INDEX in files:
        shards = [name for name in sorted(files) if name.endswith(".safetensors")]
        return [files[INDEX], *(files[name] for name in shards if not any(fnmatchcase(name, no) for no in NO_SHARDS))]
    hint = "of whole repositories only safetensors are read: no .bin, .pt or .gguf; a GGUF file on this disk is a MODEL"
    raise DownloadError(f"{listing.repo} has neither {SINGLE} nor {INDEX}", hint)
