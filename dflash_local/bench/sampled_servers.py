"""Sampled replies of a drafting server and of a plain one, for ``next_tokens`` to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_local.bench.next_tokens import DEPTH, TOP_P, Prefix, SampledFinding, judge
from dflash_local.bench.report import Progress
from dflash_local.errors import Interrupted
from dflash_local.events import Mode, TokenLogprob
from dflash_local.request import MAX_TOP_LOGPROBS, Limits, Request, SamplingParams

if TYPE_CHECKING:
    from dflash_local.remote.openai_server import OpenAIServer, ServerAnswer

AT_ONCE = 8  # requests under way
CONTROLS = 2  # one plain reply to so many drafted ones


def compare_sampled(
    servers: tuple[OpenAIServer, OpenAIServer],
    requests: Sequence[Request],
    samples: int,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> SampledFinding:
    """Ask both servers, the drafting one first, and judge.

    Args:
        samples: replies to each request. requests: their own sampling does not count.

    Raises:
        DFlashError: a request failed. Interrupted: cancelled.
    """
    counts: dict[Mode, int] = {"dflash": samples, "ar": max(1, samples // CONTROLS)}
    jobs = [
        (mode, number, place)
        for mode, count in counts.items()
        for place in range(count)
        for number in range(len(requests))
    ]
    drafted: list[tuple[int, Prefix]] = []
    plain: list[tuple[int, Prefix]] = []
    rows: dict[Prefix, TokenLogprob] = {}

    def ask(job: tuple[Mode, int, int]) -> ServerAnswer:
        mode, number, place = job
        # A seed may draw alike at every prompt: each reply has one of its own, or prompts would not be independent.
        seed = 2 * (place * len(requests) + number) + (mode == "ar")
        if cancelled():
            raise Interrupted("interrupted")
        request = replace(
            requests[number],
            mode=mode,
            sampling=SamplingParams(temperature=1.0, top_p=TOP_P, seed=seed),
            limits=Limits(DEPTH),
            return_token_ids=True,
            logprobs=MAX_TOP_LOGPROBS if mode == "ar" else None,
        )
        return servers[mode == "ar"].answer(request, cancelled, all_tokens=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done, (job, answer) in enumerate(zip(jobs, pool.map(ask, jobs))):
            mode, number, _ = job
            progress(f"sampled reply {done + 1} of {len(jobs)}", done / len(jobs))
            if mode == "dflash":
                drafted.append((number, answer.token_ids))
                continue
            plain.append((number, answer.token_ids))
            for at, row in enumerate(answer.logprobs):
                rows.setdefault((number, *answer.token_ids[:at]), row)
    return judge(drafted, plain, rows)
