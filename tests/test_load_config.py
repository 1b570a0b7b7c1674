"""How a pair is loaded: what is allowed, what is said of it, and that each field is described."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig, gpus_named, takes_several
from dflash_local.loaded import SessionFacts


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"dtype": "int4"}, "--dtype 'int4' is unknown", "use auto, float32, bfloat16, float16"),
        ({"device": "tpu"}, "--device 'tpu' is unknown", "use auto, cpu, cuda, cuda:N, mps, balanced, or several"),
        ({"device": "cuda:0,"}, "--device 'cuda:0,' is unknown", "several GPUs as cuda:0,1"),
        ({"device": "cuda:1,0,01"}, "--device 'cuda:1,0,01' names a GPU twice", "name each once: cuda:1,0"),
        ({"device": None}, "--device 'None' is unknown", "use auto"),
        ({"quantize": "int3"}, "--quantize 'int3' is unknown", "use fp8, int8, int4, bnb-int8, bnb-nf4"),
        ({"drafter_precision": "4bit"}, "--drafter-precision '4bit' is unknown", "8bit-head"),
        ({"context": 0}, "--context 0 is outside 1..2147483647", ""),
        ({"context": True}, "--context must be a whole number", ""),
        ({"draft_window": 1.5}, "--draft-window must be a whole number", ""),
        ({"attention_factor": float("nan")}, "--attention-factor nan is outside", ""),
        ({"exact": "yes"}, "--exact must be true or false", ""),
    ],
)
def test_what_is_not_allowed_names_the_option_and_what_is(given: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        LoadConfig(**given)
    assert message in refused.value.message and hint in refused.value.hint


@pytest.mark.parametrize(
    ("device", "named", "several"),
    [
        ("auto", (), False),
        ("balanced", (), True),
        ("cuda", (0,), False),
        ("cuda:3", (3,), False),
        ("cuda:1,0", (1, 0), True),
    ],
)
def test_a_device_names_gpus_in_its_order(device: str, named: tuple[int, ...], several: bool) -> None:
    assert (gpus_named(LoadConfig(device=device).device), takes_several(device)) == (named, several)


def test_every_option_is_described() -> None:
    for option in LOAD_OPTIONS.values():
        assert option.help.endswith(".") and option.kind in (str, int, float, bool) and option.allowed
        assert option.kind is not str or option.choices or option.pattern
        assert option.kind not in (int, float) or option.low < option.high
        option.check(option.default)


def test_arguments_say_what_differs() -> None:
    assert LoadConfig().arguments() == []
    config = LoadConfig(context=900, draft=False, exact=True, fit_check=False, kv_cache="int8")
    words = "--context 900 --mode ar --exact --kv-cache int8 --no-fit-check"
    assert " ".join(config.arguments()) == words
    assert LoadConfig().arguments(LoadConfig(exact=True, dtype="float16")) == ["--dtype", "auto", "--no-exact"]


def test_another_load_is_one_that_gives_an_option_another_value() -> None:
    loaded = LoadConfig(engine="fused", dtype="bfloat16", device="cuda", context=4096, exact=True)
    assert LoadConfig().unlike(loaded) == []
    assert LoadConfig(exact=True, context=4096, draft=False, fit_check=False).unlike(loaded) == []
    assert LoadConfig(dtype="float32", draft_window=9).unlike(loaded) == ["--dtype float32", "--draft-window 9"]


def test_the_option_that_only_one_engine_knows_is_named() -> None:
    assert LoadConfig(draft_window=5).needs_fused == ""
    assert LoadConfig(kv_cache="int8").needs_fused == "--kv-cache int8"
    assert LoadConfig(kv_cache="int8", exact=True).needs_fused == "--exact"


def test_facts_tell_what_is_loaded_and_survive_json() -> None:
    plain = LoadConfig(engine="fused", dtype="bfloat16", device="cuda", context=4096, drafter_precision="full")
    facts = SessionFacts("t", "d", 16, True, plain, ("a notice",), 2.5)
    assert facts.loaded_as == "fused bfloat16 cuda"
    assert SessionFacts.from_dict(facts.as_dict()) == facts
    more = LoadConfig(
        engine="reference", dtype="float16", device="cpu", quantize="bnb-nf4", exact=True, drafter_precision="8bit"
    )
    assert (
        SessionFacts("t", None, 1, True, more).loaded_as
        == "reference bnb-nf4 float16 cpu, exact, drafter precision 8bit"
    )
    for broken in ({"dtype": "int4"}, {"block_size": "16"}, {"surprise": 1}, {"checks": [{"subject": 1}]}):
        with pytest.raises((ValueError, UsageError)):
            SessionFacts.from_dict({**facts.as_dict(), **broken})


def test_facts_tell_what_a_target_is_made_of() -> None:
    def weights(quantize: str | None, stored: str | None) -> str:
        return SessionFacts("t", None, 1, True, LoadConfig(dtype="bfloat16", quantize=quantize), stored=stored).weights

    assert weights(None, None) == "bfloat16"
    assert weights(None, "int4 g128") == "int4 g128, as published"
    assert weights("int4", None) == "int4: the checkpoint's own, rounded as they were read"


def test_formats_of_bitsandbytes_are_told_apart() -> None:
    assert LoadConfig(quantize="bnb-nf4").bitsandbytes == "bnb-nf4" and LoadConfig(quantize="int4").bitsandbytes is None
