"""The fused target part by part against transformers' layers, whose weights are read one layer at a time.

Each part of the reference gets the fused engine's own input, so that only the part at fault differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

import torch

from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import Finding
from dflash_local.check.streamed_reference import LayerOutputs, StreamedReference
from dflash_local.config.features import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from dflash_local.engine.session import Session
from dflash_local.errors import ContextError, UsageError
from dflash_local.kernels.experts import Routing
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.moe import MoE
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.target_facts import TargetFacts

Path = Literal["prompt", "block"]  # of the fused engine's two ways through a layer
Quantiles = Mapping[Path, float]
TOKENS, BLOCK = 64, 8
BEHIND_WINDOW = 24  # tokens behind a window's first forgotten key
MAX_WINDOW = 256  # a longer one is not filled
# Relative error that rounding explains: in bfloat16 more than twice the largest one of tiny models of all families.
BARS = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}
# Of the rows' errors, the one that is held against the bar. In 16 bits a router's near-tie gives about one row in ten
# another expert (128 experts, 8 of a token: the gap behind the last one is some 8 roundings wide), and a block has 8.
DENSE: Quantiles = {"prompt": 0.75, "block": 0.75}
MIXTURE: Quantiles = {"prompt": 0.5, "block": 0.25}
EXACT: Quantiles = {"prompt": 1.0, "block": 1.0}  # every row is a copy
NAMED_EXPERTS = 4  # of a layer at most; more are counted
ROWS, SHARE = 4, 0.75  # of each expert; of its rows' errors, the one that counts
REMEDY = "dflash pull MODEL verifies the files; if they are whole, run it with --engine reference and report this"


@dataclass(frozen=True, slots=True)
class PartError:
    """How far a part's result lies from the reference's, given one input.

    Attributes:
        name: as in ``layer 3 (attention)``. error: relative, a quantile over the rows, infinite where a number is not
            finite. worst: of the worst row.
    """

    name: str
    path: Path
    error: float
    worst: float


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The target from its embedding to its head.

    Attributes:
        parts: in the order of a forward, both paths of each. bar: that rounding explains in this dtype.
        drift: error of each layer's output against the reference by itself from the embedding on; held against no bar.
        unfilled_windows: sliding windows that are longer than ``tokens``, whose masks were not put to the test.
    """

    parts: tuple[PartError, ...]
    drift: tuple[float, ...]
    bar: float
    dtype: str
    tokens: int
    unfilled_windows: tuple[int, ...] = ()

    @property
    def first(self) -> PartError | None:
        """The first part that differs by more than rounding."""
        return next((part for part in self.parts if part.error > self.bar), None)

    @property
    def largest(self) -> PartError:
        """The part with the largest error."""
        return max(self.parts, key=lambda part: part.error)

    def finding(self) -> Finding:
        """One line: the first part that differs, or the largest error."""
        figures = {
            "bar": self.bar,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "parts": [[part.name, part.path, _shown(part.error), _shown(part.worst)] for part in self.parts],
            "drift": [_shown(error) for error in self.drift],
            "unfilled_windows": list(self.unfilled_windows),
        }
        first = self.first
        if first is None:
            text = f"all {len(self.drift)} layers agree with transformers in {self.dtype}: at most"
            return Finding("layers", "ok", f"{text} {self.largest.error:.2g}, {self.largest.name}", figures=figures)
        same = [part for part in self.parts if part.name == first.name]
        both = all(part.error > self.bar for part in same)
        only = "" if both else f" in {'prompts' if first.path == 'prompt' else 'blocks'} only"
        excess = f"{first.error:.2g} where rounding explains {self.bar:.2g}"
        text = f"{first.name} differs{only}: {excess if isfinite(first.error) else 'numbers that are not finite'}"
        return Finding("layers", "failed", text, REMEDY, figures)


@torch.inference_mode()
def check_layers(
    session: Session,
    pair: Pair,
    ids: Sequence[int] | None = None,
    device: torch.device | None = None,
    on_fraction: Callable[[float], None] = lambda _: None,
) -> LayerReport:
    """Run tokens through the fused target and, layer by layer, through transformers' layers.

    Between two requests; what the session's caches hold is forgotten.

    Args:
        pair: of which the session was loaded. ids: two tokens at least; None for random ones, as many as fill short
            windows.
        device: of the reference; None for the target's. It holds one layer's weights at a time.

    Raises:
        UsageError: the session is not the fused engine's. ContextError: more tokens than it has room for.
        CheckpointError: a tensor cannot be read, or is none that transformers knows.
    """
    target = session.runner.target
    if not isinstance(target, FusedTarget):
        raise UsageError("the reference engine runs these layers itself", "load the pair with --engine fused")
    files = Checkpoint.open(pair.target)
    facts = TargetFacts.from_checkpoint(files).quantized(session.facts.load.quantize)
    wanted = _token_ids(facts.model, session.facts.context) if ids is None else list(ids)
    if not 2 <= len(wanted) <= session.facts.context:
        raise ContextError(f"{len(wanted)} tokens cannot be checked in a context of {session.facts.context}")
    tokens = torch.tensor(wanted, dtype=torch.int64, device=target.device)
    home = target.device if device is None else device
    session.reset()
    try:
        seen = _observed(target, tokens)
    finally:
        session.reset()
    reference = StreamedReference(files, facts, home, target.dtype, target.spec.kv_cache)
    return _compared(reference, target, seen, tokens, home, on_fraction)


