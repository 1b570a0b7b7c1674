"""What a pair comes to on a machine, computed once for ``plan``, ``show``, ``models`` and the screens.

``recommended`` puts the ways to have its weights in order, ``summary`` says what the best of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_local.app.fitting import Shapes, as_json, machine, row_choice, shapes
from dflash_local.app.models import ModelStore, download_gib, model_store, registry
from dflash_local.app.notices import Notify
from dflash_local.app.resolve import Choice, Suit, missing_files, size_gib, with_local_mirror
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import Notice
from dflash_local.load_config import FUSED, LoadConfig
from dflash_local.tables import GIB, UNKNOWN, rate

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row, Variant
    from dflash_local.config.features import ModelConfig
    from dflash_local.drafters.drafter import Drafter
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.recommend import Option, Preference, Recommendation
    from dflash_local.planner.room import MoreContext
    from dflash_local.planner.speed import ExpectedAcceptance
    from dflash_local.settings import Settings

Told = TypeVar("Told")

SLOW = 3.0  # tokens/s below which nobody waits for a reply


@dataclass(frozen=True, slots=True)
class Summary:
    """Says what a pair comes to on a machine.

    Attributes:
        fits: a word or two. recommendation: None for what no machine runs in this process, or of which too little is
            known. plan: what runs, else the nearest that does; None where none is known to.
        download_gib: of all files of the best weights and the drafter, or of the smallest where nothing fits; None
            where it is not known. computed: it is counted from shapes, the text model alone, and quoted by no source.
    """

    pair: str
    fits: str
    recommendation: Recommendation | None = None
    plan: Plan | None = None
    download_gib: float | None = None
    computed: bool = False

    @property
    def best(self) -> Option | None:
        """Return what to run; None where nothing fits."""
        return None if self.recommendation is None else self.recommendation.best

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Predict it without the drafter, behind the shortest of the contexts; None where no speed is predicted."""
        prediction = self.best.prediction if self.best else None
        return None if prediction is None else prediction.times[0].plain_tokens_per_s

    @property
    def drafted_tokens_per_s(self) -> tuple[float, float] | None:
        """Predict it with the drafter, at the lowest and at the highest expected acceptance length."""
        prediction = self.best.prediction if self.best else None
        return None if prediction is None else prediction.drafted_tokens_per_s(prediction.times[0])

    @property
    def tokens_per_s(self) -> float | None:
        """Return what to count on, see ``Prediction``; None where no speed is predicted."""
        prediction = self.best.prediction if self.best else None
        return None if prediction is None else prediction.least_tokens_per_s

    @property
    def slow(self) -> str:
        """Say that it would be too slow for a chat; empty where it would not be, or no speed is predicted."""
        speed = self.tokens_per_s
        if speed is None or speed >= SLOW:
            return ""
        return f"would write {rate(speed)} tokens/s here, below the {SLOW:g} that a chat needs"

    @property
    def command(self) -> str:
        """Write what begins a chat with it; nothing where nothing fits."""
        return f"dflash chat {self.pair} {self.best.arguments}".strip() if self.best else ""

    def as_dict(self) -> dict[str, Any]:
        """Make the JSON form, the same under every command."""
        best = self.best
        lengths = None if best is None or best.prediction is None else best.prediction.acceptance
        return {
            "pair": self.pair,
            "fits": self.fits,
            "weights": best and best.name,
            "command": self.command or None,
            "download_gib": self.download_gib,
            "download_computed": self.computed,
            "context": best and best.plan.context,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "drafted_tokens_per_s": self.drafted_tokens_per_s and list(self.drafted_tokens_per_s),
            "acceptance_source": lengths and lengths.source,
        }


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """Plans a pre-quantised target of a row; no plan where its recipe is not known before it is here."""

    variant: Variant
    plan: Plan | None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    def as_dict(self) -> dict[str, Any]:
        found = None if self.plan is None else as_json(self.plan)
        return {"name": self.variant.name, "repo": self.variant.repo, "fits": self.fits, "plan": found}


