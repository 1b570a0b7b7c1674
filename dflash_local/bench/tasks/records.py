"""Records of a data set's file: bounded UTF-8 JSON, and fields that are what they should be. Runs nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dflash_local.errors import DownloadError, UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import check_json

Form = Literal["jsonl", "json"]  # an object a line, or one list of objects
MAX_RECORDS = 100_000
MAX_TEXT = 1 << 20  # characters of a field
REFUSED = "nothing of it is used: report it to its owner"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One object of a file. ``where`` names both in errors.

    Every reader raises DownloadError for a field that is missing, of another kind, too long, or that holds control
    characters.
    """

    fields: dict[str, Any]
    where: str

    def text(self, name: str, required: bool = True) -> str:
        """A field's text; empty for one that is absent and not required."""
        value = self.fields.get(name)
        if value is None and not required:
            return ""
        return self._checked(name, value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A field's list of texts, which has at least one."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            raise self._error(f"{name} is no list of texts")
        return tuple(self._checked(name, item) for item in value)

    def identity(self, name: str) -> str:
        """A field's text or whole number, as text."""
        value = self.fields.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if whole else self._checked(name, value)

    def number(self, name: str) -> int:
        """A field's whole number."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(f"{name} is no whole number")
        return value

    def _checked(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._error(f"{name} is missing" if value is None else f"{name} is no text")
        if len(value) > MAX_TEXT:
            raise self._error(f"{name} has {len(value):,} characters, {MAX_TEXT:,} are allowed")
        if found := _CONTROL.search(value):
            raise self._error(f"{name} holds the control character {ascii(found.group())}")
        return value

    def _error(self, why: str) -> DownloadError:
        return DownloadError(f"{self.where}: {why}", REFUSED)


def read(raw: bytes, form: Form, where: str) -> Iterator[TaskRecord]:
    """The objects of a file, one after the other.

    Raises:
        DownloadError: it is not UTF-8, not JSON of that form, nested too deep, or has too many records.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DownloadError(f"{where} is not UTF-8 (byte {error.start:,})", REFUSED) from error
    if form == "jsonl":
        lines = (line for line in enumerate(text.split("\n"), 1) if line[1].strip())
        parsed = ((_parsed(line, f"{where}, line {number}"), f"{where}, line {number}") for number, line in lines)
    else:
        whole = _parsed(text, where)
        if not isinstance(whole, list):
            raise DownloadError(f"{where} is no list", REFUSED)
        parsed = ((value, f"{where}, entry {number}") for number, value in enumerate(whole, 1))
    for count, (value, place) in enumerate(parsed):
        if count == MAX_RECORDS:
            raise DownloadError(f"{where} has more than {MAX_RECORDS:,} records", REFUSED)
        yield _record(value, place)


def _record(value: Any, where: str) -> TaskRecord:
    if not isinstance(value, dict):
        raise DownloadError(f"{where} is no object", REFUSED)
    try:
        check_json(where, value)
    except UsageError as error:
        raise DownloadError(error.message, REFUSED) from error
    return TaskRecord(value, where)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DownloadError(f"{where} is not JSON: {error}", REFUSED) from error
