"""What went wrong with the Hub or on the way to it, in words a user can act on. Knows no files and no threads."""

from __future__ import annotations

import errno
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dflash_local.errors import DFlashError, DoesNotFitError, DownloadError

if TYPE_CHECKING:
    from dflash_local.store.hub import Hub

PUBLIC_HUB = "https://huggingface.co"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
WEB_PAGE = "looks like a web page (is there a sign-in page between you and the network?)"
_CLOCK_CODES = {9, 10}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_FULL = {errno.ENOSPC: "full", errno.EFBIG: "full", getattr(errno, "EDQUOT", -1): "over its quota"}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


class Stopped(Exception):
    """Ends the threads that work for a pull that was stopped; it is never shown."""


class NotTheFile(Exception):
    """Says why what came cannot be the file. The file may be requested again."""


class TooLong(NotTheFile):
    """Says that more came than the file has, so that nothing of it can be trusted."""


class TooSlow(TimeoutError):
    """Says that bytes of a file come, but so few that the line counts as stalled."""


def http_library() -> Any:
    """Return the module that the installed huggingface_hub speaks HTTP with: httpx (1.x) or httpx2 (2.x)."""
    from huggingface_hub.errors import HfHubHTTPError

    roots = [cls.__module__.partition(".")[0] for cls in HfHubHTTPError.__mro__]
    return sys.modules[next(root for root in roots if root.startswith("httpx"))]


def hub_errors() -> tuple[type[Exception], ...]:
    """Return what a request is known to raise, ours or huggingface_hub's; OSError covers all of the latter's own."""
    return (DFlashError, OSError, ValueError, RuntimeError, http_library().HTTPError, http_library().InvalidURL)


def explained(error: Exception, hub: Hub, repo: str, file: str = "", revision: str | None = None) -> DFlashError:
    """Return our error for any of ``hub_errors`` that came while a repository was listed or a file fetched."""
    if isinstance(error, DFlashError):
        return error
    if (response := getattr(error, "response", None)) is not None:
        return refusal(response, hub, repo, file, revision)
    if isinstance(error, http_library().HTTPError):
        return of_transport(error, hub.endpoint)
    if isinstance(error, OSError) and error.errno is not None:
        return _of_disk(error, _called(repo, file))
    if isinstance(cause := error.__cause__, Exception):  # huggingface_hub wraps what happened to it
        return explained(cause, hub, repo, file, revision)
    return DownloadError(f"{_called(repo, file)} could not be fetched: {_first_line(error)}", "try again later")


def refusal(response: Any, hub: Hub, repo: str, file: str = "", revision: str | None = None) -> DownloadError:
    """Return the error for an answer that is none; a server says the same of what is missing and of what is private."""
    endpoint, status, code = hub.endpoint, response.status_code, response.headers.get("X-Error-Code")
    if code == "GatedRepo":  # the page is on the public Hub, whatever the mirror
        page = f"{PUBLIC_HUB}/{repo}"
        if hub.token:
            hint = f"accept its licence at {page} with the account of that token; some owners take days to approve"
            return DownloadError(f"{repo} is gated and your token has no access to it", hint)
        return DownloadError(
            f"{repo} is gated: its licence must be accepted first", f"accept it at {page}, then {LOGIN}"
        )
    if code == "RevisionNotFound":
        missing = f"{repo} has no revision {revision or 'main'} at {endpoint} (any more)"
        return DownloadError(missing, "`dflash pull --update` takes the newest")
    if code == "EntryNotFound":
        missing = f"{repo} lists {file or 'a file'}, but {endpoint} does not have it (404)"
        return DownloadError(missing, "try again later")
    if status in (401, 404):
        more = "your token may not see it, or is no longer valid" if hub.token else f"if it is private, {LOGIN}"
        return DownloadError(f"{repo} was not found at {endpoint}", f"check the name; {more}")
    if status == 403:
        return DownloadError(f"{endpoint} refuses {_called(repo, file)} to you (403)", "check what your token may read")
    return of_status(status, _called(repo, file), endpoint)


def of_status(status: int, what: str, endpoint: str, wait_s: float | None = None) -> DownloadError:
    """Return the error for a status that stayed after all tries, or one whose wait is too long to bear."""
    if status == 429:
        wait = f"; it asks to wait {wait_s:.0f} s" if wait_s else ""
        return DownloadError(f"{endpoint} gets too many requests from here (429){wait}", f"wait a while, or {LOGIN}")
    if status >= 500:
        return DownloadError(f"{endpoint} is in trouble (status {status}) and did not give {what}", "try again later")
    return DownloadError(f"{endpoint} refused {what} with status {status}", "try again later")


def of_transport(error: BaseException, endpoint: str) -> DownloadError:
    """Return the error for no answer at all: which of the usual reasons it is, by the exceptions below."""
    host, http = urlsplit(endpoint).hostname or endpoint, http_library()
    if (certificate := _cause(error, ssl.SSLCertVerificationError)) is not None:
        if certificate.verify_code in _CLOCK_CODES:
            text = f"the certificate of {host} is not valid today"
            return DownloadError(text, "check the date and time of this machine")
        reason = certificate.verify_message or "unknown reason"
        hint = "a proxy that reads traffic needs its certificate in SSL_CERT_FILE"
        return DownloadError(f"the certificate of {host} is not trusted: {reason}", hint)
    if _cause(error, ssl.SSLError):
        return DownloadError(f"no secure (TLS) connection to {host}", "check HF_ENDPOINT, the proxy and the clock")
    if _cause(error, socket.gaierror):
        return DownloadError(f"{host} has no address here: no network, or DNS does not answer", "check the connection")
    if _cause(error, ConnectionRefusedError):
        return DownloadError(f"{host} refuses connections", "check HF_ENDPOINT, or try again later")
    if isinstance(error, http.ProxyError):
        return DownloadError(f"the proxy does not lead to {host}: {_first_line(error)}", "check HTTPS_PROXY")
    if isinstance(error, http.TimeoutException):
        return DownloadError(f"{host} does not answer in time", "check the connection, or try again later")
    return DownloadError(f"the connection to {host} broke: {_first_line(error)}", "check the connection")


def is_hopeless(error: BaseException) -> bool:
    """Say whether trouble seldom passes and takes long to show: no address, no answer, a bad certificate."""
    http = http_library()
    kinds = (socket.gaierror, ssl.SSLError, http.TimeoutException, http.UnsupportedProtocol)
    return any(_cause(error, kind) for kind in kinds)


def _of_disk(error: OSError, what: str) -> DFlashError:
    where = f" {Path(error.filename).parent}" if isinstance(error.filename, str) else " the cache"
    if error.errno in _FULL:
        full = f"the disk of{where} became {_FULL[error.errno]} while {what} was written"
        return DoesNotFitError(full, "free some space and pull again; finished files are kept")
    if error.errno in _CLOSED:
        return DownloadError(f"{what} cannot be written below{where}: {error.strerror}", "set HF_HUB_CACHE elsewhere")
    return DownloadError(f"{what} cannot be stored: {error.strerror or error}", "check the disk")


def _called(repo: str, file: str) -> str:
    return f"{file} of {repo}" if file else repo


def _cause(error: BaseException, kind: type[BaseException]) -> Any:
    """Return the first of an error and its causes that is of a kind."""
    found = [error]
    while not isinstance(found[-1], kind):
        step = found[-1].__cause__ or found[-1].__context__
        if step is None or step in found:
            return None
        found.append(step)
    return found[-1]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    line = lines[0][:200] if lines else type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in line)
