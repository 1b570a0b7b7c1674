"""Stop ids are the union of what all files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_local.chat.stop_ids import config_stop_ids, tokenizer_stop_ids
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError


def write(folder: Path, **files: Any) -> Path:
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return folder


def test_all_files_are_united(tmp_path: Path) -> None:
    source = open_source(
        write(
            tmp_path,
            config={"eos_token_id": 1, "text_config": {"eos_token_id": [2, 3]}},
            generation_config={"eos_token_id": [3, 4]},
            tokenizer_config={"eos_token": {"content": "<e>"}},
            special_tokens_map={"eos_token": "<f>"},
            tokenizer={"model": {}, "added_tokens": []},
        )
    )
    assert config_stop_ids(source) == {1, 2, 3, 4}
    parts = source.tokenizer()
    assert parts is not None and tokenizer_stop_ids(parts, {"<e>": 5, "<f>": 6}) == {5, 6}


def test_null_and_unknown_texts_count_for_nothing(tmp_path: Path) -> None:
    source = open_source(
        write(tmp_path, config={"eos_token_id": None}, tokenizer={}, tokenizer_config={"eos_token": "<nowhere>"})
    )
    parts = source.tokenizer()
    assert parts is not None and config_stop_ids(source) == tokenizer_stop_ids(parts, {}) == frozenset()


@pytest.mark.parametrize("value", [True, -1, "2", [1, None], 1.5])
def test_what_is_no_id_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        config_stop_ids(open_source(write(tmp_path, config={"eos_token_id": value})))


def test_harmony_stops_at_return_and_call(harmony: Tokenizer) -> None:
    assert harmony.stop_ids == {harmony.token_id("<|return|>"), harmony.token_id("<|call|>")}
