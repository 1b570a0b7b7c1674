"""The exception tree and its table of exit codes and HTTP statuses: all errors that a user can cause or repair."""

from __future__ import annotations

from typing import NamedTuple


class Codes(NamedTuple):
    """How one kind of error leaves the program: process exit code and HTTP status."""

    exit_code: int
    http_status: int


HALF = 2_000  # characters


class DFlashError(Exception):
    """An error: a one-line ``message`` that names the offending value, and a ``hint`` at the fix, or none.

    One longer than twice ``HALF`` loses its middle: what it quotes may come from a request, a file or a server.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        message, hint = (
            text if len(text) <= 2 * HALF else f"{text[:HALF]} … {text[-HALF:]}" for text in (message, hint)
        )
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def kind(self) -> str:
        """Return the class name, used as the error type in JSON and HTTP answers."""
        return type(self).__name__

    @property
    def codes(self) -> Codes:
        """Return the exit code and HTTP status of the nearest class listed in ``CODES``."""
        return next(CODES[cls] for cls in type(self).__mro__ if cls in CODES)

    @property
    def exit_code(self) -> int:
        return self.codes.exit_code

    @property
    def http_status(self) -> int:
        return self.codes.http_status

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form printed on stderr under ``--json``."""
        fields = {"type": self.kind, "message": self.message, "hint": self.hint, "exit_code": self.exit_code}
        return {"error": fields}

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(DFlashError):
    """A bad argument, option or request field."""


class ContextError(UsageError):
    """A prompt that does not fit the context."""


class SettingsError(DFlashError):
    """A bad value in the environment, the settings file or the registry."""


class UnknownModelError(SettingsError):
    """A name that is neither a bundled pair, a registry row nor a folder."""


class BusyError(DFlashError):
    """The queue is full."""


class DownloadError(DFlashError):
    """A download that failed: not found, gated, offline, network."""


class DoesNotFitError(DFlashError):
    """Not enough memory or disk."""


class CheckpointError(DFlashError):
    """A file of a checkpoint is missing, damaged or not what it claims."""


class PairError(CheckpointError):
    """A drafter and a target that do not belong together."""


class PairCheckError(CheckpointError):
    """``check`` found a target, a drafter or a chat template that is not what it should be."""


class TemplateError(CheckpointError):
    """A chat template that fails, tries to escape, or takes too long."""


class TokenizerError(CheckpointError):
    """A tokenizer.json that hangs, breaks its process or takes too much memory."""


class PromptError(DFlashError):
    """A prompt could not be prepared, by a fault of ours; the session stays as it was."""


class EngineError(DFlashError):
    """The engine broke: the session must be loaded again."""


class NumericsError(EngineError):
    """The target produced NaN or infinite logits; the request ends, the session stays."""


class ExactnessError(EngineError):
    """``certify`` found a divergence that is not a near-tie."""


class DeviceLostError(EngineError):
    """The device's context is lost, after a suspend or a fault of a kernel: nothing of the session can be used."""


class KernelError(EngineError):
    """Kernels cannot be compiled or launched here; an engine that needs none of them still runs."""


class DriverError(EngineError):
    """An NVIDIA card that the installed torch cannot use: an old driver, a torch built without CUDA or not for it."""


class EngineCheckError(EngineError):
    """``check`` found products, texts or a card that are not what they should be."""


class ServerError(DFlashError):
    """A server of another program does not answer as it should; the next request asks it anew."""


class MissingDependencyError(DFlashError):
    """A library that this operation needs is not installed."""


class Interrupted(DFlashError):
    """The user pressed Ctrl-C."""


CODES: dict[type[DFlashError], Codes] = {
    DFlashError: Codes(1, 500),
    UsageError: Codes(2, 400),
    SettingsError: Codes(3, 500),
    UnknownModelError: Codes(3, 404),
    BusyError: Codes(1, 429),
    DownloadError: Codes(4, 502),
    DoesNotFitError: Codes(5, 507),
    CheckpointError: Codes(6, 500),
    EngineError: Codes(7, 500),
    ServerError: Codes(7, 502),
    Interrupted: Codes(130, 499),
}
