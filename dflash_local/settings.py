"""Where files live and what the user wants by default: XDG folders, ``settings.json``, and all of ``os.environ``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from dflash_local.errors import SettingsError, UsageError
from dflash_local.json_text import parse_json
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig, LoadOption
from dflash_local.request import MAX_NEW_TOKENS, MAX_TEMPERATURE

APP = "dflash-local"
SETTINGS_FILE = "settings.json"
HUB_ENDPOINT = "https://huggingface.co"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
# Quiet and private libraries, and GPUs in nvidia-smi's order, where CUDA's own is by speed; set only where the user has
# not decided otherwise.
LIBRARY_DEFAULTS = {
    DEVICE_ORDER: "PCI_BUS_ID",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


FullContext = Literal["drop", "summarise", "stop"]
LAUNCHED = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llama_cpp"}  # server program -> its setting
FLAGS = ("thinking", "history", "attach", "debug", "safe", "in_process")
FLAG_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # of variables, besides those of JSON


@dataclass(frozen=True, slots=True)
class HubSettings:
    """How Hugging Face is reached, by the variables every program of that world honours.

    Attributes:
        endpoint: ``HF_ENDPOINT`` without a slash at its end. cache: of all programs; None without a home to put it in.
        token: ``HF_TOKEN``, else what ``hf auth login`` left in the token file. Never printed.
        offline: ``HF_HUB_OFFLINE`` or ``TRANSFORMERS_OFFLINE``: no socket may be opened.
    """

    endpoint: str
    cache: Path | None
    token: str | None = field(repr=False)
    offline: bool


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Folders in which other programs keep GGUF files, by their own variables; they need not exist."""

    lm_studio: tuple[Path, ...]
    llama_cpp: tuple[Path, ...]
    ollama: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's folders and settings. A folder is None when there is no home to put it in.

    A setting of None was not given. A ``DFLASH_`` variable wins over the file, an option of the command line over both.

    Attributes:
        load_config: how pairs are loaded where a command has no options of its own.
        full_context: what a chat does with its oldest messages once they do not fit: ``service.full_context``.
        attach: use a pair that another command keeps loaded. in_process: load pairs in the command's own process.
        safe: begin with the slowest way of running, which needs least of the machine.
        vllm: the program of that name to launch, in place of the one on PATH. sglang: the Python that has SGLang.
        llama_cpp: llama-server, as vllm.
        theme: of the terminal's screens, which write it here.
    """

    environ: Mapping[str, str]
    config_dir: Path | None
    data_dir: Path | None
    cache_dir: Path | None
    state_dir: Path | None
    hub: HubSettings
    others: OtherPrograms = OtherPrograms((), (), ())
    load_config: LoadConfig = LoadConfig()
    model: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    thinking: bool | None = None
    history: bool = True
    full_context: FullContext = "drop"
    attach: bool = True
    debug: bool = False
    safe: bool = False
    in_process: bool = False
    vllm: str | None = None
    sglang: str | None = None
    llama_cpp: str | None = None
    theme: str | None = None

    @property
    def home(self) -> Path | None:
        """Return the user's home; None where the environment names none."""
        home = _home(self.environ)
        return Path(home) if home else None

    @property
    def own_programs(self) -> dict[str, str]:
        """Return the programs to launch in place of those on PATH, by name: those that the user named."""
        named = {program: getattr(self, setting) for program, setting in LAUNCHED.items()}
        return {program: path for program, path in named.items() if path is not None}


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of this process, or of an environment. SettingsError names the variable, or file and key."""
    env = environment() if environ is None else dict(environ)
    config = _folder(env, "XDG_CONFIG_HOME", ".config", "config")
    given = _from_file(config / SETTINGS_FILE) if config else {}
    given.update(_from_variables(env))
    try:
        load_config = LoadConfig(**{name: given.pop(name) for name in LOAD_OPTIONS if name in given})
    except UsageError as error:  # what its own pattern does not tell of a value
        raise SettingsError(f"DFLASH_ variables and {SETTINGS_FILE}: {error.message}", error.hint) from None
    return Settings(
        environ=env,
        config_dir=config,
        data_dir=_folder(env, "XDG_DATA_HOME", ".local/share", "data"),
        cache_dir=_folder(env, "XDG_CACHE_HOME", ".cache", "cache"),
        state_dir=_folder(env, "XDG_STATE_HOME", ".local/state", "state"),
        hub=_hub(env),
        others=_other_programs(env),
        load_config=load_config,
        **given,
    )


def environment() -> dict[str, str]:
    """Return the variables of this process as they are now."""
    return dict(os.environ)


def quiet_libraries() -> None:
    """Set ``LIBRARY_DEFAULTS`` and turn off Xet; call before importing libraries."""
    for name, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # of this process: ``store.xet`` has one of its own


@cache
def keep_gradio_private() -> None:
    """Give Gradio a private folder for files, removed when the process ends; call before importing it."""
    import atexit  # every command loads this module
    import tempfile

    folder = tempfile.mkdtemp(prefix=f"{APP}-page-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = folder


def _folder(env: Mapping[str, str], variable: str, below_home: str, kind: str) -> Path | None:
    """Return one of our folders: ``DFLASH_HOME`` holds all, else XDG (relative paths are ignored, as it says)."""
    own = env.get("DFLASH_HOME")
    if own:
        if not Path(own).is_absolute():
            raise SettingsError(f"DFLASH_HOME={own!r} is not an absolute path", "give a full path such as /data/dflash")
        return Path(own) / kind
    xdg = env.get(variable, "")
    if xdg and Path(xdg).is_absolute():
        return Path(xdg) / APP
    home = _home(env)
    return Path(home) / below_home / APP if home else None


def _home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or env.get("USERPROFILE") or ""


def _hub(env: Mapping[str, str]) -> HubSettings:
    """Read as huggingface_hub reads them, but for this call. An unreadable token file counts as none."""
    endpoint = (env.get("HF_ENDPOINT") or HUB_ENDPOINT).strip().rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        hint = "give one that starts with https://, or unset it"
        raise SettingsError(f"HF_ENDPOINT={endpoint!r} is not a web address", hint)
    home = _hub_home(env)
    cache = _expanded(env, env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")) or (home and home / "hub")
    offline = any(_switched_on(env, name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return HubSettings(endpoint, cache, _token(env, home), offline)


def _other_programs(env: Mapping[str, str]) -> OtherPrograms:
    home = Path(_home(env)) if _home(env) else None
    caches = [Path(env["XDG_CACHE_HOME"])] if env.get("XDG_CACHE_HOME") else []
    caches += [home / ".cache", home / "Library" / "Caches"] if home else []
    studio = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"] if home else []
    llama, ollama = _expanded(env, env.get("LLAMA_CACHE")), _expanded(env, env.get("OLLAMA_MODELS"))
    service = Path("/usr/share/ollama/.ollama/models")  # where its installer for Linux lets it run as a user of its own
    return OtherPrograms(
        tuple(studio),
        (llama,) if llama else tuple(folder / "llama.cpp" for folder in caches),
        (ollama,) if ollama else (*([home / ".ollama" / "models"] if home else []), service),
    )


def _hub_home(env: Mapping[str, str]) -> Path | None:
    chosen = _expanded(env, env.get("HF_HOME"))
    if chosen:
        return chosen
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "huggingface"
    return Path(_home(env)) / ".cache" / "huggingface" if _home(env) else None


def _expanded(env: Mapping[str, str], text: str | None) -> Path | None:
    """Return a folder as the shell would read it."""
    if not text:
        return None
    return Path(_home(env) + text[1:] if text == "~" or text.startswith(("~/", "~\\")) else text).absolute()


def _switched_on(env: Mapping[str, str], variable: str) -> bool:
    return env.get(variable, "").strip().upper() in ("1", "ON", "YES", "TRUE")


def _token(env: Mapping[str, str], home: Path | None) -> str | None:
    if _switched_on(env, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    given = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
    file = _expanded(env, env.get("HF_TOKEN_PATH")) or (home and home / "token")
    if not given and file:
        try:
            given = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
    return (given or "").replace("\r", "").replace("\n", "").strip() or None


@cache
def _record() -> Any:
    """Return the record of all settings, which the file and the variables share; none has a default."""
    from msgspec import Meta, defstruct  # not for ``dflash --help``

    from dflash_local.schema import Record

    def kind_of(option: LoadOption) -> Any:
        if option.choices:
            return Literal[option.choices]
        if option.pattern:
            return Annotated[str, Meta(pattern=f"^(?:{option.pattern})$", description=option.allowed)]
        return bool if option.kind is bool else Annotated[option.kind, Meta(ge=option.low, le=option.high)]

    kinds = {name: kind_of(option) for name, option in LOAD_OPTIONS.items() if option.has_variable}
    kinds["model"] = Annotated[str, Meta(min_length=1, description="the name of a pair or a folder")]
    kinds["temperature"] = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
    kinds["max_new_tokens"] = Annotated[int, Meta(ge=0, le=MAX_NEW_TOKENS)]
    kinds["full_context"] = FullContext
    kinds["theme"] = Annotated[str, Meta(min_length=1, description="the name of a theme")]
    kinds |= dict.fromkeys(FLAGS, bool)
    kinds |= dict.fromkeys(LAUNCHED.values(), Annotated[str, Meta(min_length=1, description="the path of a program")])
    fields = [(name, kind | None, None) for name, kind in kinds.items()]
    return defstruct("SettingsRecord", fields, bases=(Record,), frozen=True, forbid_unknown_fields=True)


def _given(values: Mapping[str, Any], strict: bool, where: Callable[[str], str]) -> dict[str, Any]:
    """Return the settings of a source. SettingsError: one is unknown or not allowed; ``where`` begins its message."""
    if not values:
        return {}
    from dflash_local.schema import InvalidValue, convert

    try:
        found = convert(values, _record(), strict=strict)
    except InvalidValue as error:
        raise SettingsError(f"{where(error.path)} {error.problem}", error.hint) from None
    return {name: getattr(found, name) for name in values if getattr(found, name) is not None}


def _from_variables(env: Mapping[str, str]) -> dict[str, Any]:
    switches = {*FLAGS, *(name for name, option in LOAD_OPTIONS.items() if option.kind is bool)}
    options = (name for name, option in LOAD_OPTIONS.items() if option.has_variable)
    values = {}
    others = ("model", "temperature", "max_new_tokens", "full_context", "theme", *LAUNCHED.values())
    for name in (*options, *FLAGS, *others):
        text = env.get(f"DFLASH_{name.upper()}", "").strip()
        if text:
            values[name] = FLAG_WORDS.get(text.lower(), text.lower()) if name in switches else text
    return _given(values, False, lambda name: f"DFLASH_{name.upper()}")


def _from_file(path: Path) -> dict[str, Any]:
    """Return the keys of the settings file; an absent file has none."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", "make it readable or remove it") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}", "correct it or remove it") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must hold one JSON object", "correct it or remove it")
    return _given(content, True, lambda name: f"{path}: {name}")
