"""The Bench tab: rows as they come, totals, plots, stopping; and the arithmetic behind it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dflash_local.bench.prompts import Prompt
from dflash_local.errors import EngineError, Interrupted, UsageError
from dflash_local.events import Finished, Piece, Step, Usage
from dflash_local.service.backend import Model
from dflash_local.service.race import Lane, Race
from dflash_local.service.service import Service
from tests.service.scripted import STATS, ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import saved, visiting

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from dflash_local.ui.web.bench_run import BenchRow

PROMPTS = (Prompt("greeting", "Say <b>hello</b>."), Prompt("ids", ids=(1, 2, 3)))


def plotted(page: Page, plot: str, least: int) -> list[str]:
    """What a plot tells of its marks to those who do not see it, once it has so many."""
    marks = page.locator(f"#{plot} svg .mark-rect [aria-label], #{plot} svg .mark-line [aria-label]")
    marks.nth(least - 1).wait_for(state="attached")  # a bar of no height is not visible
    return [str(label) for label in marks.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")]


def test_a_run_fills_the_table_and_the_plots_and_stops_within_a_cycle(visitor: Visitor) -> None:
    gate = threading.Event()
    gate.set()
    begun: list[int] = []

    def halt(_index: int) -> None:
        begun.append(1)
        if len(begun) == 24 + 13:  # 3 steps x 4 replies of both prompts, then of the first one, are done
            gate.clear()

    session = ScriptedSession(gate=gate, on_step=halt)
    with visiting(visitor, "Bench", session, change=lambda served: setattr(served, "prompts", PROMPTS)) as (here, page):
        page.locator("#df-run").click()
        check_run(page)
        page.locator("#df-run:enabled").click()
        page.locator("#df-bench-status").get_by_text("prompt 2 of 2").wait_for()
        assert page.locator("#df-run").is_disabled()
        page.locator("#df-stop").click()
        page.locator("#df-bench-status").get_by_text("the bench was stopped").wait_for()
        assert page.locator("#df-bench-table tbody tr").count() == 1
        assert len(saved(page.locator("#df-bench-file a"))[1]["prompts"]) == 1
        assert here.service.status.running == 0
        gate.set()
        page.locator("#df-run:enabled").click()
        page.locator("#df-bench-status").get_by_text("Measured here").wait_for()


def check_run(page: Page) -> None:
    _, content = saved(page.locator("#df-bench-file a"))
    rows = page.locator("#df-bench-table tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [
        ["1", "greeting", "60.0", "120.0", "2.00x", "2.50", "yes"],
        ["2", "ids", "60.0", "120.0", "2.00x", "2.50", "yes"],
    ]
    assert page.locator("#df-bench-table tfoot").inner_text().split() == "all 50.0 100.0 2.00x 2.50 2 of 2".split()
    assert "Measured here, in this run" in page.locator("#df-bench-status").inner_text()
    assert content["totals"]["identical"] == 2 and content["pair"] == "scripted" and content["versions"]
    assert content["prompts"][1]["dflash"]["token_ids"] == [10, 11, 12, 13, 14, 15]
    positions = plotted(page, "df-plot-positions", 3)
    assert [label.partition(";")[0] for label in positions] == ["draft slot: 1", "draft slot: 2", "draft slot: 3"]
    assert "share of blocks: 50%" in positions[1]
    speeds = plotted(page, "df-plot-prompts", 4)
    assert len(speeds) == 4 and "mode: drafted" in speeds[1] and "tok/s: 120" in speeds[1]
    assert {label.rpartition(": ")[2] for label in plotted(page, "df-plot-time", 2)} == {"plain", "drafted"}


def lane(mode: Any, *steps: tuple[int, float], seconds: float = 1.0, lengths: tuple[int, ...] = ()) -> Lane:
    """A reply of (tokens, time) steps."""
    made = tuple(Step((Piece("x"),), (7,) * count, 0, 0, 1, at) for count, at in steps)
    stats = replace(STATS, mode=mode, decode_s=seconds, acceptance_lengths=lengths, acceptance_per_position=(1.0, 0.5))
    return Lane(mode, made, Finished("stop", Usage(1, sum(count for count, _ in steps)), stats))


def row(*lengths: int) -> BenchRow:
    from dflash_local.ui.web.bench_run import BenchRow

    ar = lane("ar", (1, 0.1), (1, 0.6), (1, 1.1), seconds=1.0)
    dflash = lane("dflash", (1, 0.1), (2, 0.6), seconds=0.5, lengths=lengths)
    return BenchRow(Prompt("kind", "text"), Race(1, ar, dflash))


def test_totals_are_of_all_tokens_and_all_cycles() -> None:
    from dflash_local.ui.web.bench_run import per_position, totals

    sums = totals([row(2), row(4, 6)])
    assert (sums.ar, sums.dflash, sums.ratio) == (2.0, 4.0, 2.0)
    assert sums.acceptance == 4.0 and sums.identical == 2
    assert per_position([row(2), row(4, 6)]) == [(1, 1.0), (2, 0.5)]
    assert totals([]).ratio is None


def of_servers(row: BenchRow) -> BenchRow:
    """The row as of servers that name no tokens and tell of a reply's cycles only the sums."""

    def unnamed(lane: Lane) -> Lane:
        lengths = lane.finished.stats.acceptance_lengths
        counts = (len(lengths), 7 * len(lengths), sum(lengths) - len(lengths)) if lengths else None
        stats = replace(lane.finished.stats, acceptance_lengths=(), draft_counts=counts)
        steps = tuple(replace(step, token_ids=()) for step in lane.steps)
        return Lane(lane.mode, steps, replace(lane.finished, stats=stats))

    return replace(row, race=replace(row.race, ar=unnamed(row.race.ar), dflash=unnamed(row.race.dflash)))


