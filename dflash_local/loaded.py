"""What is loaded, in the one form that the engine, the service, the endpoint, screens and reports share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.events import Finished, Stats, Usage
from dflash_local.request import Request


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A loaded pair.

    Attributes:
        target, drafter: the name of a bundled pair or a folder; no drafter is None.
        engine: fused or reference. dtype: of the weights, or how they are quantised. block_size: the trained one.
        context: tokens that the session may hold. notices: of the load.
        acceptance_band: a mean acceptance length under this is worth a warning.
        exact: a row's logits are the same in every bit with and without drafting.
        draft_side: what drafts are computed with; it changes no reply. kv_cache: auto is the dtype's own, or fp8.
    """

    target: str
    drafter: str | None
    engine: str
    dtype: str
    device: str
    block_size: int
    context: int
    has_tokenizer: bool
    notices: tuple[str, ...] = ()
    acceptance_band: float | None = None
    exact: bool = False
    draft_side: str = "full"
    kv_cache: str = "auto"


def nothing_done(facts: SessionFacts, request: Request) -> Finished:
    """The end of a request that was cancelled before its reply began."""
    stats = Stats(
        acceptance_lengths=(),
        acceptance_per_position=(),
        mean_acceptance_length=None,
        turn_acceptance_length=None,
        tokens_per_s=0.0,
        end_to_end_tokens_per_s=0.0,
        ttft_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        draft_s=0.0,
        verify_s=0.0,
        other_s=0.0,
        engine=facts.engine,
        mode=request.mode,
        block_size=request.block_size or facts.block_size,
        seed=request.sampling.seed or 0,
    )
    return Finished("cancelled", Usage(0, 0), stats)
