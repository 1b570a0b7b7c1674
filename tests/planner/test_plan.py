"""Plans: the context that fits, why something does not, the nearest plan that does, exit 5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.features import MLPConfig, ModelConfig
from dflash_local.config.quantizers import USUAL, read_quantization
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.layout.cycle import LARGER_CHUNKS, SNAPSHOT_EVERY, prompt_chunk
from dflash_local.layout.quantized import quantized
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import (
    COARSER,
    FLOOR,
    STEP,
    Plan,
    alternatives,
    context_limit,
    fits_table,
    nearest,
    plan,
    require,
)
from tests.drafter_configs import published_drafter, published_target

GIB = 2**30
MB = 10**6


DENSE, DENSE_DRAFTER = published_target("Qwen/Qwen3-8B"), published_drafter("z-lab/Qwen3-8B-DFlash-b16")
HYBRID, HYBRID_DRAFTER = published_target("Qwen/Qwen3.5-9B"), published_drafter("z-lab/Qwen3.5-9B-DFlash")
EXPERTS, EXPERTS_DRAFTER = published_target("Qwen/Qwen3.5-35B-A3B"), published_drafter("z-lab/Qwen3.5-35B-A3B-DFlash")


def card(free: float) -> Machine:
    """A GPU with exactly this many bytes free."""
    return Machine("a card", "cuda", round(free) + GIB, round(free), "test", "cuda:0")


def need(config: LoadConfig, of: ModelConfig = DENSE, with_: DFlashConfig | None = DENSE_DRAFTER) -> int:
    """Bytes with the target's own chunk of a prompt: more would be there for a larger one."""
    own = prompt_chunk(quantized(of, config.quantize), config.context or FLOOR)
    total = plan(of, with_, card(1e15), replace(config, prefill_chunk=own)).ledger.total
    assert total is not None
    return total


def test_a_roomy_card_holds_the_whole_context() -> None:
    found = plan(DENSE, DENSE_DRAFTER, card(200 * GIB))
    assert found.fits and found.context == context_limit(DENSE, DENSE_DRAFTER) == 40960
    assert (found.engine, found.runs_on, found.dtype, found.load.quantize, found.block_size) == (
        "fused",
        "local",
        "bfloat16",
        None,
        16,
    )
    assert found.reason.endswith("200.0 GiB free on a card")


def test_the_context_is_the_most_that_fits() -> None:
    machine = card(need(LoadConfig(context=8192)))
    found = plan(DENSE, DENSE_DRAFTER, machine, LoadConfig(drafter_precision="full", offload="none"))
    assert found.fits and found.context is not None and found.context % STEP == 0 and found.context >= 8192
    assert not plan(
        DENSE,
        DENSE_DRAFTER,
        machine,
        LoadConfig(context=found.context + STEP, drafter_precision="full", offload="none"),
    ).fits


def test_a_coarser_drafter_precision_is_taken_where_only_that_fits() -> None:
    """Of a context that was asked for as of none; one asked for by name stays."""
    for context in (2048, 20000):
        config = LoadConfig(context=context, offload="none")
        short = card(need(config) - MB)
        found = plan(DENSE, DENSE_DRAFTER, short, config)
        assert found.fits and found.context == context and found.load.drafter_precision in COARSER
        assert "--drafter-precision 8bit" in found.options()
        coarse = replace(config, drafter_precision=found.load.drafter_precision)
        assert plan(DENSE, DENSE_DRAFTER, short, coarse).ledger == found.ledger
        assert not plan(DENSE, DENSE_DRAFTER, short, replace(config, drafter_precision="full")).fits
        assert not plan(
            DENSE, DENSE_DRAFTER, card(need(replace(coarse, drafter_precision="8bit-drafter")) - 1), config
        ).fits


def test_what_changes_no_reply_makes_room_for_the_context_that_is_wanted() -> None:
    free, loads = card(need(LoadConfig(context=4096))), []
    for wanted in (4096, 8192, 12_288, 40_960):
        found = plan(DENSE, DENSE_DRAFTER, free, wanted=wanted)
        assert found.fits and found.context is not None and (found.context >= wanted or wanted == 40_960)
        loads.append((found.load.drafter_precision, found.load.offload))
        assert (
            found.load.context == plan(DENSE, DENSE_DRAFTER, free, replace(found.load, context=None), wanted=1).context
        )
    assert loads == [("auto", "auto"), ("8bit-drafter", "auto"), ("8bit", "embedding"), ("8bit-drafter", "embedding")]


