"""Files over huggingface_hub's Xet client, in a process of its own that can be ended, with a bound on its memory.

That client opens sockets of its own, out of reach of the list of hosts and of the watch over a connection's speed.
huggingface_hub does everything here: metadata, locks, the cache's layout. What it fetched is proven afterwards.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from dflash_local import child_process
from dflash_local.errors import DoesNotFitError, DownloadError
from dflash_local.json_text import parse_json
from dflash_local.store.file_transfer import FileDownload
from dflash_local.store.hub import Hub, RemoteFile
from dflash_local.store.hub_client import HubClient, HubPatience, is_page
from dflash_local.store.hub_errors import WEB_PAGE, NotTheFile, explained, hub_errors
from dflash_local.store.names import is_commit

MEMORY = 8 << 30  # bytes that the child may have
_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (DownloadError, DoesNotFitError, NotTheFile)}
_ETAG = re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_-]{0,127}"?')


def fetch_over_xet(hub: Hub, download: FileDownload, client: HubClient) -> None:
    """Fetch a file into the hub's cache; ``client.interrupt`` ends it.

    Raises:
        DownloadError: see ``hub_errors``, or the child was ended. NotTheFile: another file.
        DoesNotFitError: the disk is full. Stopped: the pull was.
    """
    download.connections += 1
    job: dict[str, Any] = {"endpoint": hub.endpoint, "token": hub.token, "patience": asdict(hub.patience)}
    job |= {"repo": download.repo, "commit": download.commit, "file": asdict(download.file)}
    job |= {"cache": os.path.abspath(hub.cache), "again": download.connections > 1}
    command, granted = child_process.python_command("dflash_local.store.xet"), {"HF_HUB_DISABLE_XET": "0"}
    with child_process.start(command, granted=granted, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as child:
        client.child = child
        try:
            client.check()
            assert child.stdin is not None and child.stdout is not None
            with suppress(BrokenPipeError):  # it has ended: found below
                child.stdin.write(json.dumps(job) + "\n")
                child.stdin.flush()
            for message in map(parse_json, child.stdout):
                if "error" in message:
                    raise _ERRORS[message["error"]](*message["words"])
                download.done = message["done"]
        finally:
            client.child = None
            child.kill()
    client.check()
    if child.returncode != 0:
        ended = f"the Xet client ended in the middle of {download.name}, or nothing came for {_silence_s(hub)} s"
        raise DownloadError(ended, "check the connection, or pull without --xet")


def _silence_s(hub: Hub) -> int:
    """Return the seconds without a byte after which the system ends the child."""
    return math.ceil(hub.patience.whole_s + hub.patience.stall_s)


# In the child


def main() -> None:
    """Fetch the file that a line of standard input describes; say on standard output how far it is."""
    with suppress(ImportError, OSError, ValueError):  # Windows has none, macOS refuses it
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    job = parse_json(sys.stdin.readline())
    hub = Hub(job["endpoint"], job["token"], False, Path(job["cache"]), HubPatience(**job["patience"]))
    download = FileDownload(job["repo"], job["commit"], RemoteFile(**job["file"]), "")
    report = partial(_report, _silence_s(hub))
    report(done=0)
    expected = hub_errors()
    try:
        _fetch(hub, download, job["again"], report)
    except NotTheFile as error:
        report(error=type(error).__name__, words=[str(error)])
    except expected as fault:
        known = explained(fault, hub, download.repo, download.file.path, download.commit)
        report(error=type(known).__name__, words=[known.message, known.hint])
    else:
        report(done=download.size)


def _report(silence_s: int, **words: Any) -> None:
    """Tell the parent, and be ended when there is nothing to tell for too long. Without a parent it ends here."""
    if hasattr(signal, "alarm"):
        signal.alarm(silence_s)
    try:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(1)


def _fetch(hub: Hub, download: FileDownload, again: bool, report: Callable[..., None]) -> None:
    import huggingface_hub

    client = hub.client()
    client.download = download
    client.http.event_hooks["response"].append(lambda response: _check_metadata(response, hub.endpoint, download))
    huggingface_hub.set_client_factory(lambda: client.http)
    huggingface_hub.hf_hub_download(
        download.repo,
        download.file.path,
        revision=download.commit,
        cache_dir=hub.cache,
        endpoint=hub.endpoint,
        token=hub.token or False,
        library_name="dflash-local",
        tqdm_class=_bar(report),
        force_download=again,  # else it may take the wrong bytes out of its shared store
    )


def _check_metadata(response: Any, endpoint: str, download: FileDownload) -> None:
    """Refuse what huggingface_hub would take for a file's name in the cache and for its size."""
    if response.request.method != "HEAD" or response.status_code >= 400:
        return
    headers, name = response.headers, download.name
    commit, size = headers.get("X-Repo-Commit"), headers.get("X-Linked-Size", "")
    if commit is None and is_page(headers):
        raise NotTheFile(WEB_PAGE)
    for header in ("ETag", "X-Linked-Etag"):
        if not _ETAG.fullmatch(headers.get(header, "x")):
            raise DownloadError(f"{endpoint} sent a malformed {header} for {name}", "check HF_ENDPOINT")
    if commit not in (None, download.commit):
        sent = f"commit {commit}" if is_commit(commit) else "a malformed commit"
        raise DownloadError(f"{endpoint} sent {name} of {sent}, not of {download.commit}", "check HF_ENDPOINT")
    if size.isdigit() and int(size) != download.size:
        raise NotTheFile(f"has {int(size):,} bytes instead of {download.size:,}")


def _bar(report: Callable[..., None]) -> Any:
    """Make a progress bar of huggingface_hub's that shows nothing and says how far it is."""

    class Bar(AbstractContextManager[Any]):
        done = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            report(done=self.done)

        def close(self) -> None:
            pass

    return Bar


if __name__ == "__main__":
    main()