def test_totals_over_servers_are_of_what_they_count() -> None:
    from dflash_local.ui.web.bench_run import over_time, per_position, totals

    rows = [of_servers(row(2)), of_servers(row(4, 6))]
    assert totals(rows) == totals([row(2), row(4, 6)])
    assert per_position(rows) == [(1, 1.0), (2, 0.5)] and over_time(rows[0]) == []
    silent = totals([of_servers(row())])
    assert silent.acceptance is None and silent.dflash == 4.0


def test_what_is_not_known_of_a_row_is_a_dash() -> None:
    from dflash_local.ui.web.bench_run import BenchRow, totals

    def short(mode: Any) -> Lane:
        one = lane(mode, (1, 0.1))
        return replace(one, finished=replace(one.finished, stats=replace(one.finished.stats, tokens_per_s=0.0)))

    rows = [BenchRow(Prompt("kind", "text"), Race(1, short("ar"), short("dflash")))]
    assert rows[0].cells(1)[1:4] == totals(rows).cells[1:4] == ("-", "-", "-")
    assert totals(rows).ratio is None


def test_a_curve_holds_the_rate_between_steps() -> None:
    from dflash_local.ui.web.bench_run import over_time

    points = over_time(row(2))
    ar = [(at, rate) for at, name, rate in points if name == "plain"]
    dflash = [(at, rate) for at, name, rate in points if name == "drafted"]
    assert ar[-1][0] == 1.1 and dflash[-1][0] == 0.6
    assert all(rate == pytest.approx(2.0) for _, rate in ar) and all(rate == pytest.approx(4.0) for _, rate in dflash)


def test_a_run_tells_a_stop_from_a_pair_that_went_away() -> None:
    from dflash_local.ui.web.bench_run import BenchRun

    for stopped, kind in ((True, Interrupted), (False, EngineError)):
        service = Service(Model("scripted", lambda _progress: ScriptedSession(gate=threading.Event())), None, None)
        run = BenchRun(service, PROMPTS, 8)
        end = run.stop if stopped else service.unload

        def soon(service: Service = service, end: Any = end) -> None:
            while not service.status.running:
                time.sleep(0.002)
            end()

        threading.Thread(target=soon, daemon=True).start()
        with pytest.raises(kind):
            run.run()
        service.close()
    with pytest.raises(UsageError, match="max_tokens"):
        BenchRun(service, PROMPTS, 5000)
