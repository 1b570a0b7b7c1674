"""A model's own sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError
from dflash_local.request import SamplingParams


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_no_file_or_no_do_sample_is_greedy(tmp_path: Path) -> None:
    assert sampling_defaults(open_source(tmp_path)) == SamplingParams()
    assert sampling_defaults(open_source(write(tmp_path, {"temperature": 0.6, "top_k": 20}))).greedy


def test_the_values_of_the_authors_are_taken_and_nothing_is_added(tmp_path: Path) -> None:
    content = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2]}
    assert sampling_defaults(open_source(write(tmp_path, content))) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20
    )
    assert sampling_defaults(open_source(write(tmp_path, {"do_sample": True, "top_k": None}))) == SamplingParams(
        temperature=1.0
    )


def test_what_the_registry_advises_stands_in_for_what_the_file_does_not_tell(tmp_path: Path) -> None:
    advised = SamplingParams(temperature=0.2, top_p=0.9)
    assert sampling_defaults(open_source(write(tmp_path, {"eos_token_id": 2})), advised) == advised
    told = write(tmp_path, {"do_sample": True, "temperature": 0.6})
    assert sampling_defaults(open_source(told), advised) == SamplingParams(temperature=0.6)


@pytest.mark.parametrize("bad", [{"do_sample": True, "top_p": 3}, {"do_sample": True, "top_k": "many"}, [1]])
def test_a_bad_value_names_the_file(tmp_path: Path, bad: object) -> None:
    with pytest.raises(CheckpointError) as refused:
        sampling_defaults(open_source(write(tmp_path, bad)))
    assert "generation_config.json" in refused.value.message


def test_a_file_that_is_not_json_names_itself(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="generation_config.json"):
        sampling_defaults(open_source(tmp_path))