def test_one_megabyte_more_than_free_is_exit_5_with_the_nearest_plan() -> None:
    config = LoadConfig(context=8192, drafter_precision="full", offload="none")
    exact = need(config)
    assert plan(DENSE, DENSE_DRAFTER, card(exact), config).fits
    short = card(exact - MB)
    found = plan(DENSE, DENSE_DRAFTER, short, config)
    assert not found.fits and "1 MiB too little" in found.reason
    near = nearest(DENSE, DENSE_DRAFTER, short, config)
    assert near is not None and near.fits
    with pytest.raises(DoesNotFitError) as caught:
        require(found, near)
    assert caught.value.exit_code == 5
    assert f"{exact / GIB:.1f} GiB" in caught.value.message
    assert near.options() in caught.value.hint and "this fits" in caught.value.hint


def line(found: Plan, name: str) -> int:
    return sum(each.bytes or 0 for each in found.ledger.lines if each.name == name)


def test_the_embedding_goes_to_host_memory_where_only_that_fits() -> None:
    """By itself no sooner; its bytes leave the device to the byte, and stand in a line of their own."""
    config = LoadConfig(context=8192, drafter_precision="8bit-drafter")
    on_device = plan(DENSE, DENSE_DRAFTER, card(need(config)), config)
    assert on_device.fits and on_device.load.offload == "auto" and on_device.ledger.host == ()
    short = card(need(config) - MB)
    found = plan(DENSE, DENSE_DRAFTER, short, config)
    assert found.fits and found.load.offload == "embedding" and "--offload embedding" in found.options()
    (host,) = found.ledger.host
    table = 2 * DENSE.vocab_size * DENSE.hidden_size
    assert (host.name, host.bytes) == ("embedding", table)
    assert line(on_device, "target weights") - line(found, "target weights") == table
    assert "embedding in host memory, 1.2 GiB" in found.reason
    assert found.as_dict()["ledger"]["host"] == [host.as_dict()]
    assert not plan(DENSE, DENSE_DRAFTER, short, replace(config, offload="none")).fits
    kept = plan(DENSE, DENSE_DRAFTER, card(200 * GIB), replace(config, offload="embedding"))
    assert kept.ledger == found.ledger, "asked for by name it is taken where all would fit"


def test_copies_of_recurrent_states_follow_the_embedding() -> None:
    config = LoadConfig(context=8192, drafter_precision="8bit-drafter")
    embedding = replace(config, offload="embedding")
    short = card(need(embedding, HYBRID, HYBRID_DRAFTER) - MB)
    found = plan(HYBRID, HYBRID_DRAFTER, short, config)
    assert found.fits and found.load.offload == "all"
    assert [each.name for each in found.ledger.host] == ["embedding", "state snapshots", "rings"]
    assert line(found, "state snapshots") == 0
    roomy = plan(HYBRID, HYBRID_DRAFTER, card(200 * GIB), config)
    assert roomy.ledger.host == found.ledger.host[-1:], "rings lie there whatever else does"


def test_a_tied_embedding_stays() -> None:
    tied = published_target("Qwen/Qwen3-4B")
    config = LoadConfig(context=8192, offload="embedding")
    assert plan(tied, None, card(200 * GIB), config).ledger.host == ()
    short = card(need(LoadConfig(context=8192, offload="none"), tied, None) - MB)
    found = plan(tied, None, short, LoadConfig(context=8192))
    assert not found.fits and found.load.offload == "auto", "nothing would be gained"


def workspace(found: Plan) -> int:
    return line(found, "workspace")


