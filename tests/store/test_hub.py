"""Listings, and how trouble on the way to the Hub is told: redirects, refusals, silence, lies."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from dflash_local import settings
from dflash_local.errors import DownloadError, SettingsError
from dflash_local.store import xet
from dflash_local.store.file_transfer import FileDownload
from dflash_local.store.hub import Hub
from dflash_local.store.hub_client import HubClient, HubPatience
from dflash_local.store.hub_errors import http_library, of_transport
from tests.fake_hub import FakeHub

TARGET = "owner/target"


def failure(puller: Any, *wanted: Any) -> DownloadError:
    with pytest.raises(DownloadError) as caught:
        puller.pull(*wanted)
    assert caught.value.exit_code == 4
    return caught.value


def test_a_listing_is_one_request_with_sizes_and_checksums(fake: FakeHub, puller: Any) -> None:
    commit = fake.add_repo(TARGET, {"config.json": b"{}", "model.safetensors": b"12345"}, gated=True)
    listing = puller.hub.listing(TARGET, None)
    config, weights = listing.files
    assert (listing.commit, listing.gated, len(fake.requests)) == (commit, True, 1)
    assert (config.path, config.size, config.sha256) == ("config.json", 2, None)
    assert config.etag == config.blob == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
    assert weights.size == 5 and weights.etag == weights.sha256 != weights.blob


def test_the_hub_of_the_settings(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "HF_ENDPOINT": "https://mirror.example/", "HF_TOKEN": "hf_abc", "HF_HUB_OFFLINE": "1"}
    hub = Hub.of(settings.load(env))
    assert (hub.endpoint, hub.token, hub.offline) == ("https://mirror.example", "hf_abc", True)
    assert hub.cache == tmp_path / ".cache/huggingface/hub" and "hf_abc" not in repr(hub)
    with pytest.raises(SettingsError, match="no home folder"):
        Hub.of(settings.load({}))


def test_xet_without_its_client_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = settings.load({"HOME": str(tmp_path)})
    monkeypatch.setattr("dflash_local.store.hub.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="Xet client is not installed"):
        Hub.of(user, xet=True)
    assert not Hub.of(user).xet


@pytest.mark.parametrize("text", ["../x", "a/b/c", "", "a//b", "-x/y", "a/b\n"])
def test_no_request_is_made_for_what_is_no_repo(puller: Any, fake: FakeHub, text: str) -> None:
    with pytest.raises(DownloadError):
        puller.hub.listing(text, None)
    assert fake.requests == []


def test_an_unknown_repo_says_so_and_where(puller: Any, fake: FakeHub) -> None:
    error = failure(puller, "owner/nothing")
    assert (
        "owner/nothing was not found" in error.message and fake.url in error.message and "hf auth login" in error.hint
    )


def test_a_commit_that_vanished(puller: Any, fake: FakeHub, small: Any) -> None:
    plan = puller.prepare(TARGET)
    fake.drop_commit(TARGET, plan.repos[0].commit)
    with pytest.raises(DownloadError, match=plan.repos[0].commit) as caught:
        puller.run(plan)
    assert caught.value.exit_code == 4 and "--update" in caught.value.hint


# Redirects


def test_the_token_stays_with_the_endpoint(puller: Any, fake: FakeHub, small: Any, secret: str) -> None:
    puller.token = secret
    puller.pull(TARGET)
    with_token = {request.server for request in fake.requests if secret in str(request.headers)}
    assert with_token == {"hub"} and any(request.server == "cdn" for request in fake.requests)


ELSEWHERE = ["http://evil.example/x", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://[::ffff:1.2.3.4]/x"]
# The first is huggingface_hub's own, in a process that takes a second to start.
BY_XET = [("HEAD", ELSEWHERE[0]), *(pytest.param("HEAD", url, marks=pytest.mark.slow) for url in ELSEWHERE[1:])]


@pytest.mark.parametrize(("method", "url"), [*BY_XET, *(("GET", url) for url in ELSEWHERE)])
def test_a_redirect_elsewhere_is_refused(puller: Any, fake: FakeHub, small: Any, method: str, url: str) -> None:
    puller.xet = method == "HEAD"
    name = "model.safetensors" if puller.xet else "config.json"
    fake.fault(name, "redirect", to=url, methods=(method,), times=99)
    error = failure(puller)
    assert "refused" in error.message and name not in puller.names()


def test_eleven_redirects_are_too_many(puller: Any, fake: FakeHub, small: Any) -> None:
    fake.fault("config.json", "hops", count=11, methods=("GET",), times=9)
    assert "redirects more than 10 times" in failure(puller).message
    fake.clear_faults()
    puller.xet = True
    fake.fault("model.safetensors", "hops", count=11, methods=("HEAD",), times=9)
    assert "redirects more than 10 times" in failure(puller).message


@pytest.mark.parametrize(
    ("endpoint", "url", "allowed"),
    [
        ("https://huggingface.co", "https://huggingface.co/x", True),
        ("https://huggingface.co", "https://cas-bridge.xethub.hf.co/x", True),
        ("https://huggingface.co", "https://cdn-lfs-us-1.huggingface.co/x", True),
        ("https://huggingface.co", "http://huggingface.co/x", False),
        ("https://huggingface.co", "https://evilhuggingface.co/x", False),
        ("https://huggingface.co", "https://huggingface.co.evil.example/x", False),
        ("https://huggingface.co", "https://huggingface.co@evil.example/x", False),
        ("https://huggingface.co", "https://127.0.0.1/x", False),
        ("https://huggingface.co", "https://169.254.169.254/x", False),
        ("https://mirror.example", "https://files.mirror.example/x", True),
        ("https://mirror.example", "https://cdn-lfs.hf.co/x", True),
        ("https://mirror.example", "https://other.example/x", False),
        ("http://intranet:8080", "http://intranet:9090/x", True),
        ("http://127.0.0.1:1", "http://localhost:2/x", True),
        ("http://127.0.0.1:1", "http://10.0.0.1/x", False),
    ],
)
def test_which_hosts_are_trusted(endpoint: str, url: str, allowed: bool) -> None:
    client = Hub(endpoint, None, False, Path()).client()
    with contextlib.nullcontext() if allowed else pytest.raises(DownloadError, match="refused"):
        client.leaving(http_library().Request("GET", url))


def test_which_hosts_see_the_token() -> None:
    client = Hub("https://mirror.example", None, False, Path()).client()
    seen = {}
    for url in (
        "https://mirror.example/x",
        "https://huggingface.co/x",
        "https://files.mirror.example/x",
        "https://cdn.hf.co/x",
    ):
        request = http_library().Request("GET", url, headers={"Authorization": "Bearer t"})
        client.leaving(request)
        seen[url.split("/")[2]] = "Authorization" in request.headers
    assert seen == {"mirror.example": True, "huggingface.co": True, "files.mirror.example": False, "cdn.hf.co": False}


def test_what_a_hub_wants_printed_is_not() -> None:
    http, client = http_library(), Hub("https://mirror.example", None, False, Path()).client()
    answer = http.Response(200, headers={"X-HF-Warning": "topic; words"}, request=http.Request("GET", "https://x"))
    client.arrived(answer)
    assert "X-HF-Warning" not in answer.headers


def test_a_server_cannot_choose_a_path_in_the_cache(puller: Any, fake: FakeHub, small: Any) -> None:
    (listed,) = [file for file in puller.hub.listing(TARGET, None).files if file.path == "model.safetensors"]
    download = FileDownload(TARGET, fake.repos[TARGET].refs["main"], listed, "")
    request = http_library().Request("HEAD", fake.url)
    for number, value in enumerate(['"/etc/passwd"', '"a\\b"', '".."', '"C:x"', '"../../../x"']):
        named = dict.fromkeys(("ETag", "X-Linked-Etag", "X-Repo-Commit"), value)
        for header in named:
            answer = http_library().Response(302, headers={header: value}, request=request)
            with pytest.raises(DownloadError, match="malformed"):
                xet._check_metadata(answer, "", download)
        ours = replace(puller, home=puller.home / str(number))  # we do not name files after what the server says
        fake.fault("model.safetensors", "headers", methods=("GET",), headers=named)
        assert ours.pull(TARGET)[0].verified
    puller.xet = True  # huggingface_hub does
    fake.fault("model.safetensors", "headers", methods=("HEAD",), times=9, headers={"X-Linked-Etag": value})
    assert "malformed" in failure(puller).message
    assert sorted(puller.home.rglob("x")) == [] and "model.safetensors" not in puller.names()


# Refusals and silence


def test_too_many_requests_waits_as_told(
    puller: Any, fake: FakeHub, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(HubClient, "pause", lambda _, seconds: waited.append(seconds))
    fake.fault("config.json", "429", retry_after=2)
    assert puller.pull(TARGET)[0].verified and waited == [2.0]


def test_a_wait_that_is_too_long_is_not_begun(puller: Any, fake: FakeHub, small: Any) -> None:
    fake.fault("api", "429", retry_after=3600)
    error = failure(puller)
    assert "too many requests" in error.message and "3600 s" in error.message


def test_three_times_500_is_borne_with_the_usual_patience(puller: Any, fake: FakeHub, small: Any) -> None:
    puller.impatient(first_tries=HubPatience().first_tries)
    fake.fault("config.json", "500", times=3)
    fake.fault("api", "503", times=3)
    assert puller.pull(TARGET)[0].verified


def test_500_for_ever_is_given_up(puller: Any, fake: FakeHub, small: Any) -> None:
    fake.fault("model.safetensors", "500", times=99)
    error = failure(puller)
    assert "status 500" in error.message and "model.safetensors" in error.message
    assert sum(request.status == 500 for request in fake.requests) == puller.patience.first_tries


def test_no_address_fails_fast_and_says_so(puller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def unknown(host: Any, *_: Any, **__: Any) -> Any:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    hub = Hub("https://nowhere.invalid", None, False, puller.home, puller.patience)
    with pytest.raises(DownloadError, match="nowhere.invalid has no address here: no network, or DNS"):
        hub.listing(TARGET, None)
    assert len(asked) == 2


def test_a_refused_connection_says_so(puller: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub = Hub(f"http://127.0.0.1:{unused.getsockname()[1]}", None, False, puller.home, puller.patience)
        with pytest.raises(DownloadError, match="127.0.0.1 refuses connections"):
            hub.listing(TARGET, None)


def test_a_server_without_tls_says_so(puller: Any, fake: FakeHub) -> None:
    hub = Hub(fake.url.replace("http://", "https://"), None, False, puller.home, puller.patience)
    with pytest.raises(DownloadError, match=r"no secure \(TLS\) connection"):
        hub.listing(TARGET, None)


@pytest.mark.parametrize(
    ("code", "words"), [(9, "not valid today"), (10, "not valid today"), (18, "not trusted: self")]
)
def test_a_wrong_clock_is_told_from_a_wrong_certificate(code: int, words: str) -> None:
    cause = ssl.SSLCertVerificationError(1, "certificate verify failed")
    cause.verify_code, cause.verify_message = code, "self-signed certificate"
    error = http_library().ConnectError("[SSL] certificate verify failed")
    error.__cause__ = cause
    found = of_transport(error, "https://huggingface.co")
    assert words in found.message and "huggingface.co" in found.message
    assert ("date and time" in found.hint) is (code != 18)


def test_a_web_page_instead_of_a_listing(puller: Any, fake: FakeHub, small: Any) -> None:
    fake.fault("api", "html", methods=("GET",), times=9)
    assert "looks like a web page" in failure(puller).message


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        *((nonsense, "") for nonsense in (b"[]", b"{}", b"nonsense", b'{"id": "x", "sha": 5, "siblings": []}')),
        (
            b'{"id": "owner/target", "sha": "%s", "siblings": [{"rfilename": "config.json"}]}' % (b"1" * 40),
            "does not tell size and checksum of 'config.json'",
        ),
    ],
)
def test_what_is_no_listing_is_refused_in_one_line(puller: Any, fake: FakeHub, answer: bytes, told: str) -> None:
    fake.fault("api", "answer", body=answer, times=9)
    message = failure(puller).message
    assert told in message and "\n" not in message


def test_a_listing_of_another_commit_is_refused(puller: Any, fake: FakeHub) -> None:
    first = fake.add_repo(TARGET, {"config.json": b"{}"})
    fake.fault("api", "answer", body=b'{"id": "x", "sha": "%s", "siblings": []}' % (b"1" * 40))
    with pytest.raises(DownloadError, match="wrong commit"):
        puller.hub.listing(TARGET, first)


# The client that huggingface_hub is lent


def test_the_hooks_of_a_program_s_own_client_are_kept(fake: FakeHub, puller: Any) -> None:
    fake.add_repo(TARGET, {"config.json": b"{}"})
    asked: list[str] = []
    hooks = {"request": [lambda request: asked.append(request.url.path)]}
    huggingface_hub.set_client_factory(lambda: http_library().Client(event_hooks=hooks))
    assert puller.hub.listing(TARGET, None).files and asked == []
    huggingface_hub.HfApi(endpoint=fake.url, token=False).model_info(TARGET)
    assert asked == [f"/api/models/{TARGET}"]
