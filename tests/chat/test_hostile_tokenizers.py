"""A checkpoint's tokenizer that hangs, panics or takes all memory ends one request; long texts are known by length."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from dflash_local.chat import tokenizer as module
from dflash_local.chat.token_length import NORMAL_FORMS, TokenLength
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError, ContextError, Interrupted, TokenizerError
from dflash_local.worker.process import Limits

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
    monkeypatch.setattr(module, "Limits", lambda _seconds, mebibytes: Limits(0.2, mebibytes))
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
    monkeypatch.setattr(module, "Limits", lambda seconds, _mebibytes: Limits(seconds, 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json .*takes all memory"):
        Tokenizer.load(open_source(chatml_folder))


def test_a_huge_text_leaves_no_memory_behind(chatml: Tokenizer) -> None:
    chatml.encode("warm")
    before = chatml._worker.pid
    text = "the quick brown fox " * 60_000
    assert len(chatml.encode(text)) > 60_000
    assert chatml.encode("warm") and chatml._worker.pid != before


def test_a_hopeless_text_is_refused_by_its_length_and_no_child_sees_it(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(chatml._worker, "request", lambda data, *_: asked.append(data))
    with pytest.raises(ContextError, match="at least [0-9]+ tokens, the context holds 2048") as caught:
        chatml.encode("lorem ipsum dolor " * 400_000, 2048)
    assert caught.value.http_status == 400 and not asked
    monkeypatch.undo()
    with pytest.raises(ContextError, match="the prompt has 12 tokens, the context holds 11"):
        chatml.encode("!" * 12, 11)
    assert len(chatml.encode("!" * 12, 12)) == 12


@pytest.mark.parametrize("folder", ["chatml", "harmony", "plain"])
@pytest.mark.parametrize(
    "text",
    [
        "one two three four " * 9,
        " " * 999,
        "\u212b\u0301e\u0301" * 50,
        "\u1112\u1161\u11ab" * 70,
        "<|im_end|>\n" * 40,
        "🙂",
    ],
)
def test_there_are_never_fewer_tokens_than_the_length_says(
    request: pytest.FixtureRequest, folder: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(folder)
    least = tokenizer._length.at_least(text)
    assert 0 < least <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    "edit",
    [
        lambda spec: spec.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        lambda spec: spec.update(normalizer={"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}),
        lambda spec: spec.update(normalizer={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}),
        lambda spec: spec.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, spec["pre_tokenizer"]]}
        ),
        lambda spec: spec["model"].update(
            vocab={k: v for k, v in spec["model"]["vocab"].items() if k != "a"}, merges=[]
        ),
        lambda spec: spec["model"].update(continuing_subword_prefix="##"),
    ],
    ids=["strip", "shrink", "regex", "whitespace", "no a", "prefix"],
)
def test_where_text_may_vanish_nothing_follows_from_its_length(chatml_folder: Path, edit: Edit) -> None:
    spec = json.loads((chatml_folder / "tokenizer.json").read_text())
    assert TokenLength(spec).at_least("a" * 10_000) > 0
    edit(spec)
    assert TokenLength(spec).at_least("a" * 10_000) == 0


def test_space_that_an_added_token_swallows_does_not_count(chatml_folder: Path) -> None:
    spec = json.loads((chatml_folder / "tokenizer.json").read_text())
    spec["added_tokens"][0]["rstrip"] = True
    assert TokenLength(spec).at_least(" \n" * 10_000) == 0


def test_no_text_shrinks_by_more_than_the_factor_of_its_normal_form() -> None:
    """By weights of whole decompositions: no character has more bytes than its parts weigh, and what a character
    of a composed text weighs is at most the factor times its bytes. (Decomposed forms: 4 bytes become 1 at most.)
    """
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    forms: tuple[tuple[Literal["NFC", "NFKC"], Literal["NFD", "NFKD"]], ...] = (("NFC", "NFD"), ("NFKC", "NFKD"))
    for form, apart in forms:
        parts = {c: unicodedata.normalize(apart, c) for c in characters if not unicodedata.is_normalized(apart, c)}
        weight = {c: len(c.encode()) for c in characters}
        for character, whole in parts.items():
            if len(whole) == 1:
                weight[whole] = max(weight[whole], len(character.encode()))
        assert all(len(c.encode()) <= sum(map(weight.__getitem__, whole)) for c, whole in parts.items())
        composed = [c for c in characters if unicodedata.is_normalized(form, c)]
        factor = max(sum(map(weight.__getitem__, parts.get(c, c))) / len(c.encode()) for c in composed)
        assert 1 < factor <= NORMAL_FORMS[form]
