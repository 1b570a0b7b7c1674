"""The end of a cycle on the device: how many drafts were right, what is emitted, where the next cycle begins.

The host reads a record per cycle when it likes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.kernels.jit import jit, overlapping, power_of_two, runs_kernels, tl, wait_for_earlier_kernels
from dflash_local.layout.cycle import MAX_STOP_IDS, RECORD_HEADER

NOT_FINITE = -1  # ids emitted, when a row's logits were not finite


@dataclass(frozen=True, slots=True)
class Progress:
    """Hold what a sequence on the device is at. All int32 but the ids.

    Attributes:
        start: [1], committed tokens: the anchor's position. limit: [1], the start that ends the sequence.
        done: [1], 1 when nothing more is to be emitted. kept: [1], rows that the last cycle committed.
        cycle: [1], cycles so far. tokens: [rows] int64, the anchor and the drafts behind it. chosen: [rows] int64,
            the target's choice after each. stops: [MAX_STOP_IDS], stop ids, -1 for none.
        margins: [rows] float32, of the drafts, see ``kernels.choose``.
        record_ring: [cycles, RECORD_HEADER + 2 rows], the records of the last cycles: ids, then bits of margins.
    """

    start: torch.Tensor
    limit: torch.Tensor
    done: torch.Tensor
    kept: torch.Tensor
    cycle: torch.Tensor
    tokens: torch.Tensor
    chosen: torch.Tensor
    stops: torch.Tensor
    margins: torch.Tensor
    record_ring: torch.Tensor

    @classmethod
    def over(
        cls,
        start: torch.Tensor,
        kept: torch.Tensor,
        cycle: torch.Tensor,
        tokens: torch.Tensor,
        buffers: tuple[torch.Tensor, ...],
    ) -> Progress:
        """Begin. ``start`` to ``tokens``: the target's own. ``buffers``: of ``progress_buffers``, zeroed."""
        limit, done, chosen, stops, margins, records = buffers
        limit.fill_(2**31 - 1)
        stops.fill_(-1)
        return cls(start, limit, done, kept, cycle, tokens, chosen, stops, margins, records)


def accept(progress: Progress, rows: int) -> None:
    """Close a cycle of ``rows`` rows: write its record (ids up to a stop id), move on, at most to the limit. A cycle
    after the end (``done``) emits nothing and moves nothing.
    """
    if not runs_kernels(progress.tokens):
        return accept_reference(progress, rows)
    _accept_kernel[(1,)](
        progress.start, progress.limit, progress.done, progress.kept, progress.cycle, progress.tokens, progress.chosen,
        progress.stops, progress.margins, progress.record_ring, rows, len(progress.margins),
        *progress.record_ring.shape, power_of_two(len(progress.margins)), MAX_STOP_IDS, RECORD_HEADER, num_warps=1,
        **overlapping(progress.tokens),
    )  # fmt: skip


def accept_reference(progress: Progress, rows: int) -> None:
    """Close a cycle in plain PyTorch, through the host."""
    chosen = progress.chosen[:rows].tolist()
    drafts = progress.tokens[1:rows].tolist()
    record = progress.record_ring[int(progress.cycle) % progress.record_ring.shape[0]]
    accepted = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
    emitted = chosen[: accepted + 1]
    stops = set(progress.stops.tolist()) - {-1}
    cut = next((i + 1 for i, token in enumerate(emitted) if token in stops), None)
    count = len(emitted) if cut is None else cut
    if int(progress.done):
        count = 0
    elif min(chosen) < 0:
        count = NOT_FINITE
    record[:RECORD_HEADER] = torch.tensor([int(progress.cycle), count, accepted, rows], dtype=torch.int32)
    record[RECORD_HEADER : RECORD_HEADER + rows] = progress.chosen[:rows].to(torch.int32)
    record[RECORD_HEADER + len(progress.margins) :] = progress.margins.view(torch.int32)
    progress.cycle.add_(1)
    moved = min(max(count, 0), max(int(progress.limit) - int(progress.start), 0))
    progress.kept.fill_(moved)
    progress.start.add_(moved)
    if moved:
        progress.tokens[0] = chosen[moved - 1]
    if cut is not None or count == NOT_FINITE or int(progress.start) >= int(progress.limit):
        progress.done.fill_(1)


# fmt: off
@jit
def _accept_kernel(
    start, limit, done, kept, cycle, tokens, chosen, stops, margins, record_ring, rows, most_rows, cycles, record_words,
    ROWS: tl.constexpr, STOPS: tl.constexpr, RECORD_HEADER: tl.constexpr,
):
    # fmt: on
    # One program does it all: the block's rows and the stop ids are in registers.
    wait_for_earlier_kernels()
    row = tl.arange(0, ROWS)
    inside = row < rows
    ids = tl.load(chosen + row, mask=inside, other=0)
    draft = tl.load(tokens + row + 1, mask=row + 1 < rows, other=-7)  # equals no id: ends every match
    accepted = tl.min(tl.where(inside & (draft != ids), row, ROWS), 0)
    stop = tl.load(stops + tl.arange(0, STOPS))
    hit = tl.max((ids[:, None] == stop[None, :].to(tl.int64)).to(tl.int32), 1)
    at_stop = tl.min(tl.where(inside & (row <= accepted) & (hit == 1) & (ids >= 0), row, ROWS), 0)
    bad = tl.max(tl.where(inside & (ids < 0), 1, 0), 0)
    ended = tl.load(done)
    at = tl.load(start)
    most = tl.load(limit)
    count = tl.minimum(accepted, at_stop) + 1
    count = tl.where(bad == 1, -1, count)
    count = tl.where(ended != 0, 0, count)  # last: what was launched behind the end says nothing, whatever it computed
    number = tl.load(cycle)
    record = record_ring + (number % cycles) * record_words
    tl.store(record, number)
    tl.store(record + 1, count)
    tl.store(record + 2, accepted)
    tl.store(record + 3, rows)
    tl.store(record + RECORD_HEADER + row, ids.to(tl.int32), mask=inside)
    margin = tl.load(margins + row, mask=row < most_rows, other=0.0)
    to = record + RECORD_HEADER + most_rows + row
    tl.store(to, margin.to(tl.int32, bitcast=True), mask=row < most_rows)
    tl.store(cycle, number + 1)
    moved = tl.minimum(tl.maximum(count, 0), tl.maximum(most - at, 0))
    there = at + moved
    tl.store(start, there)
    tl.store(kept, moved)
    last = tl.sum(tl.where(row == moved - 1, ids, 0), 0)
    tl.store(tokens, last, mask=moved > 0)
    tl.store(done, tl.where((ended != 0) | (at_stop < ROWS) | (bad == 1) | (there >= most), 1, 0))
