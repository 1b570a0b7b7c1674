"""What is to be loaded, as far as its memory depends on it. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.load_config import DRAFTER_PRECISIONS, OFFLOADS, DrafterPrecision, LoadConfig, Offloaded
from dflash_local.planner import formats

# A session keeps two snapshots of a recurrent state; a third lives while the oldest is being replaced.
SNAPSHOTS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Holds what is loaded and how full it gets: dtype, tokens in the context, block size.

    Attributes:
        bitsandbytes: the format that it makes of the weights; what this program makes of them is the model's.
        device: cuda, mps or cpu. snapshots: of a recurrent state that are alive at once.
        exact, drafter_precision, kv_cache, offloaded: of the fused engine alone, see ``LoadConfig``.
    """

    dtype: str
    bitsandbytes: str | None
    context: int
    block: int
    device: str = "cuda"
    snapshots: int = SNAPSHOTS
    exact: bool = False
    drafter_precision: DrafterPrecision = DrafterPrecision()
    kv_cache: str = "auto"
    offloaded: tuple[Offloaded, ...] = ()
    prefill_chunk: int | None = None

    @classmethod
    def of(cls, kind: str, config: LoadConfig, context: int, block: int) -> Load:
        """Return what a configuration loads on a kind of machine.

        The drafter precision ``auto`` may try coarser ones where there is room, so it counts as full.
        """
        return cls(
            dtype=formats.resolved_dtype(config.dtype, kind),
            bitsandbytes=config.bitsandbytes,
            context=context,
            block=block,
            device=kind if kind in ("cpu", "mps") else "cuda",
            exact=config.exact,
            drafter_precision=DRAFTER_PRECISIONS.get(config.drafter_precision, DrafterPrecision()),
            kv_cache=config.kv_cache,
            offloaded=OFFLOADS.get(config.offload, ()) if kind not in ("cpu", "mps") else (),
            prefill_chunk=config.prefill_chunk,
        )
