"""Does the chat template belong to the target: a conversation of two turns, the generation prompt, how replies end."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflash_local.chat.stop_ids import HARMONY_TAGS
from dflash_local.chat.template import render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.check.findings import Finding
from dflash_local.engine.session import Session
from dflash_local.request import Message

FIRST, REPLY, SECOND = "How many legs has a spider?", "It has eight of them.", "And how many wings?"
CONVERSATION = (Message("user", FIRST), Message("assistant", REPLY), Message("user", SECOND))
TAG = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>")  # <|im_start|> and the like, with either bar


def check_template(session: Session) -> Finding:
    """The finding on template and stop ids. CheckpointError: the template fails. UsageError: it refuses."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        return Finding("template", "skipped", "the target has no tokenizer")
    figures = {"stop_ids": sorted(session.stop_ids)}
    outside = [token for token in session.stop_ids if token >= session.runner.vocab_size]
    if outside:
        text = f"stop ids {outside} are outside the vocabulary of {session.runner.vocab_size}"
        return Finding("template", "failed", text, "eos_token_id of config.json or generation_config.json", figures)
    if tokenizer.template is None:
        return Finding("template", "skipped", "a base model: it has no chat template", "", figures)
    rendered = render(tokenizer, CONVERSATION, thinking=False)
    text = tokenizer.decode(rendered.ids, skip_special=False)
    dropped = _dropped(text)
    if dropped:
        remedy = "the chat template is for another kind of conversation: compare with the target's own files"
        return Finding("template", "failed", f"it drops the {dropped}", remedy, figures)
    stops = [tokenizer.decode([token], skip_special=False) for token in sorted(session.stop_ids)]
    doubts = []
    if unknown := [tag for tag in dict.fromkeys(TAG.findall(text)) if not tokenizer.is_added(tag)]:
        doubts.append(f"it writes {', '.join(unknown)}, which the tokenizer has not as tokens")
    if rendered.stable == len(rendered.ids):
        doubts.append("it adds no generation prompt: a reply begins right after the question")
    doubts += _turn_end(tokenizer, text, stops)
    if doubts:
        return Finding("template", "warning", "; ".join(doubts), "compare it with the target's own files", figures)
    opening = tokenizer.decode(rendered.ids[rendered.stable :], skip_special=False)
    ends = f"a reply begins after {opening!r} and ends with {' or '.join(stops)}"
    return Finding("template", "ok", f"two turns in {len(rendered.ids)} tokens, {ends}", "", figures)


def _dropped(text: str) -> str:
    """The first part of the conversation that is not there, or not in its place; empty where all is."""
    at = 0
    for name, content in (("first question", FIRST), ("reply", REPLY), ("last question", SECOND)):
        at = text.find(content, at)
        if at < 0:
            return name
    return ""


def _turn_end(tokenizer: Tokenizer, text: str, stops: Sequence[str]) -> list[str]:
    """Whether what ends a reply in the history is a stop id, as the model will write it."""
    if not stops:
        return ["no stop id is known: replies end at their limit alone"]
    if all(tokenizer.is_added(tag) for tag in HARMONY_TAGS):
        return []  # a message of the history ends otherwise than a turn there
    after = text[text.index(REPLY) + len(REPLY) : text.rindex(SECOND)]
    if any(stop in after for stop in stops):
        return []
    return [f"a reply of the history ends with {after[:40]!r}, in which no stop id is ({', '.join(stops)})"]
