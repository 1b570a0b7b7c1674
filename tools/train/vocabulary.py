"""The toy's byte-level BPE and ChatML template: trained on the corpus, and turning conversations into ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train.data import Conversation
from tools.train.shapes import CONTEXT, MASK_ID

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, START, END)

# Qwen's split: words with one leading sign, single digits, runs of signs with their newlines, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # enable_thinking is accepted and has no effect: the toy does not think


def render(conversation: Conversation) -> list[tuple[str, bool]]:
    """The conversation as TEMPLATE writes it, in pieces; True marks what the model itself has to write."""
    pieces = [(f"{START}system\n{conversation.system}{END}\n", False)] if conversation.system else []
    for turn in conversation.turns:
        pieces += [(f"{START}user\n{turn.prompt}{END}\n{START}assistant\n", False)]
        pieces += [(turn.answer + END, True), ("\n", False)]
    return pieces


def train_vocabulary(conversations: Iterable[Conversation]) -> Tokenizer:
    """A byte-level BPE of MASK_ID entries (the mask row stays without an entry), every digit its own token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MASK_ID,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = (text for one in conversations for turn in one.turns for text in (turn.prompt, turn.answer))
    tokenizer.train_from_iterator(texts, trainer)
    for word in ("system", "user", "assistant"):
        if not tokenizer.encode(word).ids:
            raise ValueError(f"the vocabulary cannot write {word!r}")
    return tokenizer


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[tuple[list[int], list[bool]]]:
    """Ids of each conversation and, per id, whether the model writes it (the answer and its end)."""
    pieces = [render(one) for one in conversations]
    ids = iter(tokenizer.encode_batch([text for row in pieces for text, _ in row], add_special_tokens=False))
    rows = []
    for row in pieces:
        tokens: list[int] = []
        own: list[bool] = []
        for _, mine in row:
            part = next(ids).ids
            tokens += part
            own += [mine] * len(part)
        rows.append((tokens, own))
    return rows


def save_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as a published target has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(tokenizer.token_to_id(token)): {"content": token, **plain} for token in SPECIALS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "added_tokens_decoder": added,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
