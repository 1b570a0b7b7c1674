"""Probing a drafter: what a fine-tune keeps of its base's drafter, notices in a minute and at its first use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_local import settings
from dflash_local.app import loading
from dflash_local.app.resolve import resolve
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.check import drafting, text
from dflash_local.engine import load
from dflash_local.engine.session import Session
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from tests.check import faults
from tests.cli.conftest import Cli, cli  # noqa: F401  # a fixture

NEAR, FAR = 0.1, 1.0  # noise of each weight, in its tensor's standard deviations
RUN = ("Count from 3 to 7.", "--max-new-tokens", "8", "--no-fit-check")
DRAFTER = ("--only", "drafter")
ADVICE = ("likely causes", "a chat template", "far from demo", "another --drafter", "--mode ar")

Tune = Callable[..., Path]


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    """``tune(NEAR)``: the demo target under another name, its weights changed."""

    def make(noise: float, of: str = "demo") -> Path:
        folder = tmp_path / f"acme-{noise}"
        shutil.copytree(bundled.FOLDER / of / "target", folder)
        generator = torch.Generator().manual_seed(0)

        def changed(tensor: Tensor) -> Tensor:
            spread = float(tensor.float().std()) if tensor.numel() > 1 else 0.0
            return (tensor + noise * spread * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

        faults.change_tensors(folder, lambda tensors: {name: changed(each) for name, each in tensors.items()})
        return folder

    return make


@pytest.fixture
def one_prompt(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    """A drafter that is so far off is found by any prompt."""
    monkeypatch.setattr(text, "PROMPTS", 1)


def test_a_fine_tune_finds_its_drafter_and_is_probed_at_its_first_use(cli: Cli, tune: Tune, own_home: Path) -> None:  # noqa: F811
    folder = tune(NEAR)
    first = cli("run", str(folder), *RUN)
    assert first.code == 0 and "has the architecture of demo" in first.err and " a step · " in first.err
    assert "no drafts" not in first.err and len(kept(own_home)) == 1
    probed = cli("check", str(folder), *DRAFTER, "--no-fit-check")
    assert probed.code == 0 and probed.out.startswith("serves: acceptance length ") and len(kept(own_home)) == 1
    assert all(kind in probed.out for kind in ("code", "counting", "spelling"))


def test_a_drafter_that_does_not_serve_is_refused_with_advice(
    cli: Cli,  # noqa: F811
    tune: Tune,
    own_home: Path,
    one_prompt: None,
) -> None:
    folder = tune(FAR)
    for _ in range(2):  # found at the first use, remembered at the second, which loads no drafter
        used = cli("run", str(folder), *RUN)
        assert used.code == 0 and used.out.strip() and "acceptance length" not in used.err.splitlines()[-1]
        (line,) = [line for line in used.err.splitlines() if line.startswith("warning")]
        assert f"the drafter of demo does not serve {folder}" in line and all(word in line for word in ADVICE), line
        assert len(kept(own_home)) == 1
    probed = cli("check", str(folder), *DRAFTER, "--no-fit-check")
    assert probed.code == 6 and "does not serve" in probed.out and all(word in probed.err for word in ADVICE)
    assert cli("check", str(folder), *DRAFTER, "--no-fit-check", "--json").json["verdict"] == "does not serve"


def test_the_users_own_word_is_kept(cli: Cli, tune: Tune, own_home: Path) -> None:  # noqa: F811
    folder, drafter = tune(FAR), str(bundled.FOLDER / "demo" / "drafter")
    for options in (("--drafter", drafter), ("--mode", "ar"), ("--skip-check",)):
        used = cli("run", str(folder), *RUN, *options)
        assert used.code == 0 and "no drafts" not in used.err and not kept(own_home)


def test_a_refused_session_says_that_it_does_not_draft(tune: Tune, one_prompt: None) -> None:
    user, config = settings.load(), LoadConfig(fit_check=False)
    pair = resolve(str(tune(FAR)), None, user, lambda _: None)
    for _ in range(2):
        notices: list[Notice | LoadProgress] = []
        session = loading.open_stepwise(pair, config, user, notices.append)
        facts = session.facts
        assert facts.drafter is None and not facts.load.draft and [each.state for each in facts.checks] == ["failed"]
        assert [notice for notice in facts.notices if "drafter" in notice] == [facts.notices[-1]]
        assert [one.message for one in notices if isinstance(one, Notice)] == [facts.notices[-1]]
        assert not session.drafts
        session.close()


def test_a_full_check_probes_a_fine_tune_once(tune: Tune, monkeypatch: pytest.MonkeyPatch, one_prompt: None) -> None:
    """As on a card, where the first load checks everything."""
    monkeypatch.setattr(loading, "CHECKED_DEVICE", "cpu")
    user, config = settings.load(), LoadConfig(fit_check=False)
    pair = resolve(str(tune(FAR)), None, user, lambda _: None)
    for drafted in (True, False):
        session = loading.open_stepwise(pair, config, user, lambda _: None)
        (drafter,) = [each for each in session.facts.checks if each.subject == "drafter"]
        assert drafter.state == "failed" and len(session.facts.checks) > 2
        assert (session.runner.proposer is not None) is drafted
        session.close()


def kept(home: Path) -> list[Path]:
    """What is remembered of checks."""
    folder = home / ".cache" / "dflash-local" / "checks"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_speed_up_is_predicted_of_measured_costs(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = bundled.find("demo")
    written = drafting.reply_lengths(demo, text.prompts_of(pair), drafting.SECONDS)
    monkeypatch.setattr(drafting, "reply_lengths", lambda *_: written)
    for cycle, state, speed_up in ((2.0, "ok", 7.76 / 2), (8.0, "warning", 7.76 / 8), (None, "ok", None)):
        demo.runner.costs = {} if cycle is None else {1: 1.0, 8: cycle}  # type: ignore[misc]
        found = drafting.probe(demo, pair)
        assert found.state == state and found.figures["speed_up"] == pytest.approx(speed_up, abs=0.01)
        assert found.figures["cycle_ms"] == cycle and found.figures["prompts"] == 5


def test_a_slow_machine_probes_fewer_prompts(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "SECONDS", -1.0)
    found = drafting.probe(demo, bundled.find("demo"))
    assert found.state == "ok" and found.figures["prompts"] == 1 and "over 1 prompt, " in found.text


def test_a_weak_drafter_keeps_its_exit_code(cli: Cli, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    row = replace(resolve(str(tune(NEAR)), None, settings.load(), lambda _: None), acceptance_band=7.99)
    monkeypatch.setattr("dflash_local.cli.invocation.Invocation.pair", lambda *_: row)
    weak = cli("check", str(row.target), *DRAFTER, "--no-fit-check")
    assert weak.code == 0 and weak.out.startswith("serves weakly: ") and "likely causes" in weak.out


def test_nothing_is_probed_without_a_drafter(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    shutil.copytree(bundled.FOLDER / "demo" / "target", tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"rope_theta": 10000.0', '"rope_theta": 5000.0'))
    none = cli("check", str(tmp_path / "other"), *DRAFTER)
    assert none.code == 2 and "no drafter is known" in none.err
    plain = cli("check", "demo", *DRAFTER, "--mode", "ar")
    assert plain.code == 2 and plain.err.startswith("error: --mode ar loads no drafter")
    pair = Pair("a", tmp_path / "other", None, bundled=False)
    session = load(pair, LoadConfig(device="cpu", draft=False))
    assert drafting.probe(session, pair).state == "skipped"
    session.close()
