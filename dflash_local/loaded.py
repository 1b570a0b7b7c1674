"""What is loaded, in the one form that the engine, the service, the endpoint, screens and reports share. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from dflash_local.events import Finished, Stats, Usage
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.request import Request, check_integer

BASICS = ("engine", "dtype", "quantize", "device", "context")  # shown of every loaded pair, in places of their own
Place = Literal["device", "host", "disk"]
Facts = TypeVar("Facts", bound="SessionFacts")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``dflash check`` finds of a subject (``check.findings``): a line, and what to do if it is not ok."""

    subject: str
    state: str
    text: str
    remedy: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Return it in columns; what to do stands below what was found."""
        first = f"{self.subject:<10} {self.state:<8} {self.text}"
        return (first, f"{'':<19} {self.remedy}") if self.remedy else (first,)


@dataclass(frozen=True, slots=True)
class HeldCount:
    """What conversations come to in one place. ``bytes``: None on the device, whose context is reserved."""

    place: Place
    sequences: int
    tokens: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A loaded pair.

    Attributes:
        target, drafter: the name of a bundled pair or a folder; no drafter is None.
        block_size: the trained one. notices: of the load.
        load: how it was loaded; engine, dtype, device, context and drafter precision are those it came to.
        acceptance_band: a mean acceptance length under this is worth a warning.
        stored: the format that the target's weights are kept in as they are published; None for plain or decoded ones.
        checks: of the check of the first load on this card; none where it was left out.
        trained_thinking: as of a registry's row. generation_checked: the drafter is one that the registry knows.
        tuned_from: the known target whose drafter this target took for having its architecture.
        adapted: what the drafter has learnt here, in words; empty where it is as it was published.
        pid: the process that holds it; None where that is this one.
    """

    target: str
    drafter: str | None
    block_size: int
    has_tokenizer: bool
    load: LoadConfig
    notices: tuple[str, ...] = ()
    acceptance_band: float | None = None
    stored: str | None = None
    checks: tuple[Verdict, ...] = ()
    trained_thinking: str | None = None
    generation_checked: bool = False
    tuned_from: str | None = None
    adapted: str = ""
    pid: int | None = None

    @property
    def drafting(self) -> bool:
        """Return whether requests may be drafted for."""
        return self.drafter is not None

    @property
    def in_server(self) -> bool:
        """Return whether a server of another program writes the replies: seeds do not repeat there, ids may lack."""
        return False

    @property
    def names_tokens(self) -> bool:
        """Return whether replies can name their tokens."""
        return True

    @property
    def engine(self) -> str:
        return self.load.engine

    @property
    def dtype(self) -> str:
        return self.load.dtype

    @property
    def promise(self) -> str:
        """Return how strong the promise of equal text is with this number format: docs/exactness.md."""
        name = self.dtype.removeprefix("torch.")
        short = {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)
        return f"{short}: exact" if name == "float32" else f"{short}: up to near-ties"

    @property
    def formats(self) -> str:
        """Return the format of quantised weights and that of what is computed: ``int4 bfloat16``."""
        return " ".join(filter(None, (self.load.quantize or self.stored, self.dtype)))

    @property
    def weights(self) -> str:
        """Return what the target's weights are."""
        if self.load.quantize is not None:
            return f"{self.load.quantize}: the checkpoint's own, rounded as they were read"
        return self.dtype if self.stored is None else f"{self.stored}, as published"

    @property
    def device(self) -> str:
        return self.load.device

    @property
    def context(self) -> int:
        """Return how many tokens the session may hold."""
        return self.load.context or 0

    @property
    def loaded_as(self) -> str:
        """Return how it is loaded in a few words: ``fused int4 bfloat16 cuda, exact, kv cache int8``."""
        basics = f"{self.engine} {self.formats} {self.device}"
        return ", ".join(filter(None, (basics, *self.load.described(BASICS), self.adapted)))

    @property
    def computed_as(self) -> str:
        """Return what figures of it are figures of: ``fused engine, int4 bfloat16 on cuda``."""
        basics = f"{self.engine} engine, {self.formats} on {self.device}"
        return f"{basics}, {self.adapted}" if self.adapted else basics

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: the load options stand beside the rest."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "load"}
        checks = [asdict(each) for each in self.checks]
        return {**own, "notices": list(self.notices), "checks": checks, **asdict(self.load)}

    @classmethod
    def from_dict(cls: type[Facts], content: Mapping[str, Any]) -> Facts:
        """Return what ``as_dict`` wrote. ValueError: a field is missing or wrong. UsageError: one is not allowed."""
        from dflash_local.schema import convert  # not for ``dflash --help``

        own = {name: value for name, value in content.items() if name not in LOAD_OPTIONS}
        if unknown := set(own) - {item.name for item in fields(cls)}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")  # another version, another kind
        load = LoadConfig(**{name: value for name, value in content.items() if name in LOAD_OPTIONS})
        facts = convert({**own, "load": load}, cls)
        for name, number in (("block_size", facts.block_size), ("pid", facts.pid or 0)):
            check_integer(name, number, 0, 2**31)
        return facts


def nothing_done(facts: SessionFacts, request: Request) -> Finished:
    """Return the end of a request that was cancelled before its reply began."""
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