def test_what_is_left_is_for_larger_chunks_of_a_prompt() -> None:
    """A GPU with room takes the largest, one without the target's own; the plan's options leave out what it chose."""
    config = LoadConfig(context=9000, drafter_precision="full", offload="none")
    own = need(config)
    larger = {chunk: workspace_of(config, chunk) - workspace_of(config, 1024) for chunk in LARGER_CHUNKS}
    for more, chunk in ((0, None), (larger[4096] // 2, None), (2 * larger[4096], 4096), (2 * larger[8192], 8192)):
        found = plan(DENSE, DENSE_DRAFTER, card(own + more), config)
        assert found.fits and found.load == replace(config, prefill_chunk=chunk), more
        assert "--prefill-chunk" not in found.options()
        assert plan(DENSE, DENSE_DRAFTER, found.machine, found.load).ledger == found.ledger
    assert plan(DENSE, DENSE_DRAFTER, card(200 * GIB)).load.prefill_chunk == 8192
    assert plan(DENSE, DENSE_DRAFTER, named("H100", None)).load.prefill_chunk == 8192
    # Its states are kept every so many tokens of a prompt, so no chunk is longer.
    assert plan(HYBRID, HYBRID_DRAFTER, card(200 * GIB)).load.prefill_chunk == SNAPSHOT_EVERY


def workspace_of(config: LoadConfig, chunk: int) -> int:
    return workspace(plan(DENSE, DENSE_DRAFTER, card(1e15), replace(config, prefill_chunk=chunk)))


@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        ({"context": 8192}, 8192),
        ({"context": 8191}, 4096),
        ({"context": 4095}, None),
        ({"exact": True}, None),  # its bits do not depend on what memory is free
        ({"engine": "reference"}, None),
        ({"prefill_chunk": 512}, 512),
        ({"prefill_chunk": 512, "exact": True}, 512),
    ],
)
def test_a_chunk_of_a_prompt_is_no_longer_than_the_context(options: dict[str, Any], chunk: int | None) -> None:
    assert plan(DENSE, DENSE_DRAFTER, card(200 * GIB), LoadConfig(**options)).load.prefill_chunk == chunk


def test_the_reference_engine_counts_a_chunk_that_was_asked_for() -> None:
    config = LoadConfig(engine="reference", context=8192)
    own, large = (plan(DENSE, DENSE_DRAFTER, card(1e15), replace(config, prefill_chunk=n)) for n in (None, 4096))
    assert workspace(large) > 2 * workspace(own)


def test_a_cpu_takes_the_targets_own_chunk() -> None:
    machine = Machine("CPU", "cpu", 640 * GIB, 300 * GIB, "test", "cpu")
    found = plan(DENSE, DENSE_DRAFTER, machine, LoadConfig(engine="fused", dtype="bfloat16"))
    assert found.fits and found.engine == "fused" and found.load.prefill_chunk is None


def test_a_chunk_that_was_asked_for_is_counted_and_kept() -> None:
    config = LoadConfig(context=20_000, drafter_precision="full", offload="none")
    small, large = workspace_of(config, 2048), workspace_of(config, 16_384)
    row = 2 * (DENSE.hidden_size * (2 + len(DENSE_DRAFTER.taps)) + 3 * 12_288)  # residual, norm, taps, feed-forward
    assert (small, large) == (2048 * row, 16_384 * row)
    asked = replace(config, prefill_chunk=16_384)
    found = plan(DENSE, DENSE_DRAFTER, card(need(config)), asked)
    assert not found.fits and found.load.prefill_chunk == 16_384, "what was asked for is not changed"
    near = nearest(DENSE, DENSE_DRAFTER, card(need(config)), asked)
    assert near is not None and near.load.prefill_chunk == 16_384 and "--prefill-chunk 16384" in near.options()


@settings(max_examples=30, deadline=None)
@given(free=st.integers(6 * GIB, 60 * GIB), quantize=st.sampled_from((None, "int8", "int4")), hybrid=st.booleans())
def test_a_larger_chunk_takes_nothing_from_the_rest_of_a_plan(free: int, quantize: str | None, hybrid: bool) -> None:
    target, drafter = (HYBRID, HYBRID_DRAFTER) if hybrid else (DENSE, DENSE_DRAFTER)
    machine, config = card(free), LoadConfig(quantize=quantize)
    own = replace(config, prefill_chunk=prompt_chunk(quantized(target, quantize), FLOOR))
    before, after = (plan(target, drafter, machine, each) for each in (own, config))
    assert after.fits == before.fits
    assert replace(after.load, prefill_chunk=own.prefill_chunk) == before.load


