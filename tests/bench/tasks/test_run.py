"""The turns that a conversation of a task is sent as."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs on a session, which needs torch")

from dflash_local.bench.tasks import run  # noqa: E402
from dflash_local.bench.tasks.results import ResultsFile  # noqa: E402
from dflash_local.bench.tasks.table import TASKS  # noqa: E402
from dflash_local.catalog.bundled import FOLDER, find  # noqa: E402
from dflash_local.engine import LoadConfig, load  # noqa: E402
from dflash_local.engine.session import Session  # noqa: E402
from dflash_local.request import Request  # noqa: E402
from tests.bench.tasks.data_files import file_of  # noqa: E402


@pytest.mark.skipif(not (FOLDER / "demo").is_dir(), reason="the bundled pairs are not in this checkout")
def test_a_second_turn_is_sent_after_the_drafted_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    real = Session.render

    def render(session: Session, request: Request, *more: object) -> object:
        asked.append(request)
        return real(session, request, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "render", render)
    session = load(find("demo"), LoadConfig(dtype="float32", device="cpu"))
    task, file = TASKS["mt-bench"], ResultsFile(tmp_path, "a", {})
    run.measure(session, task, task.items(file_of("mt-bench"), 1), {4: file}, run.TaskOptions(6))
    turns = file.results["81"].turns
    conversations = [[(m.role, m.content) for m in request.messages] for request in asked if request.messages]
    first, second = ("user", "Write a post."), ("user", "Now shorter.")
    assert conversations == [[first], [first], [first, ("assistant", turns[0].dflash.text), second]], "a warm-up first"
    assert len(turns) == 2 and turns[1].prompt_tokens > turns[0].prompt_tokens
    assert max(turns[0].dflash.acceptance_lengths) <= 4 and not turns[0].ar.acceptance_lengths
