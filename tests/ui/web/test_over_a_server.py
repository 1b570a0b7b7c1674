"""The page over vLLM and SGLang servers: chat, a race of two, and what the server decides said in a line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dflash_local.app.model_sources import ServerModels
from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError
from dflash_local.load_config import LoadConfig
from dflash_local.service.service import Service
from dflash_local.settings import load as load_settings
from tests.remote.openai_fake import Fake, running
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import saved, site, visiting


def over(fake: Fake, plain: Fake | None = None) -> dict[str, Any]:
    """What makes a site one over a server, or over two."""
    user = load_settings()
    models = ServerModels(user, lambda _event: None, fake.url, plain_url=plain.url if plain else None)

    def make(service: Service) -> ServedPair:
        return ServedPair(service, models, LoadConfig(), user, "http://127.0.0.1:1")

    return {"make": make, "find": models.find, "model": models.model(models.pair("demo"), LoadConfig(), False)}


@pytest.fixture
def fake() -> Iterator[Fake]:
    with running(Fake()) as server:
        yield server


def test_the_servers_figures_and_faults_are_told_and_what_it_decides(visitor: Visitor, fake: Fake) -> None:
    fake.fault = "500"
    fake.thinking = "first a word"
    with visiting(visitor, "Chat", **over(fake)) as (_, page):
        page.locator("#df-field textarea").fill("hi")
        page.get_by_role("button", name="Send").click()
        page.get_by_text(f"the server at {fake.url} answers with status 500").wait_for()
        fake.fault = ""
        page.get_by_role("button", name="Send").click()
        page.get_by_text("Hello, world!").wait_for()
        assert [body["messages"] for _, body in fake.bodies] == [[{"role": "user", "content": "hi"}]] * 2
        page.get_by_text("2.3 a step").wait_for()
        figures = page.locator("#df-figures").inner_text()
        assert "exactness is the server's own" in figures and "not known of this reply" in figures, "no phases"
        assert page.get_by_text(f"vLLM 0.32.0 at {fake.url}, 7 drafts a cycle · context 1,024").count() == 1
        page.locator(".df-talk").get_by_text("Thinking").click()
        page.get_by_text("first a word").wait_for()
        page.get_by_role("tab", name="Models").click()
        page.locator("#df-load-dialog").get_by_text("decides what is loaded, and how").wait_for()
        assert page.locator("#df-load-dialog .df-start").count() == 0
        # Not by inner_text, which holds the seconds of an update under way as well; nobody sees those.
        page.locator("#df-standing").get_by_text(re.compile("^demo: replies come from vLLM 0.32.0 at http")).wait_for()
        assert page.locator("#df-unload").is_disabled()


# Of SGLang texts are compared, as in tests/cli/test_two_servers.py.
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_two_servers_race(visitor: Visitor, kind: str) -> None:
    with running(Fake(kind)) as drafting, running(Fake(kind, speculative=False)) as plain:
        with visiting(visitor, "Race", **over(drafting, plain)) as (_, page):
            page.get_by_role("button", name="Race", exact=True).click()
            frame = page.frame_locator(".df-replay")
            frame.locator(".won").wait_for()
            assert frame.locator("#verdict").inner_text().startswith("identical: yes")
            lanes = [lane.inner_text() for lane in frame.locator(".lane").all()]
            assert all("Hello, world!" in lane and "8 tokens" in lane for lane in lanes)
            _, content = saved(page.get_by_role("link", name="Save as .json"))
    assert content["server"]["program"] == kind and "127.0.0.1" not in json.dumps(content)
    assert len(plain.bodies) == len(drafting.bodies) == 2, "each is warmed up first"


def test_what_the_server_decides_is_told_in_one_line(fake: Fake) -> None:
    from dflash_local.service.race import Racer
    from dflash_local.ui.web.race import race_request

    label = f"the server at {fake.url}"
    with site(**over(fake)) as here:
        served, service = here.served, here.service
        service.load()
        racer = Racer(service, race_request(service, "hi", 8, 0, None))
        told: dict[Callable[[], object], str] = {
            racer.run: "no request can switch that off",
            service.unload: f"{label} keeps demo loaded",
            partial(served.load_choices, "demo", 512): label,
            partial(served.certify, lambda *_: None, lambda: False): f"{label} proves nothing of its text by itself",
            partial(served.remove, "demo"): f"demo is loaded .end {label} first",
        }
        for act, words in told.items():
            with pytest.raises(DFlashError, match=words) as refused:
                act()
            assert "\n" not in str(refused.value)
        about = served.about()
    assert about["drafter"] == "not reported" and about["replies come from"].startswith("vLLM 0.32.0 at")
