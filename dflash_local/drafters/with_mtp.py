"""A drafter and the target's own layer for multi-token prediction, loaded together: what a plan counts. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from dflash_local.checkpoint_files.gguf_quantization import METHOD as GGUF
from dflash_local.config.families import ARCHITECTURES
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import FULL, Drafter, Shapes
from dflash_local.drafters.kinds import OF_TARGETS
from dflash_local.drafters.mtp.layout import PREFIX, MTPConfig
from dflash_local.layout import target as target_layout
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.linear import FormatOf, WeightFormat, unquantized
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.traffic import Traffic
from dflash_local.load_config import DrafterPrecision, LoadConfig

FAMILIES = frozenset(ARCHITECTURES[name].name for name, kind in OF_TARGETS.items() if kind == MTPConfig.kind)


def drafters_of(target: ModelConfig, drafter: Drafter | None, config: LoadConfig) -> Drafter | None:
    """Return what a load drafts with: with ``mtp`` a drafter and the layer beside it, where the target can have one.

    Args:
        target: as published.
    """
    if drafter is None or not config.draft:
        return None
    in_gguf = target.quantization is not None and target.quantization.method == GGUF  # which no layer is read from
    alone = isinstance(drafter, MTPConfig) or not drafter.stored
    if not config.mtp or alone or in_gguf or target.family not in FAMILIES:
        return drafter
    return WithMTP.of(drafter, MTPConfig.of_model(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class WithMTP(Drafter):
    """Both, of which each cycle takes one: sizes are sums, and a block is the drafter's. It is of no kind: engines load
    the two one after the other, with one head for drafting.
    """

    drafter: Drafter
    mtp: MTPConfig

    @classmethod
    def of(cls, drafter: Drafter, mtp: MTPConfig) -> WithMTP:
        known = {each.name: getattr(drafter, each.name) for each in fields(Drafter)}
        return cls(**{**known, "taps": (*drafter.taps, *mtp.taps)}, drafter=drafter, mtp=mtp)

    @property
    def draft_rows(self) -> int:
        return self.drafter.draft_rows

    @property
    def passes(self) -> int:
        return self.drafter.passes

    def fused_refusal(self) -> str:
        return self.drafter.fused_refusal() or self.mtp.fused_refusal()

    def tensors(self, target_hidden: int) -> Shapes:
        return self.drafter.tensors(target_hidden) | self.mtp.tensors(target_hidden)

    @property
    def repeated_size(self) -> int:
        return self.drafter.repeated_size + self.mtp.repeated_size

    def snapshot_bytes(self, spec: EngineSpec) -> int:
        return self.drafter.snapshot_bytes(spec) + self.mtp.snapshot_bytes(spec)

    @property
    def context_size(self) -> int:
        return self.drafter.context_size + self.mtp.context_size

    @property
    def prefill_size(self) -> int:
        return max(self.drafter.prefill_size, self.mtp.prefill_size)

    @property
    def rotation_size(self) -> int:
        return self.drafter.rotation_size

    @property
    def stored_name(self) -> str:
        names = (self.drafter.stored_name, self.mtp.stored_name)
        return " and ".join(dict.fromkeys(filter(None, names)))

    @property
    def formats(self) -> FormatOf:
        of_drafter, of_layer = self.drafter.formats, self.mtp.formats

        def form(module: str) -> WeightFormat:
            return of_layer(module) if module.startswith(PREFIX) else of_drafter(module)

        return form

    def weights(
        self, target_hidden: int, dtype: str, format_of: FormatOf = unquantized, precision: DrafterPrecision = FULL
    ) -> Iterator[Buffer]:
        yield from self.drafter.weights(target_hidden, dtype, format_of, precision)
        yield from self.mtp.weights(target_hidden, dtype, format_of, precision)

    def buffers(self, vocab_size: int, spec: EngineSpec) -> Iterator[Buffer]:
        """Return both's: alike are those that the layer shares with the target's, others only in name."""
        yield from self.drafter.buffers(vocab_size, spec)
        for buffer in self.mtp.buffers(vocab_size, spec):
            shared = buffer.name.startswith(f"{target_layout.OWNER}.")
            yield buffer if shared else replace(buffer, name=f"{PREFIX}{buffer.name}")

    def traffic(self, target: ModelConfig, spec: EngineSpec) -> Traffic:
        """Describe a block of the drafter's, and the context rows of both."""
        found = self.drafter.traffic(target, spec)
        return replace(found, products=Counter(found.products) + Counter(self.mtp.context_traffic(spec)))