@dataclass(frozen=True, slots=True)
class PairPlans:
    """Holds what the planner says of a pair on a machine.

    Attributes:
        plan: of the best weights; where nothing fits of those that lack the least memory. nearest: what fits then,
            with less than was asked for.
        table: a plan for each format of the target's own weights. to_fetch: for the best weights, as
            ``download_of`` has it. over_two: what two such cards hold, where one does not hold the pair.
    """

    where: Machine
    known: Shapes | None
    summary: Summary
    plan: Plan | None = None
    nearest: Plan | None = None
    table: tuple[Plan, ...] = ()
    variants: tuple[VariantPlan, ...] = ()
    to_fetch: tuple[float | None, bool] = (None, False)
    over_two: Option | None = None

    @property
    def more_context(self) -> MoreContext | None:
        """Plan what makes room for more context than the best weights have; worked out when it is asked for."""
        from dflash_local.planner.room import more_context

        best = self.summary.best
        return None if best is None else more_context(best)


def pair_plans(
    choice: Choice,
    known: Shapes | None,
    where: Machine,
    user: Settings,
    config: LoadConfig | None = None,
    *,
    preference: Preference = "balanced",
    store: ModelStore | None = None,
) -> PairPlans:
    """Make the summary of a pair, the plan behind it, and one for each format and variant.

    Raises:
        UsageError: what no machine could do, see ``planner.plan.plan``.
    """
    found = summary(choice, known, where, user, config, preference=preference, store=store)
    if known is None:
        return PairPlans(where, None, found)
    from dflash_local.planner.plan import fits_table, plan

    if choice.why_not_here:
        return PairPlans(where, known, found, plan(known.target, known.drafter, where, runs_on="server"))
    config = config or LoadConfig()
    drafter = known.drafter if config.draft else None
    option = found.recommendation and (found.best or found.recommendation.smallest)
    best = option.plan if option else plan(known.target, known.drafter, where, config)
    near = None if best.fits else found.plan
    table = fits_table(known.target, drafter, where, config)
    variants = variant_plans(choice.target_row, known, where, config, store)
    lacking = (None, False) if found.best is None else download_of(choice, found.best, store, here=True)
    two = None if found.best else over_two(choice, known, where, user, config, preference=preference, store=store)
    return PairPlans(where, known, found, best, near, table, variants, lacking, two)


def over_two(
    choice: Choice,
    known: Shapes,
    where: Machine,
    user: Settings,
    config: LoadConfig,
    *,
    preference: Preference = "balanced",
    store: ModelStore | None = None,
) -> Option | None:
    """Plan the best weights over two such cards, with a context that is of use; None where they hold none."""
    from dflash_local.planner.plan import USABLE, context_limit

    if where.count > 1 or where.cards or where.kind not in ("cuda", "named"):
        return None
    drafter = known.drafter if config.draft else None
    chat = replace(config, context=config.context or min(USABLE, context_limit(known.target, drafter)))
    pair = replace(where, others=(where,))
    ways = over_all(choice, known, pair, user, chat, preference=preference, store=store)
    return None if ways is None else ways.best


def over_all(
    choice: Choice,
    known: Shapes,
    where: Machine,
    user: Settings,
    config: LoadConfig,
    *,
    preference: Preference = "balanced",
    store: ModelStore | None = None,
) -> Recommendation | None:
    """Plan every way to have a pair's weights over all GPUs of a machine, of more than two over those with most free
    memory where the engine takes two; None where no engine takes the options so.
    """

    def spread(together: Machine) -> Recommendation:
        asked = replace(config, device=together.device)
        return recommended(choice, known, together, user, asked, preference=preference, store=store)

    try:
        found, two = spread(where.together()), where.roomiest_two()
        best = found.best or found.smallest
        return spread(two) if two is not None and best is not None and best.plan.engine == FUSED else found
    except UsageError:  # a target and an option of which one is for the fused engine, and one is not
        return None


def row_summary(row: Row, where: Machine, user: Settings, preference: Preference = "balanced") -> Summary:
    """Sum up a pair of the registry, as every list of pairs shows it; see ``summary``."""

    def told(choice: Choice, known: Shapes | None, store: ModelStore | None) -> Summary:
        return summary(choice, known, where, user, preference=preference, store=store)

    return _of_row(row, user, told)


