"""Where files go and what the user set, from an environment given as a mapping."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.errors import SettingsError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from tests.load_samples import SAMPLES


def write(home: Path, text: str) -> Path:
    path = home / ".config" / "dflash-local" / "settings.json"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_folders_follow_xdg_then_home(tmp_path: Path) -> None:
    plain = settings.load({"HOME": str(tmp_path)})
    assert plain.data_dir == tmp_path / ".local" / "share" / "dflash-local"
    assert plain.config_dir == tmp_path / ".config" / "dflash-local"
    moved = settings.load({"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_DATA_HOME": "relative"})
    assert moved.cache_dir == tmp_path / "c" / "dflash-local"
    assert moved.data_dir == plain.data_dir, "the XDG rule: a relative path is ignored"


def test_dflash_home_holds_everything(tmp_path: Path) -> None:
    own = settings.load({"HOME": "/nowhere", "DFLASH_HOME": str(tmp_path)})
    found = (own.config_dir, own.data_dir, own.cache_dir, own.state_dir)
    assert found == tuple(tmp_path / name for name in ("config", "data", "cache", "state"))
    with pytest.raises(SettingsError, match="DFLASH_HOME='here'"):
        settings.load({"DFLASH_HOME": "here"})


def test_without_home_there_are_no_folders_and_no_failure() -> None:
    lost = settings.load({})
    assert lost.config_dir is None and lost.data_dir is None and lost.history is True


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_DEVICE", "cuda:1")
    assert settings.load().load_config.device == "cuda:1"


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    write(tmp_path, '{"temperature": 0.5, "model": "demo-hybrid", "history": false, "max_new_tokens": 7}')
    env = {"HOME": str(tmp_path), "DFLASH_TEMPERATURE": "0.9", "DFLASH_THINKING": "on", "DFLASH_DTYPE": ""}
    user = settings.load(env)
    assert (user.temperature, user.model, user.history, user.thinking) == (0.9, "demo-hybrid", False, True)
    assert user.max_new_tokens == 7 and user.load_config == LoadConfig()


def test_every_load_option_is_a_variable_and_a_key_unless_it_says_otherwise(tmp_path: Path) -> None:
    given = {name: SAMPLES[name] for name, option in LOAD_OPTIONS.items() if option.has_variable}
    variables = {f"DFLASH_{name.upper()}": str(value) for name, value in given.items()}
    assert settings.load(variables).load_config == LoadConfig(**given)
    write(tmp_path, json.dumps(given))
    assert settings.load({"HOME": str(tmp_path)}).load_config == LoadConfig(**given)
    for name in set(LOAD_OPTIONS) - set(given):
        assert settings.load({f"DFLASH_{name.upper()}": "1"}).load_config == LoadConfig()


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("DFLASH_TEMPERATURE", "hot", "a number from 0 to 5"),
        ("DFLASH_TEMPERATURE", "nan", "a number from 0 to 5"),
        ("DFLASH_HISTORY", "maybe", "true or false"),
        ("DFLASH_DTYPE", "fp8", "one of auto, bfloat16, float16, float32"),
        ("DFLASH_EXACT", "perhaps", "true or false"),
        ("DFLASH_DRAFT_WINDOW", "0", "a whole number from 1 to 1,000,000"),
        ("DFLASH_MAX_NEW_TOKENS", "-1", "a whole number"),
    ],
)
def test_a_bad_variable_names_itself_and_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.load({variable: value})
    assert variable in refused.value.message and value in refused.value.message
    assert allowed in refused.value.message and refused.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('{"temperature": "9"}', "temperature must be a number from 0 to 5, got '9'", ""),
        ('{"history": 3}', "history must be true or false, got 3", ""),
        ('{"full_context": "end"}', "full_context must be one of drop, stop, summarise, got 'end'", ""),
        ('{"model": ""}', "model must be the name of a pair", ""),
        ('{"temprature": 1}', "temprature is unknown", "did you mean 'temperature'?"),
        ("[1]", "must hold one JSON object", "correct it"),
        ("{", "is not JSON", "correct it"),
    ],
)
def test_a_bad_file_names_file_key_and_allowed(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        settings.load({"HOME": str(tmp_path)})
    assert str(path) in refused.value.message and message in refused.value.message
    assert hint in refused.value.hint


def test_the_hub_is_found_as_every_hugging_face_program_finds_it(tmp_path: Path) -> None:
    plain = settings.load({"HOME": str(tmp_path)}).hub
    assert plain.endpoint == "https://huggingface.co" and not plain.offline and plain.token is None
    assert plain.cache == tmp_path / ".cache" / "huggingface" / "hub"
    moved = settings.load(
        {"HOME": str(tmp_path), "HF_HOME": "~/hf", "HF_ENDPOINT": "http://mirror:8080/", "TRANSFORMERS_OFFLINE": "1"}
    ).hub
    assert moved.endpoint == "http://mirror:8080" and moved.offline
    assert moved.cache == tmp_path / "hf" / "hub"
    assert settings.load({"HOME": str(tmp_path), "HF_HUB_CACHE": "/big/disk"}).hub.cache == Path("/big/disk")
    assert settings.load({}).hub.cache is None, "no home: nothing to keep, and no failure"


def test_a_token_comes_from_the_variable_or_the_file_and_is_never_shown(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    (tmp_path / "token").write_text("hf_filed\n", encoding="utf-8")
    assert settings.load(home).hub.token == "hf_filed"
    given = settings.load({**home, "HF_TOKEN": " hf_given "}).hub
    assert given.token == "hf_given"
    assert "hf_given" not in repr(given)
    assert settings.load({**home, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}).hub.token is None


def test_a_gpu_that_is_named_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="settings.json: --device 'cuda:0,0' names a GPU twice"):
        settings.load({"DFLASH_DEVICE": "cuda:0,0"})
    assert settings.load({"DFLASH_DEVICE": "cuda:1,0"}).load_config.device == "cuda:1,0"


def test_an_endpoint_that_is_no_web_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="HF_ENDPOINT='mirror.example'"):
        settings.load({"HF_ENDPOINT": "mirror.example"})


def test_libraries_are_quietened_only_where_the_user_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    settings.quiet_libraries()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true" and os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # so that it goes with the test


def test_xet_is_off_in_this_process_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "0")
    settings.quiet_libraries()
    assert os.environ["HF_HUB_DISABLE_XET"] == "1"
