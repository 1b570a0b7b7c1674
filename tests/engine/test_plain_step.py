"""The plain step that a speed-up is counted against: measured at load, then of plain replies of the same load alone."""

from __future__ import annotations

import pytest

from dflash_local.app.reply_text import headline
from dflash_local.catalog import bundled
from dflash_local.engine import load
from dflash_local.engine.costs import CPU_AT
from dflash_local.engine.reply_figures import LEAST_PLAIN
from dflash_local.events import Finished, Mode
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, SamplingParams, user_request

AT_LOAD, GREEDY = "measured at load over 64 tokens", SamplingParams()


def test_it_is_of_the_load_until_a_plain_reply_of_the_same_kind_tells_it() -> None:
    session = load(bundled.find("demo"), LoadConfig(dtype="float32", device="cpu", engine="reference"))

    def reply(mode: Mode, sampling: SamplingParams = GREEDY, new: int = 2 * LEAST_PLAIN) -> Finished:
        request = user_request("Count from 3 to 17.", mode=mode, sampling=sampling, limits=Limits(new))
        *_, finished = session.generate(request)
        assert isinstance(finished, Finished)
        return finished

    first = reply("dflash")
    assert first.stats.plain_from == AT_LOAD and first.stats.plain_step_s == session.runner.plain.seconds  # type: ignore[union-attr]
    up = first.stats.tokens_per_s * session.runner.plain.seconds  # type: ignore[union-attr]
    assert f" · {up:.1f}x · " in headline(first)
    assert reply("ar", new=LEAST_PLAIN).stats.plain_from == AT_LOAD, "its first token is no step"
    plain = reply("ar")
    spans = f"of the last plain reply, {2 * LEAST_PLAIN - 1} steps"
    assert plain.stats.plain_from == spans and " · plain · " in headline(plain)
    after = reply("dflash")
    assert (after.stats.plain_from, after.stats.plain_step_s) == (spans, plain.stats.plain_step_s)
    assert reply("dflash", SamplingParams(seed=4)).stats.plain_from == spans
    assert reply("dflash", SamplingParams(temperature=1.0)).stats.plain_from == AT_LOAD


@pytest.mark.parametrize("context", [24, 40, CPU_AT])
def test_without_room_for_a_measurement_the_ratio_is_left_out(context: int) -> None:
    session = load(bundled.find("demo"), LoadConfig(dtype="float32", device="cpu", engine="reference", context=context))
    assert not session.runner.costs
    *_, finished = session.generate(user_request("Count from 3 to 7.", limits=Limits(8)))
    assert isinstance(finished, Finished)
    assert finished.stats.plain_step_s is None and "x · " not in headline(finished)
