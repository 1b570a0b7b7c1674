"""Hold the text of a reply to a grammar: a mask for each row of logits, computed on the host by ``llguidance``.

A row's mask follows from the ids before it alone, so a text is the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from dflash_local.chat.answer_ids import AnswerIds, AnswerPlace
from dflash_local.chat.call_grammar import json_rule
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import Constraint

# Any split of a text into tokens is allowed: which one comes is the model's choice, as without a grammar.
OPTIONS = '%llguidance {"no_forcing": true}\n'
MAX_TOLD = 500  # characters of what is wrong with a grammar
WORD = 32  # ids in a word of a mask


class Vocabulary:
    """A session's tokens as the matcher knows them. Control tokens have no text: no grammar allows them."""

    def __init__(self, tokenizer: Tokenizer, width: int, stop_ids: frozenset[int]) -> None:
        """``width``: of the target's logits."""
        self.stop_ids = stop_ids
        self.words = (width + WORD - 1) // WORD
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(stop_ids), None
        self.special_token_ids: Sequence[int] = ()
        self.tokens = [self._bytes(token_id) for token_id in range(width)]
        self.library = LLTokenizer(TokenizerWrapper(self), eos_token=sorted(stop_ids))

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
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise _refused(constraint.kind, str(error)) from error
    return f"start: {json_rule(schema)}"


def _refused(told: str, why: str) -> UsageError:
    return UsageError(f"the {told} cannot be held to: {' '.join(why.split())[:MAX_TOLD]}", "send another one")


class Grammar:
    """The grammar of one reply; see ``engine.sampling.Guide``."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, answers: AnswerIds, place: AnswerPlace) -> None:
        """``place``: where the reply begins."""
        self._vocabulary, self._matcher, self._answers, self._place = vocabulary, matcher, answers, place
        self._masks: torch.Tensor | None = None  # of the cycle's rows [M, words], a bit for each id; None: all may come

    def apply(self, logits: torch.Tensor, drafts: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return logits [M, V], minus infinity where a token is not allowed. Rows behind a draft that is not, or that
        ends the reply, are as they were: nothing of them is emitted.
        """
        if self._masks is None:
            return logits
        masks = self._masks[first : first + len(logits)]
        shifts = torch.arange(WORD, dtype=torch.int32, device=logits.device)
        allowed = (masks.to(logits.device).unsqueeze(-1) >> shifts) & 1
        return logits.masked_fill(allowed.flatten(1)[:, : logits.shape[-1]] == 0, float("-inf"))

    def forced(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts, with those that are not allowed replaced where one token alone is."""
        found, mask = list(drafts), torch.empty(self._vocabulary.words, dtype=torch.int32)
        for at, (matcher, place) in enumerate(self._rows(found)):  # which go on behind what is put in here
            if at < len(found) and place.answers and not self._takes(matcher, place, found[at]):
                self._write(mask, matcher, place)
                words = mask.nonzero().flatten().tolist()
                bits = int(mask[words[0]]) % 2**WORD if len(words) == 1 else 0
                if bits.bit_count() == 1:
                    found[at] = words[0] * WORD + bits.bit_length() - 1
        return found

    def prepare(self, drafts: Sequence[int]) -> None:
        """Compute the masks of the rows behind the text and behind each of the drafts."""
        masks = torch.full((len(drafts) + 1, self._vocabulary.words), -1, dtype=torch.int32)
        masked = False
        for mask, (matcher, place) in zip(masks, self._rows(drafts)):
            if place.answers:
                self._write(mask, matcher, place)
                masked = True
        self._masks = masks if masked else None

    def _rows(self, drafts: Sequence[int]) -> Iterator[tuple[LLMatcher, AnswerPlace]]:
        """Yield where each row stands: behind the text, then behind each draft, up to one that ends the reply or is not
        allowed.
        """
        matcher, place = self._matcher.deep_copy(), self._place
        yield matcher, place
        for draft in drafts:
            if draft in self._vocabulary.stop_ids or (place.answers and not self._takes(matcher, place, draft)):
                return
            if place.answers and draft not in place.free:
                matcher.try_consume_tokens([draft])
            place = self._answers.after(place, draft)
            yield matcher, place

    def _takes(self, matcher: LLMatcher, place: AnswerPlace, token_id: int) -> bool:
        """Return whether an id may come in an answer."""
        if token_id in self._vocabulary.stop_ids:
            return bool(matcher.is_accepting())
        return token_id in place.free or matcher.validate_tokens([token_id]) == 1

    def _write(self, mask: torch.Tensor, matcher: LLMatcher, place: AnswerPlace) -> None:
        """Write what is allowed: of the stop ids all where the text may end, else none."""
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        for token_id in place.free:
            bit = 1 << token_id % WORD
            mask[token_id // WORD] |= bit if bit < 2**31 else bit - 2**32

    def accept(self, ids: torch.Tensor) -> None:
        """Take ids as emitted. UsageError: one is not allowed, as there was none that is."""
        for token_id in ids.tolist():
            ends, place = token_id in self._vocabulary.stop_ids, self._place
            if place.answers and not self._takes(self._matcher, place, token_id):
                raise UsageError(
                    "the constraint cannot be met: no token of this model goes on with it", "send another one"
                )
            if ends:
                return
            if place.answers and token_id not in place.free:
                self._matcher.try_consume_tokens([token_id])
            self._place = self._answers.after(place, token_id)
