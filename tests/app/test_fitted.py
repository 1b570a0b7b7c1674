"""What a load is given of the planner's: the context and the drafter precision that fit, where the user named none."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app.load_planning import fitted, planned_context
from dflash_local.catalog.bundled import Pair, find
from dflash_local.catalog.shapes import shape
from dflash_local.cli.console import Console
from dflash_local.config.read_model import read_model
from dflash_local.errors import DoesNotFitError, DriverError, UsageError
from dflash_local.layout.cycle import PREFILL_CHUNK
from dflash_local.load_config import LoadConfig
from dflash_local.planner import hardware, machine
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import plan
from tests.drafter_configs import decoder_of_shape

MIB = 2**20
NOBODY = settings.load({})


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """The configurations of a pair, without weights."""
    for part, repo in (("target", "Qwen/Qwen3-8B"), ("drafter", "z-lab/Qwen3-8B-DFlash-b16")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(shape(repo)))
    return Pair("pair", tmp_path / "target", tmp_path / "drafter", bundled=False)


def card(free: int) -> Machine:
    return Machine("a card", "cuda", 2 * free, free, "", "cuda:0")


def need(pair: Pair, config: LoadConfig) -> int:
    folders = [pair.target, *([pair.drafter] if pair.drafter else [])]
    target, drafter = (json.loads((folder / "config.json").read_text()) for folder in folders)
    known = read_model(target, "target")
    own = replace(config, prefill_chunk=PREFILL_CHUNK)  # there would be room for a larger one
    total = plan(known, decoder_of_shape(drafter, "drafter"), card(2**50), own).ledger.total
    assert total is not None
    return total


def ask(pair: Pair, config: LoadConfig, free: int, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadConfig, str]:
    """What is loaded on a card with so many bytes free, and what the user is told."""
    monkeypatch.setattr(machine, "this_machine", lambda *_args, **_named: card(free))
    told = io.StringIO()
    return fitted(pair, config, NOBODY, Console({}, err=told).notify), told.getvalue()


def test_all_of_it_where_there_is_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(pair, LoadConfig(), 2**40, monkeypatch) == (LoadConfig(context=40960, prefill_chunk=8192), "")


def test_the_context_that_fits_in_one_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    config, told = ask(pair, LoadConfig(), need(pair, LoadConfig(context=32768)), monkeypatch)
    assert config == LoadConfig(context=32768) and told.count("\n") == 1 and "32,768 of 40,960" in told


def test_the_drafter_precision_that_fits_in_one_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LoadConfig(context=20000, offload="none")
    short = need(pair, asked) - MIB
    config, told = ask(pair, asked, short, monkeypatch)
    assert (
        config == replace(asked, drafter_precision="8bit", prefill_chunk=4096)  # for which that makes room as well
        and told.count("\n") == 1
        and "drafter precision 8bit" in told
    )
    rounded, told = ask(pair, replace(asked, drafter_precision="full"), short, monkeypatch)
    assert rounded.quantize and rounded.context == 20000 and "rounded at load (" in told
    with pytest.raises(DoesNotFitError):
        ask(pair, replace(asked, quantize="int8"), short // 2, monkeypatch)
    assert ask(pair, replace(asked, drafter_precision="full", fit_check=False), short, monkeypatch)[1] == ""


def test_what_lies_in_host_memory_in_one_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LoadConfig(context=20000, drafter_precision="full")
    config, told = ask(pair, asked, need(pair, asked) - MIB, monkeypatch)
    assert config == replace(asked, offload="embedding", prefill_chunk=8192) and told.count("\n") == 1
    assert "in host memory: embedding (1.16 GiB)" in told


def test_all_of_it_where_little_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    config, told = ask(pair, LoadConfig(), need(pair, LoadConfig(context=2048)), monkeypatch)
    assert config == LoadConfig(context=config.context, drafter_precision="8bit-drafter", offload="embedding")
    assert told.count("\n") == 3 and 8192 < (config.context or 0) < 32_768


def test_main_memory_that_other_programs_have_is_told_and_weights_that_find_no_room_are_not_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(free_now: int) -> tuple[LoadConfig, str]:
        where = Machine("CPU", "cpu", 2**40, 2**40, "", "cpu", free_now=free_now)
        monkeypatch.setattr(machine, "this_machine", lambda *_args, **_named: where)
        told = io.StringIO()
        return fitted(pair, LoadConfig(), NOBODY, Console({}, err=told).notify), told.getvalue()

    assert load(2**40) == (LoadConfig(context=40960), "")
    found, told = load(45 * 2**30)
    assert found == LoadConfig(context=40960) and "45.0 GiB of main memory is free right now" in told
    with pytest.raises(DoesNotFitError, match="close other programs first"):
        load(20 * 2**30)


def test_the_context_is_known_before_the_load(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    free = need(pair, LoadConfig(context=16384))
    for config, room in ((LoadConfig(), free), (LoadConfig(), 2**40), (LoadConfig(context=1000), 2**40)):
        monkeypatch.setattr(machine, "this_machine", lambda *_args, room=room, **_named: card(room))
        loaded = ask(pair, config, room, monkeypatch)[0].context
        assert planned_context(pair, config, NOBODY) == (loaded or 40960)
    assert planned_context(pair, LoadConfig(fit_check=False), NOBODY) == 40960
    assert planned_context(replace(pair, target=pair.target / "none"), LoadConfig(), NOBODY) is None
    assert planned_context(find("demo"), LoadConfig(), NOBODY) == 2048


def test_what_the_load_will_refuse_leaves_the_context_unknown(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_args: object, **_named: object) -> Machine:
        raise UsageError("there is no such device")

    monkeypatch.setattr(machine, "this_machine", none_here)
    assert planned_context(pair, LoadConfig(device="cuda:9"), NOBODY) is None


@pytest.mark.parametrize("fit_check", [True, False])
def test_a_card_that_torch_cannot_use_ends_the_load_before_it_begins(
    pair: Pair, fit_check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: hardware.Driver("470.10", ("NVIDIA T4",)))
    monkeypatch.setattr(hardware, "probe_torch", lambda: hardware.TorchFacts("2.13.0", cuda="13.0"))
    with pytest.raises(DriverError, match="driver 470.10 is too old"):
        fitted(pair, LoadConfig(fit_check=fit_check), NOBODY, Console({}).notify)
    on_cpu = LoadConfig(device="cpu", fit_check=False)
    assert fitted(pair, on_cpu, NOBODY, Console({}).notify) == on_cpu