def row_over_two(row: Row, where: Machine, user: Settings, preference: Preference = "balanced") -> Option | None:
    """Plan a pair of the registry over two such cards; see ``over_two``."""

    def told(choice: Choice, known: Shapes | None, store: ModelStore | None) -> Option | None:
        if known is None:
            return None
        return over_two(choice, known, where, user, LoadConfig(), preference=preference, store=store)

    return _of_row(row, user, told)


def _of_row(row: Row, user: Settings, told: Callable[[Choice, Shapes | None, ModelStore | None], Told]) -> Told:
    """Return what is told of a row's choice, shapes and downloads."""
    choice, store = row_choice(row, user), model_store(user)
    try:
        return told(choice, shapes(choice, store), store)
    except DFlashError:  # a tampered download: a list tells it beside the pair
        return told(choice, shapes(choice, None), None)


def summary(
    choice: Choice,
    known: Shapes | None,
    where: Machine,
    user: Settings,
    config: LoadConfig | None = None,
    *,
    preference: Preference = "balanced",
    store: ModelStore | None = None,
    variants: bool = True,
) -> Summary:
    """Sum up what a pair comes to on a machine; it need not be a row's.

    Args:
        variants: a pre-quantised target that is published of it counts as the pair.
    """
    from dflash_local.planner.plan import nearest

    if choice.why_not_here or known is None:
        return Summary(choice.name, "server" if choice.why_not_here else UNKNOWN, download_gib=_own_download(choice))
    found = recommended(choice, known, where, user, config, preference=preference, store=store, variants=variants)
    if (best := found.best) is not None:
        as_published = best.weights.fidelity == 0 and best.config.dtype == (config or LoadConfig()).dtype
        word = "fits" if as_published else f"fits in {best.plan.format.partition(' ')[0]}"
        return Summary(choice.name, word, found, best.plan, *download_of(choice, best))
    size = (_own_download(choice), False) if found.smallest is None else download_of(choice, found.smallest)
    if (near := nearest(known.target, known.drafter, where, config)) is not None:
        word = f"fits in {near.format}" if near.load.draft or known.drafter is None else "target alone"
        return Summary(choice.name, word, found, near, *size)
    least = None if found.smallest is None else found.smallest.plan.ledger.total
    word = UNKNOWN if least is None else f"needs {-(-least // GIB):,} GiB"
    return Summary(choice.name, word, found, None, *size)


def _own_download(choice: Choice) -> float | None:
    return None if choice.drafter_row is None else download_gib(choice.drafter_row)


def download_of(
    choice: Choice, option: Option, store: ModelStore | None = None, here: bool = False
) -> tuple[float | None, bool]:
    """Return GiB of the files of an option, and whether they are computed: a target that no source quotes.

    Args:
        here: only the files that are not on this machine count; 0 where all of them are.
    """
    own = choice if option.weights.variant is None else choice.with_variant(option.weights.variant)
    if here and store is not None:
        roles = tuple(missing_files(with_local_mirror(own, store), store, option.plan.load.draft))
    else:
        roles = tuple(role for role in own.roles if here or role == "target" or option.plan.load.draft)
    quoted = size_gib(own, roles) if roles else 0.0
    if quoted is not None or "target" not in roles:
        return quoted, False
    rest = [role for role in roles if role != "target"]
    drafter, target = size_gib(own, rest) if rest else 0.0, option.published_bytes
    return (None, False) if drafter is None or target is None else (target / GIB + drafter, True)


def variant_targets(row: Row | None, store: ModelStore | None) -> Iterator[tuple[Variant, ModelConfig | None]]:
    """Yield a row's pre-quantised targets; no shape where the recipe is not known before it is here."""
    for variant in row.variants if row is not None else ():
        found = shapes(Choice(variant.model, variant.source, None, row), store)
        yield variant, None if found is None else found.target


def variant_plans(
    row: Row | None, known: Shapes, where: Machine, load: LoadConfig, store: ModelStore | None = None
) -> tuple[VariantPlan, ...]:
    """Plan each pre-quantised target that the registry lists beside a row's own target.

    Args:
        known: of the row's own target; its drafter is every variant's. load: what is asked for; a variant brings its
            own weight format.
    """
    from dflash_local.planner.plan import plan

    found = []
    for variant, target in variant_targets(row, store):
        made = None
        if target is not None:
            with suppress(UsageError):  # an option that this target cannot have
                made = plan(target, known.drafter, where, replace(load, quantize=None))
        found.append(VariantPlan(variant, made))
    return tuple(found)


