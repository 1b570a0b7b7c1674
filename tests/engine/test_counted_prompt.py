"""A prompt that was counted is not rendered again for its reply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local.catalog import bundled
from dflash_local.chat.template import Rendered
from dflash_local.engine import load, session
from dflash_local.events import Finished
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Message, Request, user_request


def test_it_is_rendered_once_and_only_where_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = load(bundled.find("demo"), LoadConfig(dtype="float32", device="cpu", engine="reference"))
    rendered: list[str] = []
    real = session.render

    def noted(tokenizer: object, messages: tuple[Message, ...], **given: object) -> Rendered:
        rendered.append(messages[-1].content)
        return real(tokenizer, messages, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "render", noted)

    def prompt_tokens(request: Request) -> int:
        *_, finished = chat.generate(request)
        assert isinstance(finished, Finished)
        return finished.usage.prompt_tokens

    first, second = (user_request(text, limits=Limits(2)) for text in ("Count from 3 to 7.", "Count from 1 to 17."))
    count = chat.count(first)
    assert prompt_tokens(replace(first, limits=Limits(1))) == count and rendered == ["Count from 3 to 7."]
    assert prompt_tokens(first) == count and len(rendered) == 2, "the next may be of another day"
    chat.count(first)
    assert prompt_tokens(second) != count and rendered[3:] == ["Count from 1 to 17."]
