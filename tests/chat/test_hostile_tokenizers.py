"""A checkpoint's tokenizer that hangs, panics or takes all memory ends one request; long texts are known early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.chat import tokenizer as module
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError, ContextError, Interrupted, TokenizerError
from dflash_local.worker.process import ChildLimits

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def edited(chatml_folder: Path, tmp_path: Path) -> Callable[[Edit], Tokenizer]:
    """The ChatML tokenizer with another tokenizer.json."""

    def build(edit: Edit) -> Tokenizer:
        spec = json.loads((chatml_folder / "tokenizer.json").read_text())
        edit(spec)
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        tokenizer = Tokenizer.load(open_source(tmp_path))
        assert tokenizer is not None
        return tokenizer

    return build


def split(regex: str) -> Edit:
    def edit(spec: dict[str, Any]) -> None:
        step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, spec["pre_tokenizer"]]}

    return edit


def replace(pattern: str, content: str, times: int) -> Edit:
    def edit(spec: dict[str, Any]) -> None:
        step = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
        spec["normalizer"] = {"type": "Sequence", "normalizers": [step] * times}

    return edit


@pytest.mark.parametrize(
    ("edit", "text"), [(split("(a+)+$"), "a" * 40 + "!"), (replace("a", "a" * 1000, 4), "a")], ids=["regex", "replace"]
)
def test_a_panic_or_an_abort_of_the_library_is_one_typed_error(
    edited: Callable[[Edit], Tokenizer], edit: Edit, text: str
) -> None:
    tokenizer = edited(edit)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        tokenizer.encode(text)
    assert (caught.value.exit_code, caught.value.http_status) == (6, 500)
    assert tokenizer.decode(tokenizer.encode("the quick fox")) == "the quick fox"


def test_a_text_that_takes_too_long_ends_at_its_limit(
    edited: Callable[[Edit], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = edited(split("x+(?=y)"))  # from every x to the end of them all
    monkeypatch.setattr(module, "ChildLimits", lambda _seconds, mebibytes: ChildLimits(0.2, mebibytes))
    with pytest.raises(TokenizerError, match="takes over 0 s"):
        tokenizer.encode("x" * 500_000)
    monkeypatch.undo()
    assert tokenizer.decode(tokenizer.encode("xy")) == "xy"


def test_a_text_that_nobody_wants_any_more_ends_the_child(edited: Callable[[Edit], Tokenizer]) -> None:
    tokenizer = edited(split("x+(?=y)"))
    asked = iter((False, True))
    with pytest.raises(Interrupted):
        tokenizer.encode("x" * 500_000, None, lambda: next(asked))
    assert tokenizer._worker.pid is None
    assert tokenizer.decode(tokenizer.encode("xy")) == "xy"


def test_a_file_that_breaks_its_reader_is_refused_at_the_load(
    chatml_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ChildLimits", lambda seconds, _mebibytes: ChildLimits(seconds, 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json .*takes all memory"):
        Tokenizer.load(open_source(chatml_folder))


def test_a_huge_text_leaves_no_memory_behind(chatml: Tokenizer) -> None:
    chatml.encode("warm")
    before = chatml._worker.pid
    text = "the quick brown fox " * 60_000
    assert len(chatml.encode(text)) > 60_000
    assert chatml.encode("warm") and chatml._worker.pid != before


def test_a_text_that_is_long_for_its_ids_is_read_whole(edited: Callable[[Edit], Tokenizer]) -> None:
    word = "ab" * 20

    def edit(spec: dict[str, Any]) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        ids = [*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]
        spec["added_tokens"].append({"id": max(ids) + 1, "content": word, **flags})

    assert len(edited(edit).encode(word * 400, 420)) == 400


def test_a_hopeless_text_is_refused_by_its_beginning(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    whole = chatml._worker.request
    monkeypatch.setattr(chatml._worker, "request", lambda data, *more: asked.append(len(data)) or whole(data, *more))
    with pytest.raises(ContextError, match="at least [0-9]+ tokens, the context holds 2048") as caught:
        chatml.encode("lorem ipsum dolor " * 400_000, 2048)
    assert caught.value.http_status == 400 and asked and max(asked) < 40_000
    monkeypatch.undo()
    with pytest.raises(ContextError, match="the prompt has 12 tokens, the context holds 11"):
        chatml.encode("!" * 12, 11)
    assert len(chatml.encode("!" * 12, 12)) == 12
