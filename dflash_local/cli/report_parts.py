"""Makes what ``dflash doctor --report`` writes: a function for each part, and the scrubber over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local import settings
from dflash_local.app import fitting
from dflash_local.app.models import install_status, model_store, registry
from dflash_local.cli.doctor_checks import checked
from dflash_local.errors import DFlashError, SettingsError
from dflash_local.json_text import parse_json
from dflash_local.load_config import LoadConfig
from dflash_local.report import errors_log
from dflash_local.report.archive import SCHEMA
from dflash_local.report.scrub import SHORT_COMMIT, scrubbed, secrets_of
from dflash_local.settings import Settings
from dflash_local.store.paths import CHECKS, KERNEL_RECORD, cubins_folder

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine

MOST_CHECKS = 5  # the last ones
MAX_BYTES = 2**21  # of a JSON file that is taken up
LOCAL = "local model"


def collect(user: Settings) -> dict[str, Any]:
    """Every part by its name, scrubbed; empty ones are left out. Of ``user`` only folders and load options count."""
    settings.quiet_libraries()
    found = {name: make(user) for name, (make, _) in PARTS.items()}
    secrets = secrets_of(user, _public_names(), _local_folders(user))
    return {name: scrubbed(part, secrets) for name, part in found.items() if part}


def main_part(user: Settings) -> dict[str, Any]:
    """When, by which version, on what machine: no host, no user."""
    from dflash_local.bench import provenance

    versions = provenance.versions()
    versions["revision"] = (versions["revision"] or "")[:SHORT_COMMIT] or None
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions,
        "machine": provenance.machine(),
        "load_options": _changed(user.load_config),
    }


def doctor_part(_user: Settings) -> list[dict[str, Any]]:
    return [asdict(check) for check in checked()[1]]


def kernels_part(user: Settings) -> list[dict[str, Any]]:
    """Verdicts on compiled kernels and the configurations chosen, of each card; those that are right only counted."""
    folder = cubins_folder(user)
    found = []
    for path in sorted(folder.glob(KERNEL_RECORD.format("*"))) if folder else ():
        content = _json_of(path)
        if not isinstance(content, dict):
            continue
        verdicts = content.get("verdicts")
        verdicts = verdicts if isinstance(verdicts, dict) else {}
        facts = {name: content.get(name) for name in ("card", "capability", "driver", "nvrtc")}
        found.append(
            {
                **facts,
                "source": str(content.get("source", ""))[:SHORT_COMMIT],
                "right": sum(verdict == "right" for verdict in verdicts.values()),
                "failed": {name: verdict for name, verdict in verdicts.items() if verdict != "right"},
                "choices": content.get("choices"),
                "microseconds": content.get("microseconds"),
            }
        )
    return found


def plans_part(user: Settings) -> list[dict[str, Any]]:
    """The plan of each pair that is here, by its repository; the user's own rows are local models."""
    try:
        store, rows = model_store(user), registry(user).rows
        where = fitting.machine(user, device=user.load_config.device)
    except DFlashError as error:
        return [{"model": None, "error": error.kind}]
    here = [row for row in rows if install_status(row, store).state in ("bundled", "local")]
    return [_planned(row, where, user) for row in here]


def _planned(row: Row, where: Machine, user: Settings) -> dict[str, Any]:
    from dflash_local.planner.plan import plan

    load = user.load_config
    model = LOCAL if row.overridden else row.name
    asked = {"asked": asdict(load), "kernels": where.kernels, "compiler": where.compiler}
    try:
        known = fitting.shapes(fitting.row_choice(row, user), model_store(user))
        if known is None:
            return {"model": model, "error": "unknown shape"}
        found = plan(known.target, known.drafter, where, load)
    except DFlashError as error:
        return {"model": model, "error": error.kind}
    return {"model": model, **asked, "plan": fitting.as_json(found)}


def check_part(user: Settings) -> list[Any]:
    folder = user.cache_dir / CHECKS if user.cache_dir else None
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime) if folder else []
    return [content for file in files[-MOST_CHECKS:] if (content := _json_of(file)) is not None]


def errors_part(user: Settings) -> list[dict[str, Any]]:
    return errors_log.read(user.state_dir) if user.state_dir else []


# A further part is a function and its line here: the name of its file, and what it tells.
PARTS: Mapping[str, tuple[Callable[[Settings], Any], str]] = {
    "report": (main_part, "versions, system, card and driver; options of yours for loading"),
    "doctor": (doctor_part, "what dflash doctor says"),
    "kernels": (kernels_part, "compiled kernels: which failed, which were chosen"),
    "plans": (plans_part, "the memory plan of each pair that is here"),
    "check": (check_part, "what the last checks of pairs found"),
    "errors": (errors_part, "the last errors: class, template and place, not what they said"),
}


def _changed(load: LoadConfig) -> dict[str, Any]:
    usual = asdict(LoadConfig())
    return {name: value for name, value in asdict(load).items() if value != usual[name]}


def _json_of(path: Path) -> Any:
    """A JSON file of ours; None where there is none or it is damaged."""
    try:
        with path.open("rb") as file:
            return parse_json(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None


def _public_names() -> frozenset[str]:
    """Names of the registry that is shipped."""
    from dflash_local.catalog import registry as catalog

    try:
        rows = catalog.load(None).rows
    except SettingsError:
        return frozenset()
    return frozenset(name for row in rows for name in (*row.names, *(item.repo for item in row.variants)))


def _local_folders(user: Settings) -> list[Path]:
    """Folders of models that the user names, and the repositories of rows of the user's own."""
    public = _public_names()
    known = {name.lower() for name in public} | {name.rpartition("/")[2].lower() for name in public}
    folders = [Path(user.model).expanduser()] if user.model and user.model.lower() not in known else []
    try:
        own = [row for row in registry(user).rows if row.overridden]
    except SettingsError:
        own = []
    return [*folders, *(Path(name) for row in own for name in row.names if name not in public)]