def test_the_nearest_plan_gives_up_context_then_precision_and_the_drafter_last() -> None:
    near = nearest(DENSE, DENSE_DRAFTER, card(need(LoadConfig(context=8192))), LoadConfig(context=40960))
    assert near is not None and near.load.quantize is None and near.load.draft and (near.context or 0) >= 8192
    floor = {form: need(LoadConfig(context=FLOOR, quantize=form)) for form in (None, "int8", "int4")}
    assert floor[None] > floor["int8"] > floor["int4"]
    for form in ("int8", "int4"):
        near = nearest(DENSE, DENSE_DRAFTER, card(floor[form]))
        assert near is not None and near.load.quantize == form and near.load.draft
        assert f"--quantize {form}" in near.options()
    full = LoadConfig(drafter_precision="full", offload="none")
    near = nearest(DENSE, DENSE_DRAFTER, card(need(replace(full, context=FLOOR)) - MB), full)
    assert near is not None and near.load.quantize is None and near.load.drafter_precision in COARSER
    least = LoadConfig(context=FLOOR, drafter_precision="8bit-drafter", offload="all")
    for mtp in (True, False):
        own = card(need(replace(least, mtp=mtp), HYBRID, HYBRID_DRAFTER))
        near = nearest(HYBRID, HYBRID_DRAFTER, own, LoadConfig(mtp=True, context=40960))
        assert near is not None and near.load.quantize is None and near.load.draft and near.load.mtp == mtp
    bare = need(LoadConfig(context=FLOOR, quantize="int4", draft=False, offload="all"), DENSE, None)
    near = nearest(DENSE, DENSE_DRAFTER, card(bare))
    assert near is not None and not near.load.draft and "--mode ar" in near.options()


def test_the_nearest_to_a_format_that_the_target_cannot_have_is_the_target_as_it_is() -> None:
    """A stored target that fits as it lies was told to fit in no format when it was to be rounded once more."""
    stored = published_target("Qwen/Qwen3-8B", quantization_config=USUAL["int4-g128"])
    config, machine = LoadConfig(quantize="int8"), card(16 * GIB)
    refused, near = plan(stored, DENSE_DRAFTER, machine, config), nearest(stored, DENSE_DRAFTER, machine, config)
    assert not refused.fits and refused.reason == "int8 on top of int4 g128 is not supported"
    assert near is not None and near.load.quantize is None and near.stored == "int4 g128" and near.load.draft


@pytest.mark.parametrize("quantize", [None, *LOAD_OPTIONS["quantize"].choices])
def test_no_alternative_is_tried_twice(quantize: str | None) -> None:
    tried = list(alternatives(LoadConfig(quantize=quantize, mtp=True), card(GIB)))
    assert len(set(tried)) == len(tried) and tried[0].quantize == quantize


def test_nothing_fits_a_tiny_card_and_the_hint_says_so() -> None:
    found = plan(DENSE, DENSE_DRAFTER, card(GIB))
    assert not found.fits and found.context == FLOOR
    assert nearest(DENSE, DENSE_DRAFTER, card(GIB)) is None
    with pytest.raises(DoesNotFitError) as caught:
        require(found, None)
    assert "fits here" in caught.value.hint


def test_quantised_experts_take_less_where_their_codes_are_kept() -> None:
    """The fused engine keeps them, and the reference engine decodes them."""
    on_card = plan(EXPERTS, EXPERTS_DRAFTER, card(40 * GIB), LoadConfig(quantize="int4"))
    assert on_card.fits and on_card.engine == "fused"
    decoded = plan(EXPERTS, EXPERTS_DRAFTER, card(40 * GIB), LoadConfig(quantize="int4", engine="reference"))
    assert not decoded.fits and decoded.engine == "reference"
    near = nearest(EXPERTS, EXPERTS_DRAFTER, card(40 * GIB))
    assert near is not None and near.engine == "fused" and near.load.quantize is not None
    machine = Machine("CPU", "cpu", 64 * GIB, 24 * GIB, "test", "cpu")
    kept = LoadConfig(quantize="int4", engine="fused", dtype="bfloat16", context=2048)
    found = plan(EXPERTS, EXPERTS_DRAFTER, machine, kept)
    assert found.fits and found.ledger.lines[0].note == "int4, rounded as they are read"
    assert 15 * GIB < (found.ledger.lines[0].bytes or 0) < 18 * GIB, "33 billion weights of 4.125 bits, and some of 16"
    assert found.ledger.loading.note == "the weights, and one while it is rounded"
    published = replace(EXPERTS, quantization=read_quantization(ConfigFields(USUAL["fp8"], "x")))
    as_stored = plan(published, EXPERTS_DRAFTER, replace(machine, free=48 * GIB), replace(kept, quantize=None))
    assert as_stored.fits and as_stored.stored == "fp8 128x128"
    assert 31 * GIB < (as_stored.ledger.lines[0].bytes or 0) < 34 * GIB, "a byte a weight"
    refused = plan(EXPERTS, EXPERTS_DRAFTER, machine, replace(kept, quantize="bnb-nf4", engine="auto"))
    assert not refused.fits and "would leave its experts in 16 bits" in refused.reason


