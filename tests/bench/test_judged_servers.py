"""Faults planted in a scripted server: each is named, and a sound one raises none. By HTTP, as of a real server."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from dflash_local.app.two_servers import TwoServers
from dflash_local.bench import certify_servers
from dflash_local.bench.certificate import Run
from dflash_local.bench.next_tokens import SampledFinding
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.sampled_servers import compare_sampled
from dflash_local.errors import DFlashError, ExactnessError
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.openai_server import attach
from dflash_local.remote.server_checks import WantedModel
from dflash_local.service.service import Service
from tests.remote.scripted_server import Fault, ScriptedServer, scripted

ROUNDING = 0.01  # of sound drafting: some greedy replies part at near-ties
TOKENS = 128
NAMES: dict[Fault, str] = {
    "swapped": "more than 0.5 by the plain server's log probabilities",
    "temperature": "sampled replies: the temperature is ignored",
    "top_p": "sampled replies: unlikely tokens never come: as with top-p 0.9 in place of 0.95",
    "accepts": "sampled replies: tokens behind the first one, which may be drafts, come too often or too seldom",
    "unsteady": "the drafting server does not repeat itself",
}
SWAPPED_EARLY = 4  # the seed of a model that meets a swap within ten prompts
SAMPLED: tuple[Fault, ...] = ("temperature", "top_p", "accepts")


def judged(
    fault: Fault, seed: int, prompts: int = 0, samples: int = 0
) -> tuple[tuple[Run, ...], SampledFinding | None, DFlashError | None]:
    """What the judge says of a fault; of none, of a sound server."""
    chance = random.Random(seed)
    texts = ["".join(chance.choices("abcdefghijklmnop", k=8)) for _ in range(max(prompts, 2))]
    drafting = ScriptedServer(seed=str(seed), fault=fault, rounding=ROUNDING, chance=random.Random(seed))
    with scripted(drafting), scripted(ScriptedServer(seed=str(seed), drafts=False)) as plain:
        bodies = [drafting.requests, plain.requests]
        servers = {
            drafts: attach(endpoint(fake.url), WantedModel()) for drafts, fake in ((True, drafting), (False, plain))
        }
        sessions = TwoServers(lambda drafts, _cancelled: servers[drafts], in_turn=False)
        with Service.over(sessions) as service:
            asked = tuple(Prompt("given", text=text) for text in texts)
            comparison = certify_servers.ServerComparison(service, asked[:prompts], TOKENS, False)
            runs = comparison.run(lambda _line, _share: None)
            sampled = None
            if samples:
                comparison.prompts = asked[:2]
                sampled = compare_sampled(
                    sessions.servers, comparison.requests, samples, lambda _line, _share: None, lambda: False
                )
                seeds = [body["seed"] for body in chain(*bodies) if body.get("temperature") == 1.0]
                assert len(seeds) == len(set(seeds)) == 3 * samples, "replies of one seed may draw alike"
    return runs, sampled, certify_servers.failure(runs, sampled)


def named(fault: Fault, seed: int, samples: int = 800, prompts: int = 60) -> bool:
    """Whether a fault is called what it is."""
    how = {"samples": samples} if fault in SAMPLED else {"prompts": prompts if fault == "swapped" else 8}
    _, _, error = judged(fault, seed, **how)
    return isinstance(error, ExactnessError) and NAMES[fault] in error.message


def sound(seed: int, samples: int) -> bool:
    """Whether a sound server is let through."""
    runs, sampled, error = judged("", seed, prompts=8, samples=samples)
    assert sampled is not None and sampled.first.degrees and sampled.later.degrees, "the test itself tested something"
    return error is None and all(run.verdict in ("identical", "near-tie") for run in runs)


@pytest.mark.parametrize(
    ("fault", "seed"), [("swapped", SWAPPED_EARLY), ("unsteady", 1), ("temperature", 1), ("accepts", 1)]
)
def test_a_planted_fault_is_named(fault: Fault, seed: int) -> None:
    """The narrower top-p needs more replies: ``test_next_tokens`` has it without a server."""
    assert named(fault, seed, samples=150, prompts=10)


def test_a_sound_server_raises_no_alarm() -> None:
    assert sound(1, 100)


def test_a_server_that_accepts_nothing_is_not_called_judged() -> None:
    runs, _, _ = judged("", 1, prompts=1)
    assert certify_servers.statement(runs).endswith(
        "; the server accepted no draft, so nothing is known of its drafting"
    )


@pytest.mark.slow  # 20 runs of each fault and 100 without: half an hour
@pytest.mark.parametrize("fault", NAMES)
def test_a_planted_fault_is_named_every_time(fault: Fault) -> None:
    assert [seed for seed in range(20) if not named(fault, seed)] == []


@pytest.mark.slow
def test_a_sound_server_never_raises_an_alarm() -> None:
    assert [seed for seed in range(100) if not sound(seed, 400)] == []
