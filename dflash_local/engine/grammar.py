"""Hold the text of a reply to a grammar: a mask for each row of logits, computed on the host by ``llguidance``.

A row's mask follows from the ids before it alone, so a text is the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from dflash_local.chat.answer_ids import AnswerIds, AnswerPlace
from dflash_local.chat.call_grammar import json_rule
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import Constraint
from dflash_local.shared_prefix import common_length

# Any split of a text into tokens is allowed: which one comes is the model's choice, as without a grammar.
OPTIONS = '%llguidance {"no_forcing": true}\n'
MAX_TOLD = 500  # characters of what is wrong with a grammar
WORD = 32  # ids in a word of a mask
ANSWER = AnswerPlace(True)  # which no token that a grammar allows leads out of


class Vocabulary:
    """A session's tokens as the matcher knows them. Control tokens have no text: no grammar allows them."""

    def __init__(self, tokenizer: Tokenizer, width: int, stop_ids: frozenset[int], device: torch.device) -> None:
        """``width``: of the target's logits, which are on ``device``."""
        self.stop_ids, self._width, self._device = stop_ids, width, device
        self.words = (width + WORD - 1) // WORD
        self._bits = torch.arange(WORD, dtype=torch.int32, device=device)
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(stop_ids), None
        self.special_token_ids: Sequence[int] = ()
        self.tokens = [self._bytes(token_id) for token_id in range(width)]
        self.library = LLTokenizer(TokenizerWrapper(self), eos_token=sorted(stop_ids))

    def masks(self, rows: int) -> torch.Tensor:
        """Return masks [M, words], a bit for each id, with which all ids may come."""
        pinned = self._device.type == "cuda"  # else the copy would wait for the target's pass
        return torch.full((rows, self.words), -1, dtype=torch.int32, pin_memory=pinned)

    def refused(self, masks: torch.Tensor) -> torch.Tensor:
        """Return the ids [M, V] that may not come by masks, on the device; nothing waits for it."""
        on_device = masks.to(self._device, non_blocking=True)
        allowed = (on_device.unsqueeze(-1) >> self._bits) & 1
        return allowed.flatten(1)[:, : self._width] == 0

    def _bytes(self, token_id: int) -> bytes:
        added = self._tokenizer.added.get(token_id)
        return b"" if added is not None and added.control else self._tokenizer.in_reply(token_id, False)[1] or b""

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text, as the library asks for where a grammar of its own options wants them."""
        return self._tokenizer.encode(text)

    def matcher(self, constraint: Constraint, told: str = "") -> LLMatcher:
        """Return a matcher at its beginning. UsageError: the library does not take the grammar.

        Args:
            told: what the grammar is to the user, where that is not its kind.
        """
        matcher = LLMatcher(self.library, OPTIONS + _lark(constraint), log_level=0)
        if matcher.is_error():
            raise _refused(told or constraint.kind, matcher.get_error())
        return matcher


def _lark(constraint: Constraint) -> str:
    if constraint.kind == "regex":
        return f"start: /{regex_to_lark(constraint.text, '')}/"
    try:
        if constraint.kind == "lark":
            return any_to_lark(constraint.text)
        schema = {"type": "object"} if constraint.kind == "json_object" else parse_json(constraint.text)
        return f"start: {json_rule(schema)}"
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise _refused(constraint.kind, str(error)) from error


def _refused(told: str, why: str) -> UsageError:
    return UsageError(f"the {told} cannot be held to: {' '.join(why.split())[:MAX_TOLD]}", "send another one")


class _Draft(NamedTuple):
    """``consumed``: by the matcher, as part of the answer. ``behind``: the place that it leads to."""

    token_id: int
    consumed: bool
    behind: AnswerPlace


class _Allowed:
    """Ids that may come next.

    Attributes:
        mask: [words]. only: the one id, where there is no other.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask
        words = mask.nonzero().flatten().tolist()
        bits = int(mask[words[0]]) % 2**WORD if len(words) == 1 else 0
        self.only = words[0] * WORD + bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def __contains__(self, token_id: int) -> bool:
        return bool(int(self.mask[token_id // WORD]) >> token_id % WORD & 1)


class Grammar:
    """The grammar of one reply; see ``engine.sampling.Guide``.

    The matcher goes over a cycle's drafts and back, as consuming a token is what takes it longest.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, answers: AnswerIds, place: AnswerPlace) -> None:
        """``place``: where the reply begins."""
        self._vocabulary, self._matcher, self._answers, self._place = vocabulary, matcher, answers, place
        self._ahead: list[_Draft] = []  # those that the matcher stands behind
        self._next: _Allowed | None = None  # behind the text
        self._refused: torch.Tensor | None = None  # in the cycle's rows [M, V]; None: all may come

    def apply(self, logits: torch.Tensor, drafts: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return logits [M, V], minus infinity where a token is not allowed. Rows behind a draft that is not, or that
        ends the reply, are as they were: nothing of them is emitted.
        """
        if self._refused is None:
            return logits
        return logits.masked_fill(self._refused[first : first + len(logits)], float("-inf"))

    def begin(self) -> None:
        """Compute the mask of the row behind the text."""
        if self._next is None and self._place.answers:
            self._next = self._allowed_here()

    def forced(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts up to one that is not allowed or ends the reply. Where one token alone is allowed, it takes
        the place of a draft that is not.
        """
        found = list(drafts)
        self._go_back(0)
        while (at := self._count_allowed(found)) < len(found):
            self._reach(found[:at])
            if not self._place_ahead.answers or self._ends(found[at]):
                return found[: at + 1]
            only = (self._allowed_here() if at or self._next is None else self._next).only
            if only is None:
                return found[: at + 1]
            found[at] = only
        return found

    def prepare(self, drafts: Sequence[int], rows: int) -> None:
        """Compute the masks of the rows behind the text and behind each of the drafts; of further ones nothing is
        emitted.
        """
        masks = self._vocabulary.masks(rows)
        masked = False
        self._go_back(0)
        for row, mask in enumerate(masks):
            if row == 0 and self._next is not None:
                mask.copy_(self._next.mask)
                masked = True
            elif self._place_ahead.answers:
                self._write(mask, self._place_ahead)
                masked = True
            if row == len(drafts) or not self._advance(drafts[row]):
                break
        self._refused = self._vocabulary.refused(masks) if masked else None

    def accept(self, ids: Sequence[int]) -> None:
        """Take ids as emitted. UsageError: one is not allowed, as there was none that is."""
        taken = self._reach(ids)
        self._place, self._next = self._place_ahead, None
        self._ahead.clear()
        if taken < len(ids) and not self._ends(ids[taken]):
            raise UsageError("the constraint cannot be met: no token of this model goes on with it", "send another one")

    @property
    def _place_ahead(self) -> AnswerPlace:
        return self._ahead[-1].behind if self._ahead else self._place

    def _ends(self, token_id: int) -> bool:
        """Return whether an id ends the reply where the matcher stands."""
        may_end = not self._place_ahead.answers or self._matcher.is_accepting()
        return token_id in self._vocabulary.stop_ids and may_end

    def _count_allowed(self, ids: list[int]) -> int:
        """Count the ids up to one that ends the reply or is not allowed. The matcher stands behind the first of them
        already.
        """
        begun = len(self._ahead)
        if not begun and self._next is not None and ids[0] not in self._next:
            return 0
        if self._place_ahead != ANSWER:
            return self._reach(ids)
        ends = next((at for at in range(begun, len(ids)) if ids[at] in self._vocabulary.stop_ids), len(ids))
        return begun + self._matcher.validate_tokens(ids[begun:ends])

    def _reach(self, ids: Sequence[int]) -> int:
        """Go over the ids up to one that ends the reply or is not allowed; how many they are."""
        self._go_back(common_length([draft.token_id for draft in self._ahead], ids))
        for token_id in ids[len(self._ahead) :]:
            if not self._advance(token_id):
                break
        return len(self._ahead)

    def _advance(self, token_id: int) -> bool:
        place = self._place_ahead
        consumed = place.answers and token_id not in place.free
        if token_id in self._vocabulary.stop_ids or (consumed and not self._matcher.try_consume_tokens([token_id])):
            return False
        self._ahead.append(_Draft(token_id, consumed, self._answers.after(place, token_id)))
        return True

    def _go_back(self, count: int) -> None:
        """Stand behind so many drafts only."""
        if consumed := sum(draft.consumed for draft in self._ahead[count:]):
            self._matcher.rollback(consumed)
        del self._ahead[count:]

    def _allowed_here(self) -> _Allowed:
        mask = torch.empty(self._vocabulary.words, dtype=torch.int32)
        self._write(mask, self._place_ahead)
        return _Allowed(mask)

    def _write(self, mask: torch.Tensor, place: AnswerPlace) -> None:
        """Write what is allowed: of the stop ids all where the text may end, else none."""
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        for token_id in place.free:
            bit = 1 << token_id % WORD
            mask[token_id // WORD] |= bit if bit < 2**31 else bit - 2**32
