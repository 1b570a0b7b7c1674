"""Are sampled tokens as frequent as the plain server's probabilities say? A chi-square test at fixed prefixes.

A prefix is a prompt and the sampled tokens before: the replies of many requests are the same up to there. The plain
server tells the probabilities of the next token with replies of its own, whose tokens are the control: where they do
not fit either, the server samples otherwise than asked, with drafts or without. Temperature is 1 and top-p ``TOP_P``,
so that both must be obeyed. No two replies have one seed; none are compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_local.bench import chi_square
from dflash_local.events import TokenLogprob

TOP_P = 0.95
DEPTH = 4  # tokens of a reply; all but the first may be drafts
LEVEL = 1e-5  # of each test; a run has four of the drafting server and two of the plain one
RARE = 0.12  # of the probability: its least likely tokens are looked at together, too
FITS = 1e-3
SHARE = 0.95  # of tries in which what the power names is found
EXPECTED = 5.0  # of a cell
BORDER = 0.01  # of top-p: rounding may move a token over it
SPILL = 0.005  # of all tokens: more of those that top-p leaves out are no rounding
OTHERS = tuple(percent / 100 for percent in range(90, 45, -5))  # top-p that a server may have taken in its place
PLENTY = 20.0  # tokens besides the likeliest one that must be expected before their absence says anything
Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A token at a prefix, or the rare ones together (None): how often it came, and was expected to."""

    path: Prefix
    token: int | None
    came: int
    expected: float

    @property
    def distance(self) -> float:
        """In its own standard deviations, near enough."""
        return (self.came - self.expected) / math.sqrt(self.expected)


@dataclass(frozen=True, slots=True)
class Fit:
    """A test over several prefixes.

    Attributes:
        outside: tokens that top-p leaves out. tail: the probability of a statistic as large; 1 where nothing is tested.
    """

    cells: tuple[TokenCount, ...]
    places: int
    outside: int

    @property
    def tokens(self) -> int:
        return sum(cell.came for cell in self.cells)

    @property
    def degrees(self) -> int:
        return len(self.cells) - self.places

    @property
    def tail(self) -> float:
        if not self.degrees:
            return 1.0
        return chi_square.tail(sum(cell.distance**2 for cell in self.cells), self.degrees)

    @property
    def wrong(self) -> bool:
        return self.tail < LEVEL or self.spills

    @property
    def spills(self) -> bool:
        """True where more tokens that top-p leaves out came than rounding lets through."""
        return self.outside > SPILL * self.tokens

    @property
    def worst(self) -> TokenCount:
        return max(self.cells, key=lambda cell: abs(cell.distance))

    @property
    def found_loss(self) -> float | None:
        """The share of the tokens that is missed in ``SHARE`` of all tries where they never come; None where nothing is
        tested. Tokens that come too seldom take more replies.
        """
        if not self.degrees:
            return None
        effect = chi_square.found_effect(self.degrees, LEVEL, SHARE)
        return effect / (self.tokens + effect)


@dataclass(frozen=True, slots=True)
class Nucleus:
    """What top-p is known to keep: token -> probability among these. Tokens at its border are left out of the count.

    Attributes:
        whole: all that it may keep is in ``kept`` or ``doubtful``; otherwise the row was too short for that.
    """

    kept: Mapping[int, float]
    doubtful: frozenset[int]
    whole: bool


def nucleus(row: TokenLogprob, top_p: float = TOP_P) -> Nucleus:
    """What top-p keeps of a row."""
    kept: dict[int, float] = {}
    doubtful: set[int] = set()
    before = 0.0
    for token, _, logprob, _ in row.top:
        if before >= top_p + BORDER:
            break
        value = math.exp(logprob)
        if before > top_p - BORDER:
            doubtful.add(token)
        else:
            kept[token] = value
        before += value
    total = sum(kept.values())
    return Nucleus(
        {token: value / total for token, value in kept.items()}, frozenset(doubtful), before >= top_p + BORDER
    )


def prefixes(replies: Sequence[Prefix]) -> dict[Prefix, Counter[int]]:
    """Prefix -> how often each token came next."""
    found: dict[Prefix, Counter[int]] = {}
    for reply in replies:
        for at, token in enumerate(reply):
            found.setdefault(reply[:at], Counter())[token] += 1
    return found


def fit(counts: Mapping[Prefix, Counter[int]], rows: Mapping[Prefix, TokenLogprob], top_p: float = TOP_P) -> Fit:
    """Test all prefixes whose probabilities are known."""
    cells: list[TokenCount] = []
    places = outside = 0
    for path, came in counts.items():
        if path not in rows:
            continue
        expected = nucleus(rows[path], top_p)
        known = expected.kept.keys() | expected.doubtful
        outside += sum(number for token, number in came.items() if expected.whole and token not in known)
        found = list(_cells(path, Counter({token: came[token] for token in expected.kept}), expected.kept))
        if len(found) > 1:
            places += 1
            cells += found
    return Fit(tuple(cells), places, outside)


def rare(counts: Mapping[Prefix, Counter[int]], rows: Mapping[Prefix, TokenLogprob]) -> Fit:
    """Test the least likely tokens of all prefixes as one: a narrower top-p takes a little from every prefix."""
    came = total = 0
    expected = 0.0
    for path, number in counts.items():
        if path not in rows:
            continue
        kept = nucleus(rows[path]).kept
        before, number_kept = 0.0, sum(number[token] for token in kept)
        for token, value in kept.items():
            if before >= 1 - RARE:
                came += number[token]
                expected += number_kept * value
            before += value
        total += number_kept
    if min(expected, total - expected) < EXPECTED:
        return Fit((), 0, 0)
    return Fit((TokenCount((), None, came, expected), TokenCount((), None, total - came, total - expected)), 1, 0)


