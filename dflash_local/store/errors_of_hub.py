"""What went wrong with the Hub or on the way to it, in words a user can act on. Knows no files and no threads."""

from __future__ import annotations

import errno
import socket
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_local.errors import DFlashError, DoesNotFitError, DownloadError

PUBLIC_HUB = "https://huggingface.co"
_CLOCK_CODES = {9, 10}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def http_library() -> Any:
    """The module that the installed huggingface_hub speaks HTTP with: httpx (1.x) or httpx2 (2.x)."""
    from huggingface_hub.errors import HfHubHTTPError

    roots = [cls.__module__.partition(".")[0] for cls in HfHubHTTPError.__mro__]
    return sys.modules[next(root for root in roots if root.startswith("httpx"))]


def hub_errors() -> tuple[type[Exception], ...]:
    """What a call of huggingface_hub is known to raise; OSError covers all of its own errors."""
    return (OSError, ValueError, RuntimeError, http_library().HTTPError, http_library().InvalidURL)


def of_hub_error(
    error: Exception, repo: str, endpoint: str, with_token: bool, *, file: str = "", revision: str | None = None
) -> DFlashError:
    """Our error for one that huggingface_hub raised while it listed a repository or fetched a file."""
    from huggingface_hub import errors as hub

    if isinstance(error, DFlashError):
        return error
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    what = f"{file} of {repo}" if file else repo
    cause = error.__cause__
    if isinstance(error, (hub.LocalEntryNotFoundError, hub.FileMetadataError)) and isinstance(cause, Exception):
        return of_hub_error(cause, repo, endpoint, with_token, file=file, revision=revision)
    if isinstance(error, hub.GatedRepoError):
        return gated(repo, with_token)
    if isinstance(error, hub.RevisionNotFoundError):
        missing = f"{repo} has no revision {revision or 'main'} at {endpoint} (any more)"
        return DownloadError(missing, "`dflash pull --update` takes the newest")
    if isinstance(error, hub.RemoteEntryNotFoundError):
        missing = f"{repo} lists {file or 'a file'}, but {endpoint} does not have it (404)"
        return DownloadError(missing, "try again later")
    if isinstance(error, hub.RepositoryNotFoundError) or status in (401, 404):
        return not_found(repo, endpoint, with_token)
    if status == 403:
        return DownloadError(f"{endpoint} refuses {what} to you (403)", "check what your token may read")
    if isinstance(status, int):
        return of_status(status, what, endpoint)
    if isinstance(error, http_library().HTTPError):
        return of_transport(error, endpoint)
    if isinstance(error, OSError) and error.errno is not None:
        return of_disk(error, what)
    return DownloadError(f"{what} could not be fetched: {_first_line(error)}", "try again later")


def gated(repo: str, with_token: bool) -> DownloadError:
    """The owner wants something agreed to. The page is on the public Hub, whatever the mirror."""
    page = f"{PUBLIC_HUB}/{repo}"
    if with_token:
        hint = f"accept its licence at {page} with the account of that token; some owners take days to approve"
        return DownloadError(f"{repo} is gated and your token has no access to it", hint)
    return DownloadError(f"{repo} is gated: its licence must be accepted first", f"accept it at {page}, then {LOGIN}")


def not_found(repo: str, endpoint: str, with_token: bool) -> DownloadError:
    """A server says the same of what is missing and of what is private."""
    more = "your token may not see it, or is no longer valid" if with_token else f"if it is private, {LOGIN}"
    return DownloadError(f"{repo} was not found at {endpoint}", f"check the name; {more}")


def of_status(status: int, what: str, endpoint: str, wait_s: float | None = None) -> DownloadError:
    """A status that stayed after all tries, or one whose wait is too long to bear."""
    if status == 429:
        wait = f"; it asks to wait {wait_s:.0f} s" if wait_s else ""
        return DownloadError(f"{endpoint} gets too many requests from here (429){wait}", f"wait a while, or {LOGIN}")
    if status >= 500:
        return DownloadError(f"{endpoint} is in trouble (status {status}) and did not give {what}", "try again later")
    return DownloadError(f"{endpoint} refused {what} with status {status}", "try again later")


def of_transport(error: BaseException, endpoint: str) -> DownloadError:
    """No answer at all: which of the usual reasons it is, by the exceptions below."""
    host = urlsplit(endpoint).hostname or endpoint
    causes = _causes(error)
    certificate = next((c for c in causes if isinstance(c, ssl.SSLCertVerificationError)), None)
    if certificate is not None and certificate.verify_code in _CLOCK_CODES:
        return DownloadError(f"the certificate of {host} is not valid today", "check the date and time of this machine")
    if certificate is not None:
        reason = certificate.verify_message or "unknown reason"
        hint = "a proxy that reads traffic needs its certificate in SSL_CERT_FILE"
        return DownloadError(f"the certificate of {host} is not trusted: {reason}", hint)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return DownloadError(f"no secure (TLS) connection to {host}", "check HF_ENDPOINT, the proxy and the clock")
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return DownloadError(f"{host} has no address here: no network, or DNS does not answer", "check the connection")
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return DownloadError(f"{host} refuses connections", "check HF_ENDPOINT, or try again later")
    if isinstance(error, http_library().ProxyError):
        return DownloadError(f"the proxy does not lead to {host}: {_first_line(error)}", "check HTTPS_PROXY")
    if isinstance(error, http_library().TimeoutException):
        return DownloadError(f"{host} does not answer in time", "check the connection, or try again later")
    return DownloadError(f"the connection to {host} broke: {_first_line(error)}", "check the connection")


def is_hopeless(error: BaseException) -> bool:
    """True for trouble that seldom passes and takes long to show: no address, no answer, a bad certificate."""
    kinds = (socket.gaierror, ssl.SSLError, http_library().TimeoutException, http_library().UnsupportedProtocol)
    return any(isinstance(cause, kinds) for cause in _causes(error))


def of_disk(error: OSError, what: str) -> DFlashError:
    """The disk's own refusals: full, over quota, read-only."""
    where = f" {Path(error.filename).parent}" if isinstance(error.filename, str) else " the cache"
    if error.errno in _FULL:
        why = "over its quota" if error.errno == getattr(errno, "EDQUOT", None) else "full"
        full = f"the disk of{where} became {why} while {what} was written"
        return DoesNotFitError(full, "free some space and pull again; finished files are kept")
    if error.errno in _CLOSED:
        return DownloadError(f"{what} cannot be written below{where}: {error.strerror}", "set HF_HUB_CACHE elsewhere")
    return DownloadError(f"{what} cannot be stored: {error.strerror or error}", "check the disk")


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (step := found[-1].__cause__ or found[-1].__context__) is not None and step not in found:
        found.append(step)
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    line = lines[0][:200] if lines else type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in line)
