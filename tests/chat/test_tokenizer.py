"""Ids and text: equal to the tokenizers library on harmless text, and safe on the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("<|>imendthk_ /\n", max_size=40)


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(open_source(folder))
    assert tokenizer is not None
    return tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = tokenizer.decoder(skip)
    return [*map(decoder.push, ids), decoder.finish()]


@pytest.fixture(scope="module")
def library(chatml_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(chatml_folder / "tokenizer.json"))


def sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """Llama-2-like tokenizers: BPE with byte fallback, or a Unigram model with Metaspace."""
    corpus = ["the quick brown fox", "hello world again", "one two three"] * 5
    special = ["<unk>", "<s>", "</s>"]
    if kind == "bpe":
        built = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        built.decoder = decoders.Sequence(parts)
        names = special + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    else:
        built = tokenizers.Tokenizer(models.Unigram())
        built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    built.train_from_iterator(corpus, trainer)
    if kind == "bpe":  # the trainer makes the byte tokens special, real checkpoints do not
        spec = json.loads(built.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
        built = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return built


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_without_tags_encodes_as_the_library_does(
    chatml: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    if chatml.control_pattern is not None and not chatml.control_pattern.search(text):
        assert chatml.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["<|im_end|>", "a<think>b", "</tool_call>", " <|im_start|> "])
def test_encode_never_makes_control_tokens(chatml: Tokenizer, text: str) -> None:
    ids = chatml.encode(text)
    assert not set(ids) & set(chatml.added)
    assert chatml.decode(ids) == text


@pytest.mark.parametrize("text", ["x<|im_end|>y", "<think>\n\n</think>a", "<|im_start|>user\nhi<|im_end|>\n"])
def test_a_rendering_encodes_as_the_library_does(chatml: Tokenizer, library: tokenizers.Tokenizer, text: str) -> None:
    ids = chatml.encode(chatml.with_controls(text))
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert chatml.decode(ids, skip_special=False) == text


@given(st.lists(st.integers(0, 430), max_size=40))
@settings(max_examples=300, deadline=None)
def test_streamed_text_equals_one_shot_and_the_library(
    chatml: Tokenizer, library: tokenizers.Tokenizer, ids: list[int]
) -> None:
    assert "".join(stream(chatml, ids)) == chatml.decode(ids) == library.decode(ids, skip_special_tokens=True)
    assert "".join(stream(chatml, ids, False)) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["🙂👨‍👩‍👧", "你好，世界", "aé\u0301ñ", "\ufffd stays", "𝔘𝔫𝔦"])
def test_split_characters_never_flicker(chatml: Tokenizer, text: str) -> None:
    ids = chatml.encode(text)
    parts = stream(chatml, ids)
    assert "".join(parts) == text
    assert len(ids) > len(text) / 2
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


def test_invalid_bytes_and_half_characters(chatml: Tokenizer) -> None:
    byte = {data: i for i in range(300) if (data := chatml.token_bytes(i)) is not None and len(data) == 1}
    ids = [byte[b"\xe4"], byte[b"\xbd"], byte[b"a"], byte[b"\xff"], byte[b"\xed"], byte[b"\xa0"], byte[b"\xf0"]]
    raw = b"\xe4\xbda\xff\xed\xa0\xf0"
    assert "".join(stream(chatml, ids)) == chatml.decode(ids) == raw.decode("utf-8", "replace")


def test_a_lone_surrogate_is_encoded_as_replacement(chatml: Tokenizer) -> None:
    assert chatml.encode("a\ud800b") == chatml.encode("a\ufffdb")
    assert chatml.encode("\ud83d\ude42") == chatml.encode("🙂")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_layouts_agree_with_the_library(tmp_path: Path, kind: str) -> None:
    built = sentencepiece(kind)
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tokenizer = load(tmp_path)
    for text in ["the quick fox", " hello  world", "two\nthree", "" if kind == "unigram" else "é 你"]:
        ids = tokenizer.encode(text)
        assert ids == built.encode(text, add_special_tokens=False).ids
        assert "".join(stream(tokenizer, ids)) == built.decode(ids)
    rendering = "<s>hello</s> world<s>"
    assert tokenizer.encode(tokenizer.with_controls(rendering)) == built.encode(rendering, add_special_tokens=False).ids
    assert not {1, 2} & set(tokenizer.encode(rendering))
    assert tokenizer.stop_ids == {2}
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<s>", "</s>")


def test_word_level_without_decoder_joins_with_spaces(tmp_path: Path) -> None:
    built = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("a b c") == [0, 1, 2]
    assert tokenizer.decode([0, 1, 2]) == built.decode([0, 1, 2]) == "a b [UNK]"


def test_a_control_token_inside_the_vocabulary_is_out_of_reach(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate("<|end>a")} | {"<|": 7, "<|e": 8, "<|end|>": 9, "nd": 10, "nd|>": 11, "|>": 12}
    merges = [("<", "|"), ("|", ">"), ("n", "d"), ("nd", "|>"), ("<|", "e"), ("<|e", "nd|>")]
    built = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    built.add_special_tokens(["<|end|>"])
    built.decoder = decoders.ByteLevel()
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.token_id("<|end|>") == 9
    assert 9 not in tokenizer.encode("<|end|>")
    assert tokenizer.decode(tokenizer.encode("a<|end|>a")) == "a<|end|>a"
    assert tokenizer.encode(tokenizer.with_controls("a<|end|>")) == [6, 9]


def test_added_words_that_are_no_tags_stay_vocabulary(chatml_folder: Path, tmp_path: Path) -> None:
    built = tokenizers.Tokenizer.from_file(str(chatml_folder / "tokenizer.json"))
    built.add_tokens(["        ", "bitcoin"])
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    for text in ["x        y", "a bitcoin"]:
        assert tokenizer.encode(text) == built.encode(text, add_special_tokens=False).ids
        assert set(tokenizer.encode(text)) & set(tokenizer.added)


def test_spaces_beside_a_tag_go_where_the_token_says(chatml_folder: Path, tmp_path: Path) -> None:
    built = tokenizers.Tokenizer.from_file(str(chatml_folder / "tokenizer.json"))
    built.add_special_tokens([tokenizers.AddedToken("<|eat|>", lstrip=True, rstrip=True, special=True)])
    built.save(str(tmp_path / "tokenizer.json"))
    text = "one  <|eat|> \n two <|im_end|> three"
    found = load(tmp_path)
    assert found.encode(found.with_controls(text)) == built.encode(text, add_special_tokens=False).ids


def test_of_two_tags_that_begin_alike_the_longer_is_meant(chatml_folder: Path, tmp_path: Path) -> None:
    built = tokenizers.Tokenizer.from_file(str(chatml_folder / "tokenizer.json"))
    built.add_special_tokens(["<|im_end|>|>"])
    built.save(str(tmp_path / "tokenizer.json"))
    text, found = "one<|im_end|>|>two<|im_end|>", load(tmp_path)
    assert found.encode(found.with_controls(text)) == built.encode(text, add_special_tokens=False).ids


def test_tokens_listed_only_in_the_settings_are_added(chatml_folder: Path, tmp_path: Path) -> None:
    spec = json.loads((chatml_folder / "tokenizer.json").read_text())
    moved = [token for token in spec["added_tokens"] if token["content"] in ("<think>", "</think>")]
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token not in moved]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    decoder = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in moved}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer = load(tmp_path)
    assert tokenizer.token_id("<think>") == moved[0]["id"]
    assert moved[0]["id"] in tokenizer.encode(tokenizer.with_controls("<think>"))


def test_both_transformers_layouts_load_alike(chatml: Tokenizer, chatml_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast.from_pretrained(chatml_folder).save_pretrained(tmp_path)
    saved = load(tmp_path)
    text = "<|im_start|>user\nhello <think> 🙂<|im_end|>\n"
    assert (tmp_path / "chat_template.jinja").is_file()
    assert saved.template == chatml.template
    assert saved.encode(saved.with_controls(text)) == chatml.encode(chatml.with_controls(text))
    assert (saved.stop_ids, saved.vocab_size) == (chatml.stop_ids, chatml.vocab_size)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff\xfe", b'{"model": 3}', b'{"model": {"type": "BPE"}}', b"[" * 100_000]
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(open_source(tmp_path))


def test_ids_that_do_not_fit_the_vocabulary(chatml_folder: Path, tmp_path: Path) -> None:
    spec = json.loads((chatml_folder / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 100}}')
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="vocab_size 100"):
        Tokenizer.load(open_source(tmp_path))
    (tmp_path / "config.json").unlink()
    spec["added_tokens"][-1]["id"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="'</think>' has the id 5000"):
        Tokenizer.load(open_source(tmp_path))


def test_an_unknown_decoder_is_refused_by_name(chatml_folder: Path, tmp_path: Path) -> None:
    spec = json.loads((chatml_folder / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "CTC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="CTC"):
        Tokenizer.load(open_source(tmp_path))


def test_ids_outside_the_vocabulary_decode_to_nothing(chatml: Tokenizer) -> None:
    assert chatml.decode([10**6, -1, *chatml.encode("ok"), chatml.vocab_size]) == "ok"


def test_a_saved_truncation_is_ignored(chatml_folder: Path, tmp_path: Path) -> None:
    built = tokenizers.Tokenizer.from_file(str(chatml_folder / "tokenizer.json"))
    built.enable_truncation(3)
    built.enable_padding(length=64)
    built.save(str(tmp_path / "tokenizer.json"))
    assert len(load(tmp_path).encode("one two three four five six")) > 3
    assert len(load(tmp_path).encode("a")) == 1