def _cells(path: Prefix, came: Counter[int], expected: Mapping[int, float]) -> Iterator[TokenCount]:
    """One for each token that is expected often enough, and one for all others."""
    total = sum(came.values())
    often = {token: total * value for token, value in expected.items() if total * value >= EXPECTED}
    rest = total - sum(often.values())
    if often and rest < EXPECTED:  # the rare ones join the rarest
        token = min(often, key=lambda one: often[one])
        rest += often.pop(token)
    for token, number in often.items():
        yield TokenCount(path, token, came[token], number)
    if rest >= EXPECTED:
        yield TokenCount(path, None, total - sum(came[token] for token in often), rest)


@dataclass(frozen=True, slots=True)
class SampledFinding:
    """What sampled replies to one or several prompts show.

    Attributes:
        first, later: of the drafting server, tokens at the prompt's end and behind it. seldom: of both, see ``rare``.
        control: of the plain server.
        name: of the fault in words; empty where there is none. at_plain: the plain server has it as well.
    """

    first: Fit
    later: Fit
    seldom: Fit
    control: Fit
    name: str
    at_plain: bool

    @property
    def wrong(self) -> bool:
        return bool(self.name)

    @property
    def line(self) -> str:
        """Say what was found, and how large a fault would have been."""
        losses = [each.found_loss for each in (self.first, self.later)]
        tokens, places = self.first.tokens + self.later.tokens, self.first.places + self.later.places
        tested = f"{tokens:,} sampled tokens at {places} prefixes"
        if losses == [None, None]:
            return f"sampled: not tested, too few replies are alike ({tested})"
        places_of = ("at the first token", "behind it")
        known = [f"of {100 * loss:.2g} % {where}" for loss, where in zip(losses, places_of) if loss is not None]
        sensible = f"tokens {' and '.join(known)} that never came would be found in {100 * SHARE:.0f} of 100 runs"
        return f"sampled: {self.name or f'{tested} are as frequent as the plain server says'}; {sensible}"


def judge(
    drafted: Sequence[tuple[int, Prefix]], plain: Sequence[tuple[int, Prefix]], rows: Mapping[Prefix, TokenLogprob]
) -> SampledFinding:
    """Compare the drafting server's tokens with the plain one's probabilities.

    Args:
        drafted, plain: prompt and reply; rows: at prefixes that begin with the prompt's number.
    """
    counts, control = (prefixes([(prompt, *reply) for prompt, reply in replies]) for replies in (drafted, plain))
    one: dict[Prefix, Counter[int]] = {path: each for path, each in counts.items() if len(path) == 1}
    more = {path: each for path, each in counts.items() if len(path) > 1}
    own = {path: each for path, each in control.items() if path}
    every: dict[Prefix, Counter[int]] = {**one, **more}
    first, later, seldom, plain_fit = fit(one, rows), fit(more, rows), rare(every, rows), fit(own, rows)
    if plain_fit.wrong or rare(own, rows).wrong:
        name = _name(own, rows) or f"it does not sample as asked: {_cell(plain_fit.worst)}"
        return SampledFinding(first, later, seldom, plain_fit, f"the plain server, too: {name}", True)
    if not (first.wrong or later.wrong or seldom.wrong or fit(every, rows).wrong):
        return SampledFinding(first, later, seldom, plain_fit, "", False)
    name = _name(every, rows)
    if not name and seldom.wrong and not (first.wrong or later.wrong):
        name = f"unlikely tokens come too often or too seldom: {_cell(seldom.cells[0])}"
    if not name and not first.wrong:
        name = f"tokens behind the first one, which may be drafts, come too often or too seldom: {_cell(later.worst)}"
    name = name or f"the first token of a reply comes with other frequencies already: {_cell(first.worst)}"
    return SampledFinding(first, later, seldom, plain_fit, name, False)


def _name(counts: Mapping[Prefix, Counter[int]], rows: Mapping[Prefix, TokenLogprob]) -> str:
    """The fault in words where it is one of sampling itself; empty where it is none of these."""
    whole = fit(counts, rows)
    missed = came = 0.0
    for path, number in counts.items():
        if path in rows:
            kept = nucleus(rows[path]).kept
            total = sum(number.values())
            missed += total * (1 - max(kept.values()))
            came += total - max(number.values())  # of two that are as likely, rounding chooses
    if missed >= PLENTY and came <= missed / PLENTY:
        return "the temperature is ignored: it writes the same token at every prefix"
    if whole.spills:
        return f"{whole.outside} tokens came that top-p {TOP_P:g} leaves out: it samples from more than was asked for"
    for other in OTHERS:
        narrower = fit(counts, rows, other)
        if narrower.degrees and not narrower.spills and narrower.tail > FITS:
            return f"unlikely tokens never come: as with top-p {other:g} in place of {TOP_P:g}"
    return ""


def _cell(cell: TokenCount) -> str:
    what = "the rare ones" if cell.token is None else f"token {cell.token}"
    return f"{what} came {cell.came} times, {cell.expected:.0f} expected"
