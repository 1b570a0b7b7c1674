"""Other people's clients against ``dflash serve demo``, each in its own environment. Run by ``make test-clients``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import Demo, run_script
from tests.clients.scripts.checks import FIRST, SECOND, assistant, user

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("client", ["openai", "langchain", "litellm", "llm"])
def test_a_client_gets_what_it_asks_for(client: str, demo: Demo, tmp_path: Path) -> None:
    first = demo.said(user(FIRST))
    second = demo.said(user(FIRST), assistant(first), user(SECOND))
    cancelled = demo.cancelled
    found = run_script(client, tmp_path, [demo.url])
    failed = {name: one["failed"] for name, one in found.items() if isinstance(one, dict)}
    assert not failed, "\n".join(f"{name}: {trace}" for name, trace in failed.items())
    assert found["models"] == ["demo"]
    assert found["chat"] == first
    assert "".join(found["stream"]) == first
    assert len(found["stream"]) > 1 or client == "llm", "nothing was streamed"  # it prints; its stop reads a stream
    assert found["turns"] == [first, second]
    assert found["tools"], "no reply where a tool was offered"
    assert "unknown model 'gpt-4'" in found["wrong_model"] and "served here: demo" in found["wrong_model"]
    assert found["stop"] >= 1, "the stream had ended before it was left"
    demo.wait_idle()
    assert demo.cancelled == cancelled + 1, "the reply to a client that left was not stopped"
    assert {status for _, status in demo.answered()} == {200, 404}