def test_the_table_has_a_row_for_every_format() -> None:
    rows = fits_table(DENSE, DENSE_DRAFTER, named(None, 24))
    assert [row.format for row in rows] == ["bfloat16", "fp8", "int8", "int4", "bnb-int8", "bnb-nf4"]
    assert all(row.fits for row in rows)
    contexts = [row.context or 0 for row in rows]
    assert contexts == sorted(contexts) and contexts[0] >= 8192
    fitting = [row.format for row in fits_table(EXPERTS, EXPERTS_DRAFTER, named(None, 24)) if row.fits]
    assert fitting == ["int4"], "18 GiB; bitsandbytes leaves experts in 16 bits"


def test_a_cpu_runs_float32_and_is_offered_bfloat16() -> None:
    machine = Machine("CPU", "cpu", 64 * GIB, 30 * GIB, "test", "cpu")
    found = plan(DENSE, DENSE_DRAFTER, machine)
    assert found.dtype == "float32" and not found.fits and found.ledger.reserve.bytes == 0
    near = nearest(DENSE, DENSE_DRAFTER, machine)
    assert near is not None and (near.load.quantize is not None or near.dtype == "bfloat16")


def test_a_target_without_a_quoted_context_has_the_engines_default() -> None:
    assert context_limit(replace(DENSE, max_position_embeddings=None), None) == 4096
    small = replace(DENSE, max_position_embeddings=1000)
    assert plan(small, None, card(200 * GIB)).context == 1000


@pytest.mark.parametrize(
    "given", [{"context": 0}, {"context": 40961}, {"dtype": "int4"}, {"quantize": "int3"}, {"context": -5}]
)
def test_what_no_machine_could_do_is_a_usage_error(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan(DENSE, DENSE_DRAFTER, card(200 * GIB), LoadConfig(**given))


def test_a_server_target_never_fits_and_says_how_large_it_is() -> None:
    kimi = published_target("moonshotai/Kimi-K2.5")
    found = plan(kimi, None, named("H200", None), runs_on="server")
    assert (found.fits, found.runs_on, found.engine) == (False, "server", "server")
    assert "server" in found.reason and "553.4 GiB" in found.reason


def test_when_loading_is_the_fullest_moment_the_reason_says_so() -> None:
    layers = (replace(layer, mlp=MLPConfig(400_000)) for layer in DENSE.layers)
    wide = replace(DENSE, layers=tuple(layers))  # a matrix comes in 16 bits before int8 packs it
    found = plan(wide, DENSE_DRAFTER, card(20 * GIB), LoadConfig(context=2048, quantize="bnb-int8"))
    assert found.ledger.peak == found.ledger.loading.bytes and "while it loads" in found.reason


@settings(max_examples=30, deadline=None)
@given(
    free=st.integers(GIB, 200 * GIB),
    quantize=st.sampled_from((None, "fp8", "int8", "int4", "bnb-nf4")),
    draft=st.booleans(),
)
def test_a_plan_that_says_it_fits_does_and_nearest_always_does(free: int, quantize: str | None, draft: bool) -> None:
    machine, config = card(free), LoadConfig(quantize=quantize, draft=draft)
    found = plan(DENSE, DENSE_DRAFTER, machine, config)
    if found.fits:
        assert (found.ledger.total or 0) <= free and (found.context or 0) >= FLOOR
    near = nearest(DENSE, DENSE_DRAFTER, machine, config)
    assert near is None or (near.fits and (near.ledger.total or 0) <= free)
    assert not found.fits or near is not None
