"""How a pair is loaded: options are fields of ``LoadConfig``, with help, values, bounds, variable and default."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from dflash_local.errors import UsageError
from dflash_local.request import MAX_NEW_TOKENS, check_integer, check_number

MAX_CONTEXT = 2**31 - 1
FUSED, REFERENCE = "fused", "reference"  # engines
BALANCED = "balanced"  # a device: all GPUs
FREQUENT = 65_536  # rows of the head that serves frequent tokens
QUANTIZED = ("fp8", "int8", "int4")  # formats of ``quantize`` that this program makes and multiplies itself
BITSANDBYTES = ("bnb-int8", "bnb-nf4")  # and those that it leaves to bitsandbytes
# What of a pair lies in pinned host memory, by the words of ``offload``; ever more of it.
Offloaded = Literal["embedding", "snapshots"]
OFFLOADS: Mapping[str, tuple[Offloaded, ...]] = {
    "none": (),
    "embedding": ("embedding",),
    "all": ("embedding", "snapshots"),
}


def gpus_named(device: str) -> tuple[int, ...]:
    """Return the CUDA indices that a device names: (0,) of ``cuda``, (1, 0) of ``cuda:1,0``, () of any other."""
    found = re.fullmatch(r"cuda(?::([0-9]+(?:,[0-9]+)*))?", device)
    return () if found is None else tuple(int(number) for number in (found[1] or "0").split(","))


def takes_several(device: str) -> bool:
    """Say whether a device means that layers are spread over GPUs, all or those that it names."""
    return device == BALANCED or len(gpus_named(device)) > 1


@dataclass(frozen=True, slots=True)
class DrafterPrecision:
    """What drafts are computed with. Every draft is verified by the target, so no reply depends on it.

    Attributes:
        weights: the drafter's matrices, as they are stored or in eight bits.
        head: the target's own; a copy of it in eight bits; or of its rows of the ``FREQUENT`` ids that replies say most
            (``store.said_record``), then of the lowest, which are frequent ones as byte pairs are numbered as merged.
            That copy is in eight bits where the weights or the target's own are in codes. Other ids are never drafted,
            which costs acceptance.
    """

    weights: Literal["full", "8bit"] = "full"
    head: Literal["full", "8bit", "frequent"] = "full"

    @property
    def coded(self) -> bool:
        """Return whether drafts are computed with codes of eight bits."""
        return "8bit" in (self.weights, self.head)


DRAFTER_PRECISIONS: Mapping[str, DrafterPrecision] = {
    "full": DrafterPrecision(),
    "8bit-head": DrafterPrecision("full", "8bit"),
    "8bit-drafter": DrafterPrecision("8bit", "full"),
    "8bit": DrafterPrecision("8bit", "8bit"),
    "frequent": DrafterPrecision("full", "frequent"),
    "8bit-frequent": DrafterPrecision("8bit", "frequent"),
}
FREQUENT_HEADS = tuple(name for name, precision in DRAFTER_PRECISIONS.items() if precision.head == "frequent")


@dataclass(frozen=True, slots=True)
class LoadOption:
    """A field of ``LoadConfig`` as users meet it.

    Attributes:
        name: of the field, and its key in settings.json. kind: str, int, float or bool.
        choices, pattern, low, high: what is allowed of words, text and numbers; ``allowed`` says it.
        spelled: what a command line says instead of the default where there is no option of this name.
        has_variable: may also be a ``DFLASH_`` variable or stand in settings.json.
        planned: the memory plan depends on it. needs_fused: no other engine knows more than its default.
        compared: two loads that differ in it are different; else it only matters while loading.
        not_shown: values that go without saying, besides the default.
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    pattern: str = ""
    allowed: str = ""
    low: float = 0
    high: float = 0
    metavar: str | None = None
    spelled: str = ""
    has_variable: bool = True
    planned: bool = True
    needs_fused: bool = False
    compared: bool = True
    not_shown: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Return the option's name on a command line; of a switch the one that turns away from its default."""
        return f"--no-{self._words}" if self.default is True else f"--{self._words}"

    @property
    def switch(self) -> str:
        """Return the flag with its opposite, where a setting may have to be undone."""
        return f"--{self._words}/--no-{self._words}" if self.kind is bool and self.has_variable else self.flag

    @property
    def _words(self) -> str:
        return self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Pass what is allowed. UsageError names the option, the value and what is allowed."""
        if value is None and self.default is None:
            return
        if self.kind is int:
            check_integer(self.flag, value, int(self.low), int(self.high))
        elif self.kind is float:
            check_number(self.flag, value, self.low, self.high)
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise UsageError(f"{self.flag} must be true or false, got {value!r}")
        elif not (value in self.choices if self.choices else re.fullmatch(self.pattern, str(value))):
            raise UsageError(f"{self.flag} {str(value)[:80]!r} is unknown", f"use {self.allowed}")

    def arguments(self, value: Any) -> list[str]:
        """Return the words of a command line that ask for a value."""
        if self.spelled:
            return self.spelled.split()
        if self.kind is bool:
            return [f"--{'' if value else 'no-'}{self._words}"]
        return [self.flag, str(value)]


def _option(default: Any, help_: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help_, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a pair is to be loaded, or was: then nothing is left to ``auto``. Each field is one option."""

    context: int | None = _option(
        None,
        "Tokens the session may hold; what fits if not given.",
        low=1,
        high=MAX_CONTEXT,
        metavar="N",
        has_variable=False,
    )
    quantize: str | None = _option(
        None,
        "Round plain weights as they are read; bnb- is slow.",
        choices=(*QUANTIZED, *BITSANDBYTES),
        metavar="FORMAT",
        has_variable=False,
    )
    dtype: str = _option(
        "auto",
        "auto: bfloat16 on a GPU, and on a CPU that computes in it where drafting changes no text; else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = _option(
        "auto",
        f"auto, cpu, mps, cuda, cuda:N, cuda:0,1, {BALANCED} (all).",
        pattern=rf"auto|cpu|cuda(:[0-9]{{1,4}}(,[0-9]{{1,4}})*)?|mps|{BALANCED}",
        allowed=f"auto, cpu, cuda, cuda:N, mps, {BALANCED}, or several GPUs as cuda:0,1",
        metavar="DEVICE",
    )
    draft: bool = _option(
        True, "Load the drafter, too; else the target alone.", spelled="--mode ar", has_variable=False, compared=False
    )
    engine: str = _option("auto", "auto: fused on a GPU where it knows the pair.", choices=("auto", FUSED, REFERENCE))
    exact: bool = _option(
        False, "The same bits with and without drafting, in any dtype; costs some speed.", needs_fused=True
    )
    drafter_precision: str = _option(
        "auto",
        "Weights and head of the drafter; no reply changes. auto: 8 bits where that pays or makes room.",
        choices=("auto", *DRAFTER_PRECISIONS),
        metavar="NAME",
        not_shown=("full",),
    )
    mtp: bool = _option(
        False, "The target's own MTP layer drafts, too, where it pays; replies stay the same.", has_variable=False
    )
    kv_cache: str = _option(
        "auto", "int8: half the memory of a context; replies change.", choices=("auto", "int8"), needs_fused=True
    )
    offload: str = _option(
        "auto",
        "What lies in pinned host memory: none, the embedding, or all that may: also copies of recurrent states. "
        "auto: what makes room for 32,768 tokens. The same bits.",
        choices=("auto", *OFFLOADS),
        needs_fused=True,
        not_shown=("none",),
    )
    cache_memory: float = _option(
        4.0,
        "GiB of host memory for conversations that are not on the device now; 0 keeps one conversation.",
        high=4096.0,
        metavar="GIB",
        compared=False,
    )
    cache_disk: float = _option(
        0.0,
        "GiB on disk for conversations that host memory has no room for, and for a restart; 0: none.",
        high=65_536.0,
        metavar="GIB",
        compared=False,
    )
    prefill_chunk: int | None = _option(
        None,
        "Tokens of a prompt processed at once; as many as there is room for if not given.",
        low=256,
        high=32_768,  # rows are the second axis of a launch, of at most 65,535
        metavar="N",
        has_variable=False,
        compared=False,
    )
    draft_window: int | None = _option(
        None,
        "Tokens the drafter looks back on; all if not given.",
        low=1,
        high=MAX_NEW_TOKENS,
        metavar="N",
        planned=False,
    )
    attention_factor: float | None = _option(
        None,
        "Of the drafter's YaRN, instead of its own.",
        low=0.01,
        high=100.0,
        metavar="X",
        has_variable=False,
        planned=False,
    )
    adaptation: bool = _option(
        True, "Draft as the drafter was published, without what it learnt by dflash adapt.", planned=False
    )
    allow_mismatch: bool = _option(False, "Run a pair that does not fit together.", has_variable=False, planned=False)
    fit_check: bool = _option(
        True,
        "Load even where the memory plan says that it does not fit.",
        has_variable=False,
        planned=False,
        compared=False,
    )
    skip_check: bool = _option(
        False, "Leave out the check of the first load of a pair on a card.", planned=False, compared=False
    )

    def __post_init__(self) -> None:
        for name, option in LOAD_OPTIONS.items():
            option.check(getattr(self, name))
        named = gpus_named(self.device)
        if len(set(named)) < len(named):
            once = ",".join(map(str, dict.fromkeys(named)))
            raise UsageError(f"--device {self.device!r} names a GPU twice", f"name each once: cuda:{once}")

    @property
    def needs_fused(self) -> str:
        """Return the option that only the fused engine knows, as a command line spells it; empty when none is given."""
        fused_options = (option for option in LOAD_OPTIONS.values() if option.needs_fused)
        found = (each.name for each in fused_options if getattr(self, each.name) not in (each.default, *each.not_shown))
        return next((self._spelled(name) for name in found), "")

    @property
    def bitsandbytes(self) -> str | None:
        """Return the format that bitsandbytes quantises to; None without it."""
        return self.quantize if self.quantize in BITSANDBYTES else None

    def arguments(self, beside: LoadConfig | None = None) -> list[str]:
        """Return the words of a command line for all that differs from the defaults, or from ``beside``."""
        usual = beside or LoadConfig()
        changed = [name for name in LOAD_OPTIONS if getattr(self, name) != getattr(usual, name)]
        return [word for name in changed for word in LOAD_OPTIONS[name].arguments(getattr(self, name))]

    def described(self, beside: Collection[str] = ()) -> list[str]:
        """Return what is worth saying of a load: ``exact``, ``kv cache int8``; the fields ``beside`` left out."""
        parts = []
        for name, option in LOAD_OPTIONS.items():
            value, words = getattr(self, name), name.replace("_", " ")
            if name not in beside and option.compared and value not in (option.default, *option.not_shown):
                parts.append(words if option.kind is bool else f"{words} {value}")
        return parts

    def unlike(self, loaded: LoadConfig) -> list[str]:
        """Return the options that ask for another load than ``loaded``, as a command line spells them."""
        compared = [(name, option.default) for name, option in LOAD_OPTIONS.items() if option.compared]
        changed = (name for name, usual in compared if getattr(self, name) not in (usual, getattr(loaded, name)))
        return [self._spelled(name) for name in changed]

    def _spelled(self, name: str) -> str:
        return " ".join(LOAD_OPTIONS[name].arguments(getattr(self, name)))


def _described() -> dict[str, LoadOption]:
    """Return the options by name; their types are those of the fields."""
    hints = get_type_hints(LoadConfig)
    found = {}
    for item in fields(LoadConfig):
        kind = (get_args(hints[item.name]) or (hints[item.name],))[0]
        more = dict(item.metadata)
        more.setdefault("allowed", _allowed(kind, **more))
        found[item.name] = LoadOption(name=item.name, kind=kind, default=item.default, **more)
    return found


def _allowed(kind: type, choices: tuple[str, ...] = (), low: float = 0, high: float = 0, **_more: Any) -> str:
    if choices:
        return ", ".join(choices)
    if kind is bool:
        return "true or false"
    return f"a {'whole ' if kind is int else ''}number from {low:g} to {high:,}"


LOAD_OPTIONS: Mapping[str, LoadOption] = _described()
