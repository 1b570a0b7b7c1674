"""Describe what the plan, the pair's contract and both engines ask of a drafter, whatever its kind. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dflash_local.config.features import ModelConfig
from dflash_local.config.quantization import Quantization
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.linear import FormatOf, stored_formats, unquantized
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.traffic import Traffic
from dflash_local.load_config import DrafterPrecision, LoadConfig

Kind = TypeVar("Kind", bound="Drafter")
Shapes = dict[str, tuple[int, ...]]
FULL = DrafterPrecision()
MIN_BLOCK, MAX_BLOCK = 2, 64  # rows, anchor included


@dataclass(frozen=True, slots=True)
class Servers:
    """Say how vLLM and SGLang are told of a kind: the method and the algorithm, and the option of its block size."""

    method: str
    algorithm: str
    block_option: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """One drafter by its configuration. A kind overrides what it has; one without tensors has none of it.

    Its modules are ``drafters.<kind>.layout`` with ``CONFIG``, this class; of a kind that stores tensors ``reference``
    with ``PROPOSER``, a ``drafters.engines.LoadableProposer``; where the fused engine takes it, ``fused`` with
    ``BLOCKS``, a ``FusedDrafter``; and, where it is trained, ``training`` with ``MODULE``, a ``DraftModule``.

    Attributes:
        block_size: rows that are verified of a trained block, anchor included.
        taps: 0-based target layers whose outputs it reads, concatenated in this order.
        hidden_size, mask_token_id, vocab_size, max_position_embeddings, num_target_layers, target_hidden_size: None if
            not said.
        quantization: how its file holds its matrices; None for plain ones.
        source: where it was read, for messages. inferred: of the values that sizes and limits depend on, names of those
            that are likely but quoted by no source.
    """

    kind: ClassVar[str]
    servers: ClassVar[Servers | None] = None  # None: no server runs it
    stored: ClassVar[bool] = True  # False: its checkpoint is its config.json alone, and drafts are copies of the text
    first_draft: ClassVar[int] = 1  # the row of its block that predicts the token behind the anchor
    prefix: ClassVar[str] = ""  # of its tensors' names; others in its checkpoint are not its own
    untapped: ClassVar[int] = 1  # of the target's last layers: how many it never taps

    block_size: int
    taps: tuple[int, ...] = ()
    hidden_size: int | None = None
    mask_token_id: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    quantization: Quantization | None = None
    source: str = ""
    inferred: tuple[str, ...] = ()

    @classmethod
    def from_config(cls: type[Kind], config: Mapping[str, Any], source: str, inferred: Collection[str] = ()) -> Kind:
        """Read a ``config.json``. Raises UnknownValue, CheckpointError.

        Args:
            inferred: names of values that are likely but quoted by no source.
        """
        raise NotImplementedError

    def with_attention_factor(self, attention_factor: float | None) -> Drafter:
        """Return the same drafter with another rope amplitude; None changes nothing."""
        return self

    @property
    def draft_rows(self) -> int:
        """Count rows that it computes, the anchor's included."""
        return self.block_size - 1 + self.first_draft

    @property
    def passes(self) -> int:
        """Count how often it goes through its layers and the head for a block."""
        return 1

    def fingerprint(self) -> dict[str, object]:
        """Return the fields by which a registry distinguishes generations of one repository."""
        return {"block": self.draft_rows}

    def notices(self, options: LoadConfig) -> tuple[str, ...]:
        """Return what the user should know of options that the kind leaves out."""
        return ()

    def fused_refusal(self) -> str:
        """Return why the fused engine cannot run it; empty when it can."""
        return f"its drafter is of the kind {self.kind}"

    def training_refusal(self) -> str:
        """Return why it cannot be trained; empty when it can."""
        return f"drafters of the kind {self.kind} are not trained"

    def tensors(self, target_hidden: int) -> Shapes:
        """Return shapes of all tensors of its checkpoint by name."""
        return {}

    def optional_tensors(self) -> Shapes:
        """Return shapes of tensors that a checkpoint may have beside, and that drafting does without."""
        return {}

    def id_tables(self) -> Mapping[str, int]:
        """Return the rows of each table that must hold every id of the target, by its name and verb for a message."""
        return {}

    @property
    def repeated_size(self) -> int:
        """Count numbers of its weights that a loaded one holds a second time."""
        return 0

    def snapshot_bytes(self, spec: EngineSpec) -> int:
        """Return what a recurrent target's snapshot has of its context, in host memory, in the fused engine."""
        return 0

    @property
    def context_size(self) -> int:
        """Count numbers of a token's keys and values in all layers; the reference engine keeps all of them."""
        return 0

    @property
    def prefill_size(self) -> int:
        """Count numbers of a prompt's row while the fused engine writes its context, beside its taps and two rows."""
        return self.context_size

    @property
    def rotation_size(self) -> int:
        """Count numbers of a position in its rotation table, cosine and sine."""
        return 0

    @property
    def stored_name(self) -> str:
        """Name the format of its coded matrices as a plan counts them; empty where it counts none."""
        return "" if self.quantization is None else self.quantization.name

    @property
    def formats(self) -> FormatOf:
        """Return the format of each of its matrices as its configuration alone tells."""
        return stored_formats(self.quantization)

    def weights(
        self, target_hidden: int, dtype: str, format_of: FormatOf = unquantized, precision: DrafterPrecision = FULL
    ) -> Iterable[Buffer]:
        """Return buffers of its weights in the fused engine.

        Args:
            target_hidden: numbers of a tap. format_of: of the matrices as its checkpoint has them.
        """
        return ()

    def buffers(self, vocab_size: int, spec: EngineSpec) -> Iterable[Buffer]:
        """Return what a bound drafter takes beside its weights. ``vocab_size``: rows of the target's head."""
        return ()

    def traffic(self, target: ModelConfig, spec: EngineSpec) -> Traffic:
        """Describe what the fused engine reads for a block, the head included, and for a cycle's context rows."""
        raise NotImplementedError
