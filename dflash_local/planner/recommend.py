"""The best way to run a pair on a machine: of its own weights, published quantised ones and rounding at load, the one
that fits and that a preference puts first; and why the better ones do not fit. ``rank`` has the rule in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from dflash_local.catalog.row import Variant
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.errors import UsageError
from dflash_local.load_config import BITSANDBYTES, FUSED, QUANTIZED, LoadConfig
from dflash_local.planner import formats
from dflash_local.planner.acceptance_record import Count
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import ROOMY, USABLE, Plan, context_limit, formats_of, plan
from dflash_local.planner.room import CODED_KV, room_made
from dflash_local.planner.speed import ExpectedAcceptance, Prediction, predict
from dflash_local.planner.speed_record import SpeedMeasurement, corrected

Preference = Literal["balanced", "quality", "speed", "context"]
# Bits that are left of sixteen, coarser down the list; what is published stands before what is rounded here, since
# its makers chose its scales with data and nobody has measured ours.
FIDELITY = ("as trained", "published in 8 bits", "rounded to 8 bits", "published in 4 bits", "rounded to 4 bits")
STORED = ("target weights", "head", "embedding")  # lines of a ledger that a target's files hold
EIGHT_BITS = ("fp8", "int8")
FASTER = 1.25  # times the speed of the best weights from which others are named as faster
SIXTEEN_BITS = "measured with 16-bit targets"  # of acceptance lengths that stand for quantised ones


@dataclass(frozen=True, slots=True)
class Weights:
    """Describes a target's weights as they can be had.

    Attributes:
        target: its configuration; its own quantisation, where it has one, included. variant: the row's pre-quantised
            repository; None for the target's own. quantize: what they are rounded to as they are read.
    """

    target: ModelConfig
    variant: Variant | None = None
    quantize: str | None = None

    @property
    def fidelity(self) -> int:
        if self.quantize is not None:
            return 2 if self.quantize.removeprefix("bnb-") in EIGHT_BITS else 4
        if self.variant is None:
            return 0
        return 1 if any(word in self.variant.format for word in EIGHT_BITS) else 3

    @property
    def bits(self) -> int:
        """Return the bits of a weight: 16, 8 or 4."""
        return (16, 8, 8, 4, 4)[self.fidelity]

    @property
    def name(self) -> str:
        if self.quantize is not None:
            return f"{self.quantize}, rounded at load"
        return "published weights" if self.variant is None else self.variant.name


@dataclass(frozen=True, slots=True)
class Option:
    """Pairs a plan of certain weights with its speed where it can be predicted.

    Attributes:
        config: what was asked for with the weights' format and the KV format of this plan.
        limit: tokens of context that were asked for, or that both models were made for.
    """

    weights: Weights
    drafter: Drafter | None
    config: LoadConfig
    plan: Plan
    prediction: Prediction | None
    limit: int

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def fidelity(self) -> str:
        words = FIDELITY[self.weights.fidelity]
        return f"{words}, KV cache in 8 bits" if self.coded_kv else words

    @property
    def name(self) -> str:
        dtype = "" if self.config.dtype == "auto" else f", {self.config.dtype}"
        return f"{self.weights.name}{dtype}{', 8-bit KV' if self.coded_kv else ''}"

    @property
    def coded_kv(self) -> bool:
        """Say whether keys and values are kept in 8 bits."""
        return self.config.kv_cache != "auto"

    @property
    def chat(self) -> bool:
        """Say whether it fits with room for a chat."""
        return self.fits and (self.plan.context or 0) >= min(USABLE, self.limit)

    @property
    def arguments(self) -> str:
        """Return what a command takes beside the model's name."""
        variant = "" if self.weights.variant is None else f"--variant {self.weights.variant.name}"
        own = self.config
        config = LoadConfig(
            quantize=own.quantize,
            kv_cache=own.kv_cache,
            dtype=own.dtype,
            drafter_precision=own.drafter_precision,
            offload=own.offload,
        )
        return " ".join(filter(None, (variant, *config.arguments())))

    @property
    def published_bytes(self) -> int | None:
        """Sum the files that its weights are read from, the text model alone; None where that cannot be computed."""
        if self.weights.variant is None:
            return formats.published_bytes(self.weights.target)
        book = self.plan.ledger
        lines = [line.bytes or 0 for line in (*book.lines, *book.host) if line.name in STORED]
        return sum(lines) if self.plan.stored else None

    @property
    def bytes_of_weights(self) -> int:
        """Sum target and head in device memory: what a step reads at most."""
        book = self.plan.ledger
        return sum(line.bytes or 0 for line in book.lines if line.name in ("target weights", "head"))

    def as_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights.name,
            "variant": None if self.weights.variant is None else self.weights.variant.name,
            "fidelity": self.fidelity,
            "arguments": self.arguments,
            "plan": self.plan.as_dict(),
            "prediction": None if self.prediction is None else self.prediction.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Lists options that fit, the best first; and those that do not, the nearest to the published weights first."""

    preference: Preference
    fitting: tuple[Option, ...]
    rest: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        return self.fitting[0] if self.fitting else None

    @property
    def smallest(self) -> Option | None:
        """Return what lacks the least memory of the options that do not fit; None where no need is known."""
        return min((one for one in self.rest if one.plan.lacking), key=lambda one: one.plan.lacking, default=None)

    @property
    def faster(self) -> Option | None:
        """Return the fastest of the options with room for a chat, with weights that somebody has measured; None where
        it is not faster than the best by ``FASTER``.
        """
        if self.best is None or self.best.prediction is None:
            return None
        known = [
            (one.prediction.least_tokens_per_s, one)
            for one in self.fitting
            if one.chat and one.prediction is not None and one.weights.fidelity < len(FIDELITY) - 1
        ]
        speed, found = max(known, key=lambda each: each[0], default=(0.0, None))
        return found if speed >= FASTER * self.best.prediction.least_tokens_per_s else None

    def as_dict(self) -> dict[str, Any]:
        better = self.next_better
        return {
            "preference": self.preference,
            "best": None if self.best is None else self.best.as_dict(),
            "others": [one.as_dict() for one in self.fitting[1:]],
            "next_better": None if better is None else {"weights": better.weights.name, "reason": better.plan.reason},
        }

    @property
    def next_better(self) -> Option | None:
        """Return the coarsest of the options with finer weights than the best that do not fit."""
        if self.best is None:
            return None
        finer = [one for one in self.rest if one.weights.fidelity < self.best.weights.fidelity]
        return max(finer, key=lambda one: one.weights.fidelity, default=None)


def recommend(
    published: Sequence[Weights],
    drafter: Drafter | None,
    machine: Machine,
    config: LoadConfig | None = None,
    preference: Preference = "balanced",
    acceptance: ExpectedAcceptance | None = None,
    measured: tuple[SpeedMeasurement, ...] = (),
    accepted: Mapping[str, Count] = MappingProxyType({}),
) -> Recommendation:
    """Plan every way to have a target's weights, in order.

    Args:
        published: the target's own weights first, then its variants. config: what is asked for; a ``quantize`` in it
            leaves only that. acceptance: lengths that are expected of the drafter. measured: on this card. accepted: in
            replies of this machine, by target; enough of them stand instead of the expected lengths.
    """
    config = config or LoadConfig()

    def options_of(each: Weights, config: LoadConfig = config) -> Iterator[Option]:
        limit = config.context or context_limit(each.target, drafter)
        wanted = limit if preference == "context" else min(limit, ROOMY)
        for asked, found in plans_of(each, drafter, machine, config, wanted):
            if preference == "context":  # a load by itself would stop where enough is left
                for made in room_made(found.load):
                    asked = made.applied(asked)
            lengths = acceptance
            if lengths is not None and each.fidelity > 0:
                lengths = replace(lengths, source=f"{lengths.source}; {SIXTEEN_BITS}")
            prediction = predict(found, each.target, drafter, lengths) if found.fits else None
            prediction = corrected(prediction, found, each.target.source, measured)
            own = accepted.get(each.target.source)
            if prediction is not None and found.load.draft and own is not None:
                prediction = own.predict(prediction)
            yield Option(each, drafter, asked, found, prediction, limit)

    own = published[0]

    def rounded(names: Iterable[str]) -> list[Weights]:
        return [replace(own, quantize=each) for each in names if not formats.refusal(own.target, each)]

    ways = [*published, *rounded(QUANTIZED)] if config.quantize is None else [replace(own, quantize=config.quantize)]
    options = [option for each in ways for option in options_of(each)]
    if not any(one.fits for one in options) and config.quantize is None:  # what is slow: the last resort
        if machine.kind == "cpu" and config.dtype == "auto" and all(one.plan.dtype == "float32" for one in options):
            options += options_of(own, replace(config, dtype="bfloat16"))
        slow = [each for each in BITSANDBYTES if each in formats_of(config)]
        options += [option for each in rounded(slow) for option in options_of(each)]
    fit = [one for one in options if one.fits]
    predicted = all(one.prediction is not None for one in fit)
    bits = frozenset(one.weights.bits for one in fit if one.chat and one.weights.quantize is None)
    fitting = sorted(fit, key=lambda one: rank(one, preference, predicted, bits))
    rest = sorted((one for one in options if not one.fits), key=lambda one: one.weights.fidelity)
    return Recommendation(preference, tuple(fitting), tuple(rest))


def plans_of(
    weights: Weights, drafter: Drafter | None, machine: Machine, config: LoadConfig, wanted: int
) -> Iterator[tuple[LoadConfig, Plan]]:
    """Plan certain weights; with KV in 8 bits, too, where nothing was asked for and 16 bits leave less context.

    Weights that would only be decoded again as they are read have none: that saves no memory.

    Args:
        wanted: tokens of context, see ``plan``.
    """
    asked = replace(config, quantize=weights.quantize)
    try:
        found = plan(weights.target, drafter, machine, asked, wanted=wanted)
        if config.quantize is None and weights.quantize in QUANTIZED and found.engine != FUSED:
            return
        yield asked, found
        if found.engine != FUSED or config.kv_cache != "auto" or (found.fits and (found.context or 0) >= wanted):
            return
        asked = CODED_KV.applied(asked)
        coded = plan(weights.target, drafter, machine, asked, wanted=wanted)
    except UsageError:  # an option that these weights cannot have
        return
    if coded.fits and not (found.fits and (coded.context or 0) <= (found.context or 0)):
        yield asked, coded


def rank(option: Option, preference: Preference, predicted: bool, published: frozenset[int]) -> tuple[float, ...]:
    """Rank an option: smaller is better. Whatever the preference, the first of these rules that tells two apart
    decides:

    1. Room for a chat, 8,192 tokens of context or all that the models have.
    2. An engine with kernels.
    3. What this program rounds to 4 bits comes last: nobody knows what that costs.
    4. No rounding at load where a published form of the same bits fits with room for a chat: it is a smaller download,
       and its makers chose its scales with data.

    Then ``balanced`` takes keys and values in 16 bits before 8; more context up to 32,768 tokens, in steps of 8,192;
    more bits before fewer, and published before rounded; more context up to 32,768; larger weights; speed. ``quality``
    takes more bits first, ``speed`` the fewest milliseconds a token, ``context`` the most tokens.

    Args:
        predicted: every option has a predicted speed; else the bytes of weights stand for it.
        published: bits of the published weights that fit with room for a chat.
    """
    context = option.plan.context or 0
    roomy = min(context, ROOMY)
    short, slow, kv = float(not option.chat), float(option.plan.engine != FUSED), float(option.coded_kv)
    rounded_here = option.weights.quantize is not None
    avoidable = float(rounded_here and option.weights.bits in published)
    fidelity = float(option.weights.fidelity)
    cost = float(option.bytes_of_weights)
    if predicted and option.prediction is not None:  # of a token at the shortest context, with the least of the lengths
        first, lengths = option.prediction.times[0], option.prediction.acceptance
        drafted = None if first.cycle_ms is None or lengths is None else first.cycle_ms / lengths.low
        cost = first.step_ms if drafted is None else drafted
    unmeasured = float(option.weights.fidelity == len(FIDELITY) - 1)
    weights = -float(option.bytes_of_weights)  # of one fidelity the larger ones are the finer
    order = {
        "balanced": (kv, -float(roomy // USABLE), fidelity, -roomy, weights, cost),
        "quality": (fidelity, kv, weights, -context),
        "speed": (kv, cost, fidelity, -context),
        "context": (-context, fidelity, kv, cost),
    }
    return short, slow, unmeasured, avoidable, *order[preference]
