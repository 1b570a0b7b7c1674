"""Ids of a prompt and its reply in an answer, by vLLM's names, for requests that ask for ``return_token_ids``."""

from __future__ import annotations

from typing import Any

from dflash_local.events import Started, Step
from dflash_local.request import Request


class TokenIds:
    """What was said of the ids so far, and what is to be said next; nothing at all where they are not wanted."""

    def __init__(self, request: Request) -> None:
        self._wanted = request.return_token_ids
        self._prompt: list[int] | None = None
        self._ids: list[int] = []
        self._sent = 0
        self._prompt_sent = False

    def started(self, event: Started) -> None:
        """Note the prompt."""
        self._prompt = list(event.prompt_ids)

    def step(self, event: Step) -> None:
        """Note what was emitted."""
        self._ids += event.token_ids

    def rewind(self) -> None:
        """All is to be said again: in the whole answer."""
        self._sent, self._prompt_sent = 0, False

    def prompt(self) -> dict[str, Any]:
        """The field with the prompt's ids, once they are known and once only."""
        if not self._wanted or self._prompt is None or self._prompt_sent:
            return {}
        self._prompt_sent = True
        return {"prompt_token_ids": self._prompt}

    def reply(self) -> dict[str, Any]:
        """The field with the reply's ids that are not said yet."""
        if not self._wanted:
            return {}
        fresh, self._sent = self._ids[self._sent :], len(self._ids)
        return {"token_ids": fresh}