def _token_ids(model: ModelConfig, context: int) -> list[int]:
    longest = max((window for window in _windows(model) if window <= MAX_WINDOW), default=0)
    count = min(max(TOKENS, longest + BEHIND_WINDOW), context)
    found: list[int] = torch.randint(0, model.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return found


def _windows(model: ModelConfig) -> set[int]:
    mixers = (layer.mixer for layer in model.layers)
    return {each.sliding_window for each in mixers if isinstance(each, AttentionConfig) and each.sliding_window}


@dataclass(frozen=True, slots=True)
class _Observed:
    """What the fused target computed of a prompt and a block behind it, M rows together.

    Attributes:
        residuals: [M, H] behind the embedding and behind each part of each layer. hidden: [M, H] after the final norm.
        logits: [M, V]. prompt: rows of the prompt.
    """

    residuals: tuple[torch.Tensor, ...]
    hidden: torch.Tensor
    logits: torch.Tensor
    prompt: int


def _observed(target: FusedTarget, tokens: torch.Tensor) -> _Observed:
    block = min(BLOCK, target.rows, len(tokens) - 1)
    prompt = len(tokens) - block
    found: list[torch.Tensor] = []
    target.on_residual = lambda x: found.append(x.clone())
    try:
        first = target.prefill(tokens[:prompt], with_taps=False)
        count = len(found)
        second = target.verify(tokens[prompt:], with_taps=False)
    finally:
        target.on_residual = None
    block_logits = target.logits[:block].clone()
    residuals = (torch.cat((one, other[:block])) for one, other in zip(found[:count], found[count:], strict=True))
    logits = torch.cat((target.head(first.hidden), block_logits))
    return _Observed(tuple(residuals), torch.cat((first.hidden, second.hidden)), logits, prompt)


def _compared(
    reference: StreamedReference,
    target: FusedTarget,
    seen: _Observed,
    tokens: torch.Tensor,
    home: torch.device,
    on_fraction: Callable[[float], None],
) -> LayerReport:
    dtype, model = seen.hidden.dtype, target.config
    comparison = _Comparison(seen.prompt, dtype)
    stream = [each.to(home) for each in seen.residuals]
    own = reference.embed(tokens.to(home))
    comparison.add("the embedding", stream[0], own, EXACT)
    drift = []
    for index, layer in enumerate(model.layers):
        given, mixed, left = stream[2 * index : 2 * index + 3]
        with reference.layer(index):
            found = reference.run(index, given, seen.prompt, mixed)
            own = reference.run(index, own, seen.prompt).mlp
            experts = expert_errors(target, index, seen.residuals[2 * index + 1], reference, comparison.rounding)
        comparison.add_layer(index, layer, (given, mixed, left), found, experts)
        drift.append(_quantile(row_errors(left, own), 0.5))
        on_fraction((index + 1) / (len(model.layers) + 1))
    comparison.add("the final norm", seen.hidden.to(home), reference.norm(stream[-1]))
    comparison.add("the head", seen.logits.to(home), reference.head(seen.hidden.to(home)))
    on_fraction(1.0)
    unfilled = tuple(sorted(window for window in _windows(model) if window >= len(tokens)))
    kind = str(dtype).removeprefix("torch.")
    return LayerReport(tuple(comparison.parts), tuple(drift), comparison.bar, kind, len(tokens), unfilled)


class _Comparison:
    """Errors of the parts, one after the other, of rows of which the first ``prompt`` are the prompt's."""

    def __init__(self, prompt: int, dtype: torch.dtype) -> None:
        self._prompt, self.bar = prompt, BARS[dtype]
        self.rounding = torch.finfo(dtype).eps / self.bar
        self.parts: list[PartError] = []

    def add(
        self,
        name: str,
        found: torch.Tensor,
        wanted: torch.Tensor,
        quantiles: Quantiles = DENSE,
        floor: torch.Tensor | float = 0.0,
    ) -> None:
        """Hold rows [M, N] against the reference's. ``floor``: as of ``row_errors``."""
        errors = row_errors(found, wanted, floor)
        paths: tuple[tuple[Path, slice], ...] = (("prompt", slice(self._prompt)), ("block", slice(self._prompt, None)))
        for path, rows in paths:
            worst = _quantile(errors[rows], 1)
            self.parts.append(PartError(name, path, _quantile(errors[rows], quantiles[path]), worst))

    def add_layer(
        self,
        index: int,
        layer: LayerConfig,
        stream: tuple[torch.Tensor, ...],
        reference: LayerOutputs,
        experts: torch.Tensor | None,
    ) -> None:
        """Hold what each part adds to the residual stream against what the reference adds to it.

        Of a sum no more is kept than its rounding lets through, which counts as less than the bar.

        Args:
            stream: [M, H] in front of the layer, behind its mixer, behind the layer. experts: errors [E] of routed
                experts by themselves, over a prompt's rows; None where there are none.
        """
        given, mixed, left = (each.float() for each in stream)
        mixer, mlp = _names(layer)
        wanted = reference.mixer.float()
        self.add(f"layer {index} ({mixer})", mixed - given, wanted - given, floor=mixed.norm(dim=1) * self.rounding)
        if experts is not None:
            worst = float(experts.max())
            self.parts.append(PartError(f"layer {index} ({_experts(experts, self.bar)})", "prompt", worst, worst))
        quantiles = MIXTURE if isinstance(layer.mlp, MoEConfig) else DENSE
        added = reference.mlp.float() - wanted
        self.add(f"layer {index} ({mlp})", left - mixed, added, quantiles, left.norm(dim=1) * self.rounding)


def _names(layer: LayerConfig) -> tuple[str, str]:
    mixer = "Gated-DeltaNet"
    if isinstance(layer.mixer, AttentionConfig):
        mixer = "sliding-window attention" if layer.mixer.sliding_window else "attention"
    return mixer, "mixture of experts" if isinstance(layer.mlp, MoEConfig) else "MLP"


def _experts(errors: torch.Tensor, bar: float) -> str:
    """Those that are wrong, of errors [E]."""
    wrong = (errors > bar).nonzero()[:, 0].tolist()
    if len(wrong) > NAMED_EXPERTS:
        return f"{len(wrong)} of {len(errors)} experts"
    return f"expert{'s' * (len(wrong) != 1)} {', '.join(map(str, wrong))}".strip()


def _quantile(errors: torch.Tensor, share: float) -> float:
    """Of the rows' errors; infinite where one of them is not finite."""
    return float(errors.quantile(share)) if errors.isfinite().all() else inf


def _shown(error: float) -> float | None:
    """JSON has no infinity."""
    return error if isfinite(error) else None


def expert_errors(
    target: FusedTarget, index: int, mixed: torch.Tensor, reference: StreamedReference, rounding: float
) -> torch.Tensor | None:
    """Relative errors [E] of a layer's routed experts, infinite where a number is not finite; None where it has none.

    While ``reference.layer`` has the layer's tensors. A fault of one expert shows in the few rows that choose it, as
    few as a router's near-tie sends elsewhere; here every expert is given rows, and no router has a say.

    Args:
        mixed: [M, H], the residual stream behind the layer's mixer, whose rows the experts take by turns.
        rounding: of the rows' usual size, what may be off in rows that an expert makes little of.
    """
    layer = target.layers[index]
    if not isinstance(layer.mlp, MoE):
        return None
    count = layer.mlp.weights.config.num_experts
    experts = torch.arange(count, device=mixed.device, dtype=torch.int32).repeat_interleave(ROWS)
    rows = layer.mlp_input(mixed, torch.empty_like(mixed))[torch.arange(len(experts), device=mixed.device) % len(mixed)]
    alone = Routing(torch.ones(len(experts), 1, device=mixed.device), experts[:, None])
    wanted = reference.experts(index, rows, experts)
    found = layer.mlp.prefill_routed(rows, alone).to(wanted.device)
    usual = wanted.float().norm(dim=1).median()
    errors = row_errors(found, wanted, usual * rounding).view(count, ROWS)
    return torch.where(errors.isfinite().all(1), errors.quantile(SHARE, 1), torch.inf)


def row_errors(found: torch.Tensor, wanted: torch.Tensor, floor: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Relative error [M] of rows [M, N], float32. ``floor``, [M] or one for all, is added to the norm of ``wanted``."""
    wanted = wanted.float()
    size = wanted.norm(dim=1) + floor
    return (found.float() - wanted).norm(dim=1) / size.clamp(min=torch.finfo(torch.float32).tiny)
