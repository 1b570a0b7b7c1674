"""What the replies of a server can hold, found by asking it: a few requests of some tokens each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.remote.openai_server import OpenAIServer, ServerAnswer
from dflash_local.request import Limits, Request, SamplingParams, user_request

QUESTION = "Name three animals."
SHORT, LONGER = 2, 8  # tokens


@dataclass(frozen=True, slots=True)
class Abilities:
    """Of a server.

    Attributes:
        token_ids: it names the tokens of a reply. logprobs: it tells the likeliest at each; None where only those
            of the plain server count. raw_prompts: it takes a prompt without the chat template.
        seeds: two sampled requests of one seed are equal.
    """

    token_ids: bool
    logprobs: bool | None
    raw_prompts: bool
    seeds: bool


def asked(server: OpenAIServer, plain: bool) -> Abilities:
    """Ask a server.

    Args:
        plain: it is asked for replies without drafts, and for log-probabilities.

    Raises:
        ServerError: it is gone.
    """
    program = server.facts.server
    mode: Mode = "ar" if plain else "dflash"
    told = _answer(server, _question(program.token_ids, mode, 2 if plain and program.logprobs else None))
    raw = _answer(server, Request(prompt="a", limits=Limits(1), mode=mode))
    warm = _question(False, mode, None)
    warm = replace(warm, limits=Limits(LONGER), sampling=SamplingParams(temperature=1.0, seed=1))
    twice = [_answer(server, warm) for _ in range(2)]
    return Abilities(
        token_ids=told is not None and bool(told.token_ids),
        logprobs=(told is not None and any(row.top for row in told.logprobs)) if plain else None,
        raw_prompts=raw is not None,
        seeds=twice[0] is not None and twice[1] is not None and twice[0].text == twice[1].text,
    )


def _question(names: bool, mode: Mode, logprobs: int | None) -> Request:
    asks = user_request(QUESTION, limits=Limits(SHORT))
    return replace(asks, mode=mode, return_token_ids=names, logprobs=logprobs)


def _answer(server: OpenAIServer, request: Request) -> ServerAnswer | None:
    try:
        return server.answer(request)
    except UsageError:  # it refuses what it cannot do
        return None
