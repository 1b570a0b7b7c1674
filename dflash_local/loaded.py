"""What is loaded, in the one form that the engine, the service, the endpoint, screens and reports share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


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
