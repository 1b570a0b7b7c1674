"""A pair in a Python program's own process: what ``dflash_local.load`` gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_local import settings
from dflash_local.app.loading import open_held
from dflash_local.app.resolve import resolve
from dflash_local.app.thinking import default_thinking
from dflash_local.catalog.bundled import Pair
from dflash_local.events import Event, LoadProgress, Mode, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import MAX_NEW_TOKENS, Limits, Message, Request, SamplingParams
from dflash_local.service.backend import Backend


class LoadedPair:
    """A loaded pair; a ``with`` gives its memory back.

    Attributes:
        notices: what the load had to say.
    """

    def __init__(self, pair: Pair, session: Backend, notices: Sequence[Notice]) -> None:
        self._pair, self._session, self.notices = pair, session, tuple(notices)

    def __enter__(self) -> LoadedPair:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def facts(self) -> SessionFacts:
        """How it is loaded."""
        return self._session.facts

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: Sequence[str] = (),
        mode: Mode = "dflash",
        thinking: bool | None = None,
        **sampling: Any,
    ) -> Iterator[Event]:
        """Reply to a message or a conversation: ``Started``, a ``Step`` each cycle, ``Finished``; greedy if not told.

        Args:
            mode: ``ar`` writes the same text without drafts. thinking: as the drafter was trained if None.
            sampling: fields of ``SamplingParams``.

        Raises:
            UsageError: a value is not allowed. DFlashError: the reply failed.
        """
        messages = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        request = Request(
            messages=messages,
            sampling=SamplingParams(**sampling),
            limits=Limits(max_new_tokens, tuple(stop)),
            mode=mode if self.facts.drafting else "ar",
            thinking=default_thinking(self._pair) if thinking is None else thinking,
        )
        return self._session.generate(request)

    def close(self) -> None:
        """Give the memory back."""
        self._session.close()


def load(model: str, drafter: str | None = None, **options: Any) -> LoadedPair:
    """See ``dflash_local.load``."""
    user, notices = settings.load(), list[Notice]()

    def notify(event: Notice | LoadProgress) -> None:
        if isinstance(event, Notice):
            notices.append(event)

    config = LoadConfig(**options)
    pair = resolve(model, drafter, user, notify, draft=config.draft)
    return LoadedPair(pair, open_held(pair, config, user, notify), notices)
