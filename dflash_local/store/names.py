"""Names from a server or a disk, checked under POSIX and Windows rules before any path is built of them."""

from __future__ import annotations

import re

from dflash_local.errors import DownloadError

MAX_PART_BYTES = 255  # the limit of the common file systems
MAX_NAME_BYTES = 1024
MAX_REPO_PART = 96
MAX_SHOWN = 120
REPO_PREFIX = "models--"
REMOVING = ".removing-"
MAX_PARTS = 500  # of one GGUF model
_FIRST_PART = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"|?*\\]')
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(?:\..*)?", re.IGNORECASE)


def is_commit(text: str | None) -> bool:
    """Return True for a full commit hash: 40 lower-case hexadecimal digits."""
    return text is not None and _COMMIT.fullmatch(text) is not None


def why_unsafe(name: str) -> str:
    """Say why a name must not become a path, by the rules of all systems (caches are moved); else empty."""
    if not name:
        return "it is empty"
    if "\\" in name:
        return "it holds a backslash"
    try:
        too_long = len(name.encode("utf-8")) > MAX_NAME_BYTES
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if too_long:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    return next((why for why in map(_why_unsafe_part, name.split("/")) if why), "")


def _why_unsafe_part(part: str) -> str:
    if part in ("", ".", ".."):
        return "it is absolute or leads out of its folder"
    found = _FORBIDDEN.search(part)
    if found:
        return f"it holds the character {found.group()!r}"
    if part[-1] in ". ":
        return "a part of it ends in a dot or a space"
    if _DEVICE.fullmatch(part):
        return "it names a device of Windows"
    if len(part.encode("utf-8")) > MAX_PART_BYTES:
        return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    return ""


def file_parts(repo: str, name: str) -> tuple[str, ...]:
    """Return the parts of a file's path below its repo. DownloadError for a name that is unsafe, see ``why_unsafe``."""
    why = why_unsafe(name)
    if why:
        raise DownloadError(f"{repo} names a file {shortened(name)}, which is refused: {why}", "report it to its owner")
    return tuple(name.split("/"))


def parts_of(file: str) -> tuple[str, ...]:
    """List a GGUF file with its other parts, where it is the first of several that one was split into."""
    found = _FIRST_PART.fullmatch(file)
    if found is None or not 1 < int(found["count"]) <= MAX_PARTS:
        return (file,)
    numbers = range(1, int(found["count"]) + 1)
    return tuple(f"{found['stem']}-{number:05}-of-{found['count']}.gguf" for number in numbers)


def folder_name(repo: str) -> str:
    """Name a repo's folder in a Hugging Face cache: ``models--owner--name``. DownloadError for what is no id."""
    parts = repo.split("/")
    usable = all(_REPO_PART.fullmatch(part) and len(part) <= MAX_REPO_PART for part in parts)
    if len(parts) > 2 or not usable or "--" in repo or ".." in repo or REMOVING in repo:
        raise DownloadError(f"{shortened(repo)} is not the id of a repo", "give it as owner/name")
    return REPO_PREFIX + "--".join(parts)


def repo_of(folder: str) -> str | None:
    """Return the repo a cache folder's name belongs to; None when it is not one of a model."""
    repo = folder[len(REPO_PREFIX) :].replace("--", "/")
    try:
        return repo if folder == folder_name(repo) else None
    except DownloadError:
        return None


def shortened(text: str) -> str:
    """Return a quoted name for a message: printable and of bounded length."""
    quoted = ascii(text)
    return quoted if len(quoted) <= MAX_SHOWN else f"{quoted[: MAX_SHOWN - 4]}...'"
