"""Takes out of texts what is private: paths, tokens, addresses, names; rather too much than too little."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_local.settings import Settings

SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE|AUTH", re.I)
SHORTEST_SECRET = 4  # characters of a variable's value that is taken for a secret
SHORT_COMMIT = 12  # characters of a commit or a digest that are kept
PATH, TOKEN, ADDRESS, URL, IDENTIFIER = "<path>", "<token>", "<address>", "<url>", "<id>"
USER, HOST, FOLDER = "<user>", "<host>", "<folder>"
ORDINARY = {"", "localhost", "root", "user"}  # names of users and hosts that tell nothing
_START = r"(?<![\w.<>])"
_REST = r"(?:<[a-z]+>|[^\n'\",;()<>])*"  # of a path's clause; marks of what was found before stand in it
# In this order: what an earlier pattern takes, a later one need not know.
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+"), URL),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), ADDRESS),
    (re.compile(r"(?:\\\\|(?<![A-Za-z0-9])[A-Za-z]:[\\/])(?:<[a-z]+>|[^\n'\"<>|])*"), PATH),
    # To the last slash of the line, as folders may have spaces, and on to the end of the clause.
    (re.compile(_START + r"~?/[^\n'\"]*/" + _REST), PATH),
    (re.compile(_START + r"~?/[\w.~+@-]" + _REST), PATH),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I), IDENTIFIER),
    (re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.I), ADDRESS),
    (re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]\d)"), ADDRESS),
    (re.compile(r"\b(?:hf|sk|pk|rk|gh[a-z]|github_pat|glpat|xox[a-z]|AKIA|AIza|ya29)[-_. ]?[\w-]{8,}"), TOKEN),
    (re.compile(r"\b(?:gsk_|r8_|nvapi-)[\w-]{8,}"), TOKEN),
    (re.compile(r"\b(?:Bearer|Basic)\s+\S+", re.I), TOKEN),
    (
        re.compile(r"\b(?:pass(?:word|wd|phrase)|pwd|secret|token|api[-_ ]?key|credentials?)['\"]?\s*[:=].*", re.I),
        TOKEN,
    ),
    (re.compile(r"\beyJ[\w-]{8,}(?:\.[\w-]*)*"), TOKEN),
)
_LONG = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
_COLONS = re.compile(r"[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
_WORDLIKE = re.compile(r"[A-Za-z]?[a-z]{0,15}|[A-Z]{1,12}|[0-9]{1,8}|[A-Za-z0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class Secrets:
    """What is private by its value: text and its mark, words and theirs (``names``), and long words that may stand."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    public: Collection[str] = ()


def secrets_of(user: Settings, public: Collection[str] = (), folders: Iterable[Path] = ()) -> Secrets:
    """Those of this process: variables that name secrets or folders, the token, user, host, ``folders`` of models."""
    values: dict[str, str] = {}
    for name, value in user.environ.items():
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET and not value.isdigit():
            values[value] = TOKEN
        elif len(value) > 2 and (os.path.isabs(value) or re.match(r"[A-Za-z]:[\\/]", value)):
            values |= dict.fromkeys((part for part in value.split(os.pathsep) if len(part) > 4), PATH)
    if user.hub.token:
        values[user.hub.token] = TOKEN
    own = (user.config_dir, user.data_dir, user.cache_dir, user.state_dir, user.hub.cache, Path.home())
    values |= {str(folder): PATH for folder in own if folder is not None and len(str(folder)) > 2}
    host = socket.gethostname()
    names = {host: HOST, host.partition(".")[0]: HOST} | dict.fromkeys(_users(user.environ), USER)
    known = {part for name in public for part in name.split("/")}
    for folder in folders:
        values[str(folder)] = PATH
        names |= {part: FOLDER for part in folder.parts[-2:] if len(part) > 1 and part not in known}
    return Secrets(values, {name: mark for name, mark in names.items() if name.lower() not in ORDINARY}, public)


def scrub(text: str, secrets: Secrets) -> str:
    """The text with a mark in the place of everything private."""
    text = _without(text, secrets.values)
    for name in sorted(secrets.names, key=len, reverse=True):
        whole = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
        text = re.sub(whole, secrets.names[name], text, flags=re.I)
    for pattern, mark in PATTERNS:
        text = pattern.sub(mark, text)
    text = _COLONS.sub(_colons, text)
    return _LONG.sub(lambda found: _long(found.group(), secrets.public), text)


def _without(text: str, values: Mapping[str, str]) -> str:
    """The text with a mark for each run of characters that belong to values; these may overlap."""
    spans: list[tuple[int, int, str]] = []
    for value, mark in values.items():
        below = rf"(?:[\\/]{_REST})?" if mark == PATH else ""  # what lies in a private folder is private, too
        spans += [(*found.span(1), mark) for found in re.finditer(f"(?=({re.escape(value)}{below}))", text)]
    pieces, end = [], 0
    for start, stop, mark in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= end:
            pieces += [text[end:start], mark]
        end = max(end, stop)
    return "".join((*pieces, text[end:]))


def scrubbed(value: Any, secrets: Secrets) -> Any:
    """A JSON-able value with every text in it scrubbed; of a mapping's keys those that are no plain words."""
    if isinstance(value, str):
        return scrub(value, secrets)
    if isinstance(value, Mapping):
        return {_key(str(key), secrets): scrubbed(each, secrets) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(each, secrets) for each in value]
    return value if value is None or isinstance(value, (bool, int, float)) else scrub(str(value), secrets)


def _key(key: str, secrets: Secrets) -> str:
    """Fields of ours are short words; other keys, such as the names of kernels, are texts."""
    return key if re.fullmatch(r"[a-z][a-z0-9_]{0,23}", key) else scrub(key, secrets)


def _colons(found: re.Match[str]) -> str:
    """An IPv6 address; a time of day is none."""
    try:
        ipaddress.IPv6Address(found.group())
    except ValueError:
        return found.group()
    return ADDRESS


def _long(word: str, public: Collection[str]) -> str:
    """What may be a key or a token; words joined by dashes are not."""
    if word in public:
        return word
    pieces = re.split(r"[+/_=-]", word)
    return word if len(pieces) > 2 and all(_WORDLIKE.fullmatch(piece) for piece in pieces) else TOKEN


def _users(environ: Mapping[str, str]) -> set[str]:
    names = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    home = environ.get("HOME") or environ.get("USERPROFILE") or ""
    names.add(re.split(r"[\\/]", home.rstrip("\\/"))[-1])
    try:
        names.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # an id without a name
        pass
    return names
