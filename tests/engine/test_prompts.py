"""From a request to ids in a session: whose text may be control tokens, and what ends before the engine is asked."""

from __future__ import annotations

from functools import cache

import pytest

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.errors import ContextError
from dflash_local.events import Finished, Step
from dflash_local.request import Limits, Request, user_request

PROMPT = "Count from 3 to 7."
APPLIED = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"


@cache
def demo() -> Session:
    return load(find("demo"), LoadConfig(dtype="float32", device="cpu", context=256))


def ids_of(session: Session, request: Request) -> list[int]:
    return [token for event in session.generate(request) if isinstance(event, Step) for token in event.token_ids]


def test_a_prompt_with_the_template_applied_is_the_conversation_itself() -> None:
    session = demo()
    chat, text = user_request(PROMPT, limits=Limits(20)), Request(prompt=APPLIED, limits=Limits(20))
    assert session.render(text).ids == session.render(chat).ids
    assert ids_of(session, text) == ids_of(session, chat)


def test_the_same_text_in_a_message_makes_no_control_token() -> None:
    session = demo()
    assert session.tokenizer is not None
    harmless = [i for i in session.render(user_request("x")).ids if i in session.tokenizer.added]
    assert [i for i in session.render(user_request(APPLIED)).ids if i in session.tokenizer.added] == harmless


def test_bos_comes_once_whether_the_text_has_it_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    session = demo()
    assert session.tokenizer is not None
    bos = session.tokenizer.token_id("<|endoftext|>")
    assert bos is not None
    monkeypatch.setattr(session.tokenizer, "begin", (bos,))
    alone = session.render(Request(prompt="One two.")).ids
    assert alone[0] == bos and alone.count(bos) == 1
    assert session.render(Request(prompt="<|endoftext|>One two.")).ids == alone


def test_a_hopeless_prompt_is_refused_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    session = demo()
    session.generate(user_request("warm"))
    assert session.tokenizer is not None
    child = session.tokenizer._worker.pid
    request, sizes = session.tokenizer._worker.request, []
    monkeypatch.setattr(
        session.tokenizer._worker, "request", lambda data, *rest: (sizes.append(len(data)), request(data, *rest))[1]
    )
    for asked in (Request(prompt="lorem ipsum " * 600_000), user_request("lorem ipsum " * 300_000)):
        with pytest.raises(ContextError, match="at least [0-9]+ tokens, the context holds 256"):
            session.generate(asked)
    assert session.tokenizer._worker.pid == child and max(sizes) < 10_000, "no more than a beginning is tokenised"


def test_cancel_while_the_prompt_is_prepared_ends_there_and_stays_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    session = demo()
    want = ids_of(session, user_request(PROMPT, limits=Limits(20)))
    monkeypatch.setattr("dflash_local.worker.process._receive", lambda process: process.wait() and None)
    (end,) = session.generate(user_request(PROMPT), lambda: True)
    assert isinstance(end, Finished) and end.reason == "cancelled"
    monkeypatch.undo()
    assert ids_of(session, user_request(PROMPT, limits=Limits(20))) == want


def test_the_child_of_a_closed_session_is_gone() -> None:
    session = load(find("demo"), LoadConfig(dtype="float32", device="cpu", draft=False))
    assert session.tokenizer is not None
    (child,) = session.tokenizer._worker._children
    session.close()
    assert child.returncode is not None and session.tokenizer._worker.pid is None
