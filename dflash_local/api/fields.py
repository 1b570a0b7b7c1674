"""Strict reading of a JSON body: duplicate keys, NaN, wrong types and unknown fields are errors that name the field."""

from __future__ import annotations

import difflib
import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from dflash_local.api.refusals import FieldError, unsupported
from dflash_local.errors import UsageError
from dflash_local.request import check_json

MAX_QUOTED = 80
MAX_ITEMS = 10_000  # of a list
HUGE = 1e308
MAX_BRACKETS = 200_000  # texts of half a million tokens have fewer; reading millions holds up everybody for seconds
_PARSING = threading.Lock()  # one body at a time: the more threads read at once, the later the event loop has its turn


def parse(body: bytes) -> Any:
    """The value of a JSON text; FieldError: not UTF-8 or JSON, a key twice, NaN, Infinity, too deep or too many."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise FieldError("body", f"the body has more than {MAX_BRACKETS:,} opening brackets", "send less")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FieldError("body", f"the body is not UTF-8: byte {error.start}") from error
    try:
        with _PARSING:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise FieldError("body", "the body is nested too deep") from error
    except ValueError as error:
        raise FieldError("body", f"the body is not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FieldError(twice[:MAX_QUOTED], f"the key {quoted(twice)} stands twice in one object")
    return content


def _constant(word: str) -> NoReturn:
    raise FieldError("body", f"{word} is not a JSON number")


def quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within, a refused value is the field's of that name."""
    try:
        yield
    except UsageError as error:
        raise FieldError(path, error.message, error.hint) from error


class Fields:
    """One object of a body, read field by field; a null counts as absent, what nobody read is refused.

    Args:
        value: the object. path: where it stands in the body, empty for the body itself.

    Attributes:
        taken: fields that were sent and change nothing, and why.
    """

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise FieldError(path or "body", f"{path or 'the body'} must be a JSON object, got {quoted(value)}")
        self._left: dict[str, Any] = dict(value)
        self._known: list[str] = []
        self._refused: set[str] = set()
        self._path = path
        self.taken: dict[str, str] = {}

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def wrong(self, key: str, text: str, hint: str = "") -> FieldError:
        """The error of a field; the text goes on after its name."""
        return FieldError(self.name(key), f"{self.name(key)} {text}", hint)

    def take(self, key: str) -> Any:
        """The value as it is; None when absent."""
        self._known.append(key)
        return self._left.pop(key, None)

    def text(self, key: str) -> str | None:
        return self._typed(key, str, "text")

    def needed_text(self, key: str) -> str:
        """A string that must be there."""
        value = self.text(key)
        if value is None:
            raise self.wrong(key, "is missing")
        return value

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def items(self, key: str, most: int = MAX_ITEMS) -> list[Any] | None:
        """A list, of ``most`` items at most."""
        value: list[Any] | None = self._typed(key, list, "a list")
        if value is not None and len(value) > most:
            raise FieldError(self.name(key), f"{len(value)} {key} given, {most} allowed", "send fewer")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        return self._typed(key, dict, "an object")

    def part(self, key: str) -> Fields:
        """An object to be read field by field; an empty one when absent."""
        value = self.take(key)
        return Fields({} if value is None else value, self.name(key))

    def integer(self, key: str, low: int, high: int | None = None) -> int | None:
        """A whole number within a range, which may have no end; 5.0 is one, as JSON makes no difference."""
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"must be a whole number, got {quoted(value)}")
        if high is None and value < low:
            raise self.wrong(key, f"must be at least {low}, got {quoted(value)}")
        if high is not None and not low <= value <= high:
            raise self.wrong(key, f"{quoted(value)} is outside {low}..{high}")
        return value

    def number(self, key: str) -> float | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, f"must be a number, got {quoted(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(key, "is not a finite number")
        return max(-HUGE, min(HUGE, value))  # an integer may be larger than any float

    def refuse(self, key: str, hint: str, harmless: Sequence[object] = ()) -> None:
        """A field that is not supported, unless its value is what happens anyway."""
        value = self.take(key)
        self._refused.add(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise unsupported(self.name(key), hint)

    def ignore(self, key: str, why: str) -> None:
        """A field that cannot change a reply's text; it is among ``taken`` when it is sent."""
        value = self.take(key)
        if value is not None:
            with naming(self.name(key)):
                check_json(self.name(key), value)
            self.taken[key] = why

    def finish(self) -> None:
        """Refuse what nobody read, with the nearest known name unless that is refused as well."""
        for key in self._left:
            short = len(key) <= MAX_QUOTED  # a comparison takes the product of both lengths
            close = difflib.get_close_matches(key, self._known, n=1) if short else []
            hint = f"did you mean {self.name(close[0])!r}?" if close and close[0] not in self._refused else ""
            shown = self.name(key[:MAX_QUOTED])
            raise FieldError(shown, f"unknown field {quoted(shown)}", hint, "unknown_parameter")

    def _typed(self, key: str, kind: type, what: str) -> Any:
        value = self.take(key)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key, f"must be {what}, got {quoted(value)}")
        return value
