"""``dflash doctor --row``: the last bench of this machine as a line to share, with the certificate of the same load."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app.card_reports import BENCH, CERTIFICATE, RANDOM, card_report, keep_measured
from dflash_local.errors import UsageError
from dflash_local.settings import Settings

HEAD: dict[str, Any] = {
    "report": BENCH,
    "created": "2026-11-30T10:00:00+00:00",
    "row": "Qwen/Qwen3.5-9B",
    "machine": {"processor": "A CPU", "gpus": [{"name": "NVIDIA GeForce RTX 4090"}], "driver": "580.1"},
    "versions": {"dflash-local": "0.2.0", "triton": None},
    "target": {"name": "Qwen/Qwen3.5-9B", "revision": "a" * 40},
    "drafter": {"name": "z-lab/Qwen3.5-9B-DFlash"},
    "engine": "fused",
    "dtype": "bfloat16",
    "weights": "int4 g128, as published",
    "stored": "int4 g128",
    "device": "cuda",
    "load": {"quantize": None, "exact": False, "context": 4096},
}
ROW = {"acceptance_per_position": [0.8, 0.5], "ar_tokens_per_s": 100.0, "dflash_tokens_per_s": 250.0}
SPEED = {**HEAD, "rows": [{"kind": "code", **ROW}, {"kind": "chat", **ROW}, {"kind": "total", **ROW}]}
CERTIFIED = {**HEAD, "report": CERTIFICATE, "strength": "fast", "load": {**HEAD["load"], "context": 1024}}


@pytest.fixture
def user(tmp_path: Path) -> Settings:
    return settings.load({"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})


def kept(user: Settings, content: dict[str, Any], **changed: Any) -> str:
    text = json.dumps({**copy.deepcopy(content), **changed})
    keep_measured({**content, **changed}, text, user)
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_bench_and_its_certificate_make_a_line(user: Settings) -> None:
    kept(user, SPEED)
    digest = kept(user, CERTIFIED)
    made = card_report(user)
    assert (made.card, made.pair, made.format, made.context) == (
        "NVIDIA GeForce RTX 4090",
        "Qwen/Qwen3.5-9B",
        "int4 g128",
        4096,
    )
    assert (made.plain, made.drafted, made.accepted) == (100, 250, (0.8, 0.5))
    assert [task.task for task in made.tasks] == ["code", "chat"] and made.versions == {"dflash-local": "0.2.0"}
    assert made.certificate is not None and (made.certificate.sha256, made.certificate.strength) == (digest, "fast")


@pytest.mark.parametrize(
    ("device", "card"),
    [("cuda:1", "B"), ("cpu", "A CPU"), ("balanced", "A and B and A"), ("cuda:2,0", "2 x A"), ("cuda:1,2", "B and A")],
)
def test_the_card_is_that_or_those_of_the_device(user: Settings, device: str, card: str) -> None:
    gpus = {**HEAD["machine"], "gpus": [{"name": name} for name in "ABA"]}
    kept(user, SPEED, device=device, machine=gpus)
    assert card_report(user).card == card


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "bfloat16"},
        {"drafter": None},
        {"versions": {"dflash-local": "0.1.0"}},
        {"load": {**HEAD["load"], "exact": True}},
    ],
)
def test_a_certificate_of_another_load_is_left_out(user: Settings, changed: dict[str, Any]) -> None:
    kept(user, SPEED)
    kept(user, CERTIFIED, **changed)
    assert card_report(user).certificate is None


def test_a_later_bench_of_random_weights_drafts_and_certifies_nothing(user: Settings) -> None:
    kept(user, SPEED)
    kept(user, CERTIFIED)
    at = {"context": 1024, "ar_step": {"ms": 4.0}, "cycle": {"16": {"ms": 5.0}}}
    random = {name: HEAD[name] for name in ("created", "row", "machine", "versions", "engine", "dtype", "device")}
    random |= {
        "created": "2026-11-30T11:00:00+00:00",
        "report": RANDOM,
        "weights": "random",
        "stored": None,
        "exact": True,
    }
    kept(user, {**random, "block_size": 16, "measured": {"at": [at]}})
    made = card_report(user)
    assert (made.plain, made.drafted, made.cycle_steps, made.weights) == (250, None, 1.25, "random")
    assert made.certificate is None and made.format == "bfloat16" and made.exact


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"row": None}, "of no pair of the registry"),
        ({"adapted": "adapted 2026-11-30 ab12cd"}, "that dflash adapt has taught"),
        ({"rows": []}, "it is damaged"),
        ({"rows": [{"kind": "code", **ROW, "ar_tokens_per_s": 0.0}]}, "plain must be a number"),
    ],
)
def test_what_makes_no_line_is_refused(user: Settings, changed: dict[str, Any], told: str) -> None:
    kept(user, SPEED, **changed)
    with pytest.raises(UsageError, match=told):
        card_report(user)


def test_nothing_measured_is_said(user: Settings) -> None:
    with pytest.raises(UsageError, match="no bench of this machine is kept"):
        card_report(user)
