"""Conversations as padded id rows on a device, bucketed by length, drawn by a seeded generator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from tools.train.data import conversations
from tools.train.vocabulary import encode

BUCKETS = (64, 96, 128, 192, 256, 320, 384, 448, 512, 640)


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` [rows, length] int64, right padded with 0; `own` [rows, length] bool: ids the model has to write."""

    ids: torch.Tensor
    own: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True, slots=True)
class Corpus:
    """All rows of one bucket length each; a conversation longer than the last bucket is left out."""

    rows: dict[int, Batch]
    device: torch.device

    def batches(self, seed: int, tokens: int) -> Iterator[Batch]:
        """Endless batches of about `tokens` ids; buckets drawn by how many ids they hold."""
        draw = torch.Generator().manual_seed(seed)
        lengths = list(self.rows)
        share = torch.tensor([float(self.rows[length].ids.numel()) for length in lengths])
        while True:
            length = lengths[int(torch.multinomial(share, 1, generator=draw))]
            bucket = self.rows[length]
            amount = max(1, tokens // length)
            picked = torch.randint(bucket.ids.shape[0], (amount,), generator=draw).to(self.device)
            yield Batch(bucket.ids[picked].long(), bucket.own[picked], bucket.real[picked])


def build_corpus(tokenizer: Tokenizer, seed: int, amount: int, device: torch.device) -> Corpus:
    """Generate, encode and bucket `amount` training conversations."""
    encoded = encode(tokenizer, list(conversations(seed, amount)))
    grouped: dict[int, list[tuple[list[int], list[bool]]]] = {}
    for ids, own in encoded:
        length = next((bucket for bucket in BUCKETS if len(ids) <= bucket), None)
        if length is not None:
            grouped.setdefault(length, []).append((ids, own))
    rows = {length: _padded(grouped[length], length, device) for length in sorted(grouped)}
    return Corpus(rows, device)


def _padded(rows: list[tuple[list[int], list[bool]]], length: int, device: torch.device) -> Batch:
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows], dtype=torch.int16)
    own = torch.tensor([own + [False] * (length - len(own)) for _, own in rows])
    real = torch.tensor([[True] * len(ids) + [False] * (length - len(ids)) for ids, _ in rows])
    return Batch(ids.to(device), own.to(device), real.to(device))
