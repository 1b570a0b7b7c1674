"""Takes the device memory of a session's largest steps once, when it is loaded: nothing may run out in mid-chat.

The caches stand already. What steps need beside them is torch's allocator's to keep once it has been held.
"""

from __future__ import annotations

import torch

from dflash_local.engine.fused import FusedRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import KEPT_SNAPSHOTS
from dflash_local.request import SamplingParams

SNAPSHOTS = KEPT_SNAPSHOTS + 1  # one more lives while the oldest is being replaced
EVERYTHING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=0)


@torch.inference_mode()
def reserve(runner: FusedRunner) -> None:
    """Run a full prompt chunk, keep its snapshots and choose a block with every filter; then forget it all.

    Raises:
        torch.OutOfMemoryError: the planned context does not fit.
    """
    if runner.target.device.type != "cuda":
        return
    ids = [0] * min(
        2 * runner.target.prefill_chunk, runner.context
    )  # of two chunks the first one's taps live on for a while
    prompt = torch.zeros(len(ids), dtype=torch.long, device=runner.target.device)
    sampler = Sampler(EVERYTHING, 0, runner.target.vocab_size, prompt)
    runner.begin(sampler, frozenset(), runner.target.rows, runner.proposer is not None)
    for _ in runner.prefill(ids, 0):
        pass
    kept = [runner.target.snapshot() for _ in range(SNAPSHOTS)]
    logits = runner.target.logits.zero_()
    noise = sampler.noise(len(ids), len(logits))
    sampler.choose(logits, runner.progress.tokens[1:], noise)
    del kept, noise
    runner.restart(0, None)
