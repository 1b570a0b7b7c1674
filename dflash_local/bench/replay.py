"""A written text once more, teacher-forced: logits row by row, and in the groups DFlash verified it in.

Both passes start cold and use the session's own target, so they are what AR and DFlash computed.
Leaves the caches dirty: the caller resets the session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dflash_local.bench.trial import CycleShape
from dflash_local.engine.runner import Target


@torch.inference_mode()
def single_rows(target: Target, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] on the CPU, row i of which chose (or would choose) token i of ``text``: AR's way."""
    rows = [_prefill(target, prompt).cpu()]
    for token in text[:-1]:
        out = target.verify(torch.tensor([token], device=target.device), False)
        rows.append(target.head(out.hidden).cpu())
        target.commit(1)
    return torch.cat(rows)


@torch.inference_mode()
def block_rows(
    target: Target, prompt: Sequence[int], text: Sequence[int], cycles: Sequence[CycleShape]
) -> Iterator[torch.Tensor]:
    """Logits of the same tokens DFlash's way, [k, V] at a time on the device.

    Each verify has the rows its cycle had; in place of drafts that were rejected stand the tokens
    that followed, since the rows before them do not see them.
    """
    yield _prefill(target, prompt)
    at = 0  # index of the anchor in ``text``
    for cycle in cycles:
        ids = list(text[at : at + cycle.rows])
        ids += ids[-1:] * (cycle.rows - len(ids))
        out = target.verify(torch.tensor(ids, device=target.device), False)
        yield target.head(out.hidden)[: cycle.emitted]
        target.commit(cycle.emitted)
        at += cycle.emitted


def _prefill(target: Target, prompt: Sequence[int]) -> torch.Tensor:
    """Logits [1, V] after the prompt, processed in the runner's chunks."""
    target.clear()
    ids = torch.tensor(list(prompt), device=target.device)
    for chunk in ids.split(target.prefill_chunk):
        out = target.prefill(chunk, False)
    return target.head(out.hidden[-1:])