def recommended(
    choice: Choice,
    known: Shapes,
    where: Machine,
    user: Settings,
    config: LoadConfig | None = None,
    *,
    preference: Preference = "balanced",
    store: ModelStore | None = None,
    variants: bool = True,
) -> Recommendation:
    """Plan every way to have a pair's weights on a machine, the best first.

    Args:
        known: shapes of the choice's target and drafter. user: whose records of this card's times and of replies
            correct the predictions. config: what is asked for. variants: the row's pre-quantised targets count, too.
    """
    from dflash_local.planner.acceptance_record import AcceptanceRecord
    from dflash_local.planner.recommend import SIXTEEN_BITS, Weights, recommend
    from dflash_local.planner.speed_record import SpeedRecord
    from dflash_local.store.paths import speeds_folder

    folder = speeds_folder(user)
    measured = SpeedRecord(folder, where.name).read()
    accepted = AcceptanceRecord(folder).read() if choice.counted else {}
    drafter = known.drafter if config is None or config.draft else None
    lengths = None if drafter is None else _expected_lengths(choice, drafter, user)
    if lengths is not None and choice.target_row is None and known.target.quantization is not None:
        lengths = replace(lengths, source=f"{lengths.source}; {SIXTEEN_BITS}")
    targets = variant_targets(choice.target_row if variants else None, store)
    weights = [Weights(known.target), *(Weights(target, one) for one, target in targets if target is not None)]
    return recommend(weights, drafter, where, config, preference, lengths, measured, accepted)


def _expected_lengths(choice: Choice, drafter: Drafter, user: Settings) -> ExpectedAcceptance | None:
    """Return what is published of a drafter with its own block, else what is typical of others. None of a toy, and of
    a drafter that stores nothing: what it copies depends on the text alone.
    """
    from dflash_local.planner.speed import acceptance, typical

    if not drafter.stored:
        return None
    row, kind, generation = choice.drafter_row, "dflash", None
    if row is not None:
        found = acceptance(row.published, drafter.block_size)
        if found is not None or row.bundled:
            return found
        kind, generation = row.kind, row.fingerprints[0].generation if row.fingerprints else None
    elif choice.row is not None and (other := choice.row.other_drafter(str(getattr(choice.drafter, "id", "")))):
        kind = other.kind
    return typical(registry(user).rows, kind, drafter.block_size, generation)


def suited(load: LoadConfig, user: Settings, notify: Notify) -> Suit:
    """Let ``resolve`` take a pre-quantised target of a row that is here, or where its own does not fit this machine.

    Nothing changes where its own is here, for another drafter, or where the weights' format was asked for.
    """

    def suit(choice: Choice, store: ModelStore) -> Choice:
        row = choice.target_row
        if row is None or not choice.own_drafter or load.quantize is not None:
            return choice
        here = None if row.target is None else store.find(row.target)
        known = None if here is not None and here.complete else shapes(choice, store)
        if known is None or not load.fit_check:
            return choice
        found = recommended(choice, known, machine(user, device=load.device), user, load, store=store)
        kept = _kept(found, store)
        best = kept or found.best
        if best is None or best.weights.fidelity == 0 or best.weights.variant is None:
            return choice
        variant = best.weights.variant
        why = found.rest[0].plan.reason if found.rest else f"{row.name} leaves too little context"
        notify(Notice(f"{variant.model} ({best.fidelity}) is taken: {'it is here' if kept else why}"))
        return choice.with_variant(variant)

    return suit


def _kept(found: Recommendation, store: ModelStore) -> Option | None:
    """Return the best of the pre-quantised targets that are here, where it has room for a chat and no slower engine."""
    for option in found.fitting:
        variant = option.weights.variant
        if variant is not None and option.chat and option.plan.engine == found.fitting[0].plan.engine:
            with suppress(DFlashError):  # a damaged repository is not here
                here = store.find(variant.source)
                if here is not None and here.complete:
                    return option
    return None
