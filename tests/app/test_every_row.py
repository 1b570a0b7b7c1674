"""Every pair of the registry has a plan or a reason, in every list and every answer."""

from __future__ import annotations

import pytest

from dflash_local import settings
from dflash_local.app import fitting, recommending
from dflash_local.app.models import registry
from dflash_local.app.resolve import choose, refuse_what_does_not_run
from dflash_local.catalog.registry import load
from dflash_local.errors import DFlashError
from dflash_local.planner.machine import named
from tests.cli.conftest import Cli

ROWS = load().rows
NOT_HERE = [row.name for row in ROWS if row.why_not_here]
OTHERS = [(row.name, one.repo) for row in ROWS for one in row.other_drafters]


@pytest.mark.parametrize("name", [row.name for row in ROWS if not row.why_not_here])
def test_what_runs_here_has_a_plan_on_every_card_that_fits_or_says_what_is_lacking(name: str) -> None:
    user = settings.load()
    choice = choose(name, None, user)
    refuse_what_does_not_run(choice)
    known = fitting.shapes(choice, None)
    assert known is not None and known.drafter is not None and not known.drafter_unknown
    for gib in (8, 24, 192):
        where = named(None, gib)
        found = recommending.recommended(choice, known, where, user)
        assert found.fitting or found.rest
        assert all(one.plan.fits and one.plan.context for one in found.fitting)
        assert all("GiB" in one.plan.reason or "MiB" in one.plan.reason for one in found.rest)
    assert found.best is not None, "192 GiB hold it"


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_does_not_run_here_says_so_in_a_line(cli: Cli, name: str) -> None:
    row = registry(settings.load()).find(name)
    assert row is not None
    with pytest.raises(DFlashError) as found:
        refuse_what_does_not_run(choose(name, None, settings.load()))
    error = found.value
    assert row.name in error.message and error.message.isprintable() and error.hint and error.exit_code in (4, 5)
    assert row.why_not_here in " ".join(cli("show", name, "--details").out.split())
    planned = cli("plan", name)
    answer = " ".join(planned.out.split())
    assert planned.code == 0 and f"{name}: on a server only" in answer and f"no: {row.why_not_here}" in answer
    assert cli("plan", name, "--json").json["reason"] == row.why_not_here
    ran = cli("run", name, "hi")
    assert ran.code == error.exit_code and f"error: {error.message}" in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize(("name", "repo"), OTHERS)
def test_another_drafter_is_refused_by_name_or_planned(cli: Cli, name: str, repo: str) -> None:
    choice = choose(repo, None, settings.load())
    assert choice.name == name and not choice.own_drafter and choice == choose(name, repo, settings.load())
    if choice.why_not_here:
        with pytest.raises(DFlashError) as found:
            refuse_what_does_not_run(choice)
        assert choice.why_not_here in found.value.message and found.value.exit_code == 5
        answer = " ".join(cli("plan", repo).out.split())
        assert f"{name} with {repo}: on a server only" in answer and f"no: {choice.why_not_here}" in answer
    else:
        refuse_what_does_not_run(choice)
        known = fitting.shapes(choice, None)
        assert known is not None and known.drafter is not None and not known.drafter_unknown
    assert cli("plan", repo.partition("/")[2], "--gpu-memory", "192").code == 0
    shown = " ".join(cli("show", name, "--details").out.split())
    assert "other drafters, by name or with --drafter" in shown and f"{repo}: kind" in shown


def test_a_published_quantised_drafter_is_planned_with_what_it_takes(cli: Cli) -> None:
    """Its codes are kept on the fused engine; on the other one it takes what the plain one takes."""
    drafter = ["--drafter", "syvai/Qwen3.8-27B-DFlash2-W4A16"]

    def weights(*more: str) -> tuple[int, str]:
        found = cli("plan", "Qwen3.8-27B", *more, "--gpu-memory", "96", "--json").json["plan"]
        (line,) = (line for line in found["ledger"]["lines"] if line["name"] == "drafter weights")
        assert found["draft"]
        return line["bytes"], line["note"]

    plain, coded = weights(), weights(*drafter)
    assert coded[1] == "int4 g128, as stored; the rest bfloat16" and 0.3 < coded[0] / plain[0] < 0.35
    decoded = weights(*drafter, "--engine", "reference")
    assert decoded == (weights("--engine", "reference")[0], "int4 g128 decoded to bfloat16")
    page = " ".join(cli("plan", "Qwen3.8-27B", *drafter, "--gpu-memory", "24", "--details").out.split())
    assert f"take them with: dflash chat Qwen/Qwen3.8-27B {' '.join(drafter)} --variant pack-quantized-int4" in page
    shown = " ".join(cli("show", "Qwen3.8-27B", "--details").out.split())
    assert "syvai/Qwen3.8-27B-DFlash2-W4A16: kind dflash2, licence unknown, the same drafter in int4" in shown
