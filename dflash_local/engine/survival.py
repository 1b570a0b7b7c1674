"""Learn how far drafts survive: what a drafter's confidence in each of them is worth. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_SHARE = 0.8  # the guess for a draft of any confidence
LOWEST, HIGHEST, STEP = -2.0, 7.0, 0.5  # of the buckets of confidence
MOST = 0.995  # share of drafts accepted that is believed
MEMORY = 64.0  # drafts that a share remembers
LEAN = 4.0  # drafts that the guess counts for which a bucket or a slot leans on
UNSEEN = 1 / 64  # of what is known of a bucket and of all drafts, with each block of which none was verified
FORGET = 1 / 256  # of what is known of a slot, with each block that could have verified it


class _Share:
    """Of drafts, the part that was accepted, of so many as were ``expected`` to be if all were alike; old ones fade."""

    def __init__(self) -> None:
        self.expected = self.accepted = 0.0

    def add(self, expected: float, accepted: bool, memory: float) -> None:
        if self.expected:
            self.forget(max(0.0, 1.0 - (memory - 1.0) / self.expected))
        self.expected += expected
        self.accepted += accepted

    def forget(self, part: float) -> None:
        self.expected *= 1.0 - part
        self.accepted *= 1.0 - part

    def leaning_on(self, guess: float) -> float:
        """Return the share, as if a guess had come true in a few drafts besides."""
        return (self.accepted + LEAN * guess) / (self.expected + LEAN)


class Survival:
    """The chance of each draft of a block to be accepted.

    Of drafts whose predecessors were accepted, a share is accepted too, which is that of its bucket of confidence times
    a factor of its slot in the block. The product of the first k shares is the survival s_k.
    """

    def __init__(self, drafts: int) -> None:
        """Begin with nothing known of blocks of so many drafts."""
        self._all = _Share()
        self._buckets = [_Share() for _ in range(_bucket(HIGHEST) + 1)]
        self._slots = [_Share() for _ in range(drafts)]
        self._factors = [1.0] * drafts
        self._weigh()

    @property
    def _shares(self) -> tuple[_Share, ...]:
        return self._all, *self._buckets, *self._slots

    @property
    def learnt(self) -> list[float]:
        """Return what ``recall`` takes."""
        return [count for share in self._shares for count in (share.expected, share.accepted)]

    def recall(self, learnt: Sequence[float]) -> None:
        """Begin with what was learnt before, of blocks as long."""
        numbers = iter(learnt)
        for share in self._shares:
            share.expected, share.accepted = next(numbers), next(numbers)
        self._weigh()

    def tokens_by_rows(self, confidences: Sequence[float]) -> list[float]:
        """Return the tokens expected of cycles of 1, 2, ... rows: 1 + s_1 + s_2 + ...; a draft that was not made counts
        as one of all.
        """
        emitted, tokens, alive, weights = [1.0], 1.0, 1.0, self._weights  # the device waits for this
        shares = [weights[_bucket(each)] for each in confidences[: len(self._factors)]]
        shares += [self._guess] * (len(self._factors) - len(shares))
        for share, factor in zip(shares, self._factors):
            alive *= min(share * factor, MOST)
            tokens += alive
            emitted.append(tokens)
        return emitted

    def learn(self, rows: int, accepted: int, confidences: Sequence[float], memory: float = MEMORY) -> None:
        """Learn from a block of which ``rows`` - 1 drafts were verified. Slots that were not are slowly forgotten where
        they might have been reached, so that their guess comes from the slots before them.

        Args:
            memory: drafts that a bucket remembers.
        """
        if rows == 1:  # of a bucket that is never verified, and of what it leans on, nothing would be learnt
            self._buckets[_bucket(confidences[0])].forget(UNSEEN)
            self._all.forget(UNSEEN)
        for slot in range(min(accepted + 1, rows - 1)):
            hit, factor = slot < accepted, self._factors[slot]
            bucket = _bucket(confidences[slot] if slot < len(confidences) else 0.0)
            self._slots[slot].add(self._buckets[bucket].leaning_on(self._all.leaning_on(FIRST_SHARE)), hit, MEMORY)
            self._buckets[bucket].add(factor, hit, memory)
            self._all.add(factor, hit, memory)
        if accepted == rows - 1 > 0:
            for share in self._slots[accepted:]:
                share.forget(FORGET)
        self._weigh()

    def _weigh(self) -> None:
        """Find what a draft of each bucket is worth, and the factor of each slot."""
        self._guess = self._all.leaning_on(FIRST_SHARE)
        self._weights = [share.leaning_on(self._guess) for share in self._buckets]
        before = 1.0
        for slot, share in enumerate(self._slots):
            before = self._factors[slot] = share.leaning_on(before)


def _bucket(confidence: float) -> int:
    return int((min(max(LOWEST, confidence), HIGHEST) - LOWEST) / STEP)  # one that is no number is the lowest
