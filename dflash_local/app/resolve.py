"""From what the user typed to a pair that is on this machine.

Decides by names, folders and manifests. What lies in the files is checked at load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.fine_tune import Base, base_of
from dflash_local.app.models import ModelStore, model_store, registry, remote_code_note, server_commands
from dflash_local.app.notices import Notify
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import BUNDLED, Pair
from dflash_local.checkpoint_files.source import given_path, is_on_disk, open_source
from dflash_local.drafters.kinds import LOOKUP, OWN, folder_of
from dflash_local.errors import DFlashError, DoesNotFitError, DownloadError, UnknownModelError, UsageError
from dflash_local.events import Notice
from dflash_local.settings import Settings
from dflash_local.tables import GIB, gib, listing

if TYPE_CHECKING:
    from dflash_local.catalog.registry import Registry
    from dflash_local.catalog.row import Package, Repo, Row, Variant
    from dflash_local.store.package import PackagePlan
    from dflash_local.store.pull import Wanted

SERVED = "start the server with this command; then dflash chat MODEL --url http://HOST:PORT talks to it"


@dataclass(frozen=True, slots=True)
class Choice:
    """Says what a name means: repositories or folders, and the registry row behind them, if there is one.

    Attributes:
        own_drafter: the drafter is the row's own or a mirror of it, so that what the row knows of its drafter holds.
        base: of a target without a row: the one whose architecture it has, and whose drafter is taken.
        package: the target is a file of it, and ``target`` is where that lies or would lie.
        unlike: why no drafter was found for a target without a row, by the facts that differ.
    """

    name: str
    target: Repo | Path | None
    drafter: Repo | Path | None
    row: Row | None = None
    own_drafter: bool = True
    base: Base | None = None
    package: Package | None = None
    unlike: str = ""

    @property
    def target_row(self) -> Row | None:
        """Return the row whose own target this is, not one of its pre-quantised ones; None where there is none."""
        return self.row if self.row is not None and self.row.target == self.target else None

    @property
    def drafter_row(self) -> Row | None:
        """Return the row that describes the drafter; None where none does."""
        if self.base is not None:
            return self.base.row
        return self.row if self.own_drafter else None

    def with_variant(self, variant: Variant) -> Choice:
        """Return the same pair with a pre-quantised target of its row."""
        drafter = variant.source if self.drafts_itself else self.drafter
        return replace(self, name=variant.model, target=variant.source, drafter=drafter, package=None)

    def announce(self, notify: Notify) -> None:
        """Say whose drafter is taken, where that is another target's, or why none is."""
        if self.base is not None or self.unlike:
            notify(Notice(self.unlike if self.base is None else self.base.notice(self.name)))

    @property
    def drafts_itself(self) -> bool:
        """Return whether the drafter is a layer in the target's own checkpoint."""
        return self.drafter is not None and self.drafter == self.target

    @property
    def counted(self) -> bool:
        """Return whether replies count as those of the name: not where a row names another drafter than this one."""
        return self.row is None or self.own_drafter

    @property
    def shared_row(self) -> str | None:
        """Name the shipped row that figures of this pair are figures of; None where there is none."""
        return self.row.name if self.row and self.own_drafter and not self.row.overridden else None

    @property
    def described(self) -> str:
        """Name it, and the drafter where that is not the row's own."""
        from dflash_local.catalog.row import Repo

        other = self.drafter if not self.own_drafter and isinstance(self.drafter, Repo) else None
        own = "its own layer" if self.drafts_itself else other and other.id
        return f"{self.name} with {own}" if own else self.name

    @property
    def why_not_here(self) -> str:
        """Say why no machine runs it in this process, by what is known of its row; empty where one does, or none is."""
        if self.row is None or self.row.bundled:
            return ""
        return self.row.why_not_here if self.own_drafter else self.row.why_target_not_here

    @property
    def repos(self) -> tuple[tuple[str, Repo], ...]:
        """List the repositories to be had, with their roles."""
        both = (("target", self.target), ("drafter", None if self.drafts_itself else self.drafter))
        return tuple((role, repo) for role, repo in both if repo is not None and not isinstance(repo, Path))

    @property
    def roles(self) -> tuple[str, ...]:
        """List the roles of what is to be had, repositories or a package's file."""
        return (*(["target"] if self.package is not None else []), *(role for role, _ in self.repos))


@dataclass(frozen=True, slots=True)
class Missing:
    """Says what of a pair is not on this machine.

    Attributes:
        text: that in words, with the size of the download. roles: of the repositories that are to be had.
    """

    choice: Choice
    text: str
    roles: tuple[str, ...]

    @property
    def needs(self) -> tuple[Wanted, ...]:
        return wanted(self.choice, self.roles)


Obtain = Callable[[Missing], bool]  # downloads it; False where nobody can be asked whether it is to
Suit = Callable[[Choice, ModelStore], Choice]  # another repository of the same model where this one does not fit


def resolve(
    model: str,
    drafter: str | None,
    user: Settings,
    notify: Notify,
    *,
    draft: bool = True,
    obtain: Obtain = lambda _missing: False,
    suit: Suit = lambda choice, _store: choice,
) -> Pair:
    """Find the folders of the pair that ``model`` names.

    Args:
        model: a bundled name, a folder, a name of the registry, an ``owner/name`` that is here, or with ``drafter``
            any ``owner/name``. A folder or repository with the architecture of a known target takes its drafter.
        drafter: a folder or ``owner/name``, or ``mtp``, a layer of the target's own; overrides the registry's.
        draft: False needs the target only, and takes the drafter when it is there.
        obtain: gets what is missing. suit: takes what fits this machine, see ``app.recommending.suited``.

    Raises:
        UnknownModelError: no such name; suggests the nearest. UsageError: a bad ``drafter``.
        DownloadError: something is missing and was not downloaded. DoesNotFitError: the target runs on a server only.
    """
    choice = choose(model, drafter, user, draft=draft)
    if model in BUNDLED or is_on_disk(model):
        if choice.base is None and (drafter is None or is_on_disk(drafter)):
            choice.announce(notify)
            return bundled.find(model, drafter)
    if choice.row is not None and choice.row.bundled and choice.own_drafter:
        return bundled.find(choice.row.bundled)
    refuse_what_does_not_run(choice)
    choice.announce(notify)
    found = {}
    if choice.roles:
        store = ModelStore.of(user)
        choice = with_local_mirror(suit(choice, store), store)
        _obtain(choice, store, user, draft, obtain)
        found = {role: store.find(repo) for role, repo in choice.repos}
        if any(here is not None and not here.verified for here in found.values()):
            notify(Notice(f"not every file was checked against the Hub; {_pull_command(choice)} does that"))

    def folder(role: str, part: Repo | Path | None) -> Path | None:
        here = found.get(role)
        return part if isinstance(part, Path) else here.folder if here is not None and not here.missing else None

    target = folder("target", choice.target)
    if target is None:
        raise DownloadError(f"{choice.name} is not complete", f"dflash pull {choice.name}")
    drafter_folder = target if choice.drafts_itself else folder("drafter", choice.drafter)
    pair = Pair(choice.name, target, drafter_folder, False, counted=choice.counted, row=choice.shared_row)
    if choice.row is not None:
        pair = replace(pair, sampling=choice.row.advised_sampling)
    if (row := choice.drafter_row) is None:
        return pair
    return replace(
        pair,
        acceptance_band=row.alarm_band,
        generations=row.generations,
        thinking=row.thinking,
        tuned_from=None if choice.base is None else choice.base.name,
    )


def choose(model: str, drafter: str | None, user: Settings, *, draft: bool = True) -> Choice:
    """Tell what the words mean, by name, and by config.json where that is here: nothing else need be on this machine.

    Args:
        draft: False looks for no drafter of a target that no row names.

    Raises:
        UnknownModelError: no such name; suggests the nearest. UsageError: a bad ``drafter``.
    """
    if drafter == OWN:
        from dflash_local.catalog.repo_id import is_repo_id

        choice = choose(model, model if is_repo_id(model) else None, user, draft=False)
        return replace(choice, drafter=choice.target, own_drafter=False)
    own = _drafter(drafter) if drafter is not None else None
    if model in BUNDLED or is_on_disk(model):
        pair = bundled.find(model)
        row = registry(user).find(model) if model in BUNDLED else None
        searched = row is None and own is None and draft
        base, unlike = base_of(model, pair.target, user) if searched else (None, "")
        found = pair.drafter if base is None else base.drafter
        return Choice(model, pair.target, own or found, row, own is None, base, unlike=unlike)
    rows = registry(user)
    row = rows.find(model)
    if row is None and (listed := rows.find_variant(model)) is not None:
        row, variant = listed
        if variant.file is not None:
            from dflash_local.store.selection import refuse_unread

            refuse_unread(f"{variant.repo}/{variant.file} ({variant.format})")
        plain = Choice(row.name, row.target, own or row.drafter, row, own is None or _is_own(own, row))
        return plain.with_variant(variant)
    if row is None:
        return _stranger(model, own, rows, user, draft)
    if row.bundled:
        return replace(choose(row.bundled, drafter, user), row=row)
    named = own or _named_drafter(row, model)
    return _with_package(Choice(row.name, row.target, named, row, named is None or _is_own(named, row)), model, user)


def of_variant(model: str, variant: str, user: Settings) -> str:
    """Name the repository of a model's pre-quantised target, or the file of one, which is a MODEL itself.

    Raises:
        UnknownModelError: no such model. UsageError: no such variant; lists those that there are.
    """
    row = choose(model, None, user).row
    if row is None or not row.variants:
        raise UsageError(f"no pre-quantised variants of {model} are known", "leave --variant out")
    found = row.variant(variant)
    if found is None:
        there = listing([item.name for item in row.variants])
        raise UsageError(f"{row.name} has no variant {variant!r}", f"it has {there}")
    return found.model


def of_row(row: Row) -> Choice:
    """Choose a row's own target, as the Hub has it, and drafter."""
    return Choice(row.name, row.target, row.drafter or bundled.drafter_of(row), row)


def unknown(model: str, rows: Registry) -> UnknownModelError:
    """Make the error for a name that nothing answers to, with the nearest names."""
    from dflash_local.catalog.repo_id import is_repo_id

    close = nearest(model, rows)
    hint = "dflash models lists all; a folder or GGUF file works too, and so does owner/name with --drafter"
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
        row = rows.find(close[0])
        if is_repo_id(model) and row is not None and row.drafter is not None:
            hint += f" for a fine-tune of it: --drafter {row.drafter.id}"
    return UnknownModelError(f"unknown model {model!r}: not bundled, not in the registry, not on disk", hint)


def nearest(model: str, rows: Registry) -> tuple[str, ...]:
    """List at most three names that ``model`` may have meant."""
    import difflib

    toys = difflib.get_close_matches(model.lower(), BUNDLED, n=1, cutoff=0.6)
    return tuple(dict.fromkeys((*toys, *rows.nearest(model))))[:3]


def refuse_what_does_not_run(choice: Choice) -> None:
    """Say so when this version's engine cannot run a pair on any single machine.

    Raises:
        DownloadError: the drafter is announced only. DoesNotFitError: it runs on a server, with the command.
    """
    row = choice.row
    if row is None or row.bundled:
        return
    refuse_announced(choice)
    command, note = next(iter(server_commands(row).values()), ""), remote_code_note(row)
    start = f"{SERVED.replace('MODEL', row.name)}: {command}{note and f' ({note})'}"
    hint = start if command else "it needs a server; no command that starts one is known"
    if choice.why_not_here:
        raise DoesNotFitError(f"{choice.described} runs on a server only: {choice.why_not_here}", hint)


def refuse_announced(choice: Choice) -> None:
    """Raise DownloadError where no drafter is published yet, and none was named."""
    if choice.row is not None and not choice.row.has_drafter and choice.drafter is None:
        text = f"{choice.row.name} is announced: no drafter is published yet"
        raise DownloadError(text, "dflash models lists what there is")


def wanted(choice: Choice, roles: Sequence[str] = ("target", "drafter")) -> tuple[Wanted, ...]:
    """List what the store has to fetch for a choice."""
    from dflash_local.store.pull import Wanted

    row = choice.drafter_row
    known = row.fingerprints if row is not None else ()
    return tuple(
        Wanted(role, repo.id, repo.revision, known if role == "drafter" else (), repo.file)  # type: ignore[arg-type]
        for role, repo in choice.repos
        if role in roles
    )


def _obtain(choice: Choice, store: ModelStore, user: Settings, draft: bool, obtain: Obtain) -> None:
    """Get what is missing, or say so."""
    lacking = missing_files(choice, store, draft)
    if not lacking:
        return
    names = listing([name for found in lacking.values() for name in found])
    text = f"{choice.name} is not on this machine"
    if choice.base is not None and len(lacking) == 1:
        text = f"the drafter of {choice.base.name} is not on this machine"
    elif any(store.find(repo) for role, repo in choice.repos if role in lacking) or len(lacking) < len(choice.roles):
        text = f"{choice.name} is only partly on this machine: {names} missing"
    command = _pull_command(choice)
    if user.hub.offline:
        raise DownloadError(f"{text}, and this is offline", f"without HF_HUB_OFFLINE: {command}")
    needed = tuple(lacking)
    size = size_gib(choice, needed)
    missing = Missing(choice, text if size is None else f"{text} ({gib(size)})", needed)
    if not obtain(missing):
        raise DownloadError(missing.text, command)


def missing_files(choice: Choice, store: ModelStore, draft: bool) -> dict[str, tuple[str, ...]]:
    """List what of a pair is not on this machine, by the role of its repository."""
    roles = ("target", "drafter") if draft else ("target",)
    lacking = {role: found for role, repo in choice.repos if role in roles and (found := _lack(repo, store))}
    plan = package_plan(choice, store)
    return lacking if plan is None or plan.ready else {"target": (plan.package.label,), **lacking}


def with_local_mirror(choice: Choice, store: ModelStore) -> Choice:
    """Choose a mirror of the row's drafter, where that is what was downloaded."""
    from dflash_local.catalog.row import Repo

    row = choice.drafter_row
    if row is None or choice.drafter != row.drafter or row.drafter is None or store.find(row.drafter) is not None:
        return choice
    mirrors = (Repo(name) for name in row.mirrors)
    return next((replace(choice, drafter=mirror) for mirror in mirrors if not _lack(mirror, store)), choice)


def _lack(repo: Repo, store: ModelStore) -> tuple[str, ...]:
    found = store.find(repo)
    if found is None:
        return (f"{repo.id}/{repo.file}" if repo.file else repo.id,)
    return tuple(f"{repo.id}/{name}" for name in found.missing)


def size_gib(choice: Choice, roles: Sequence[str]) -> float | None:
    """Return GiB of those repositories of a pair; None where the registry does not know them all."""
    row = choice.drafter_row
    package = None if choice.package is None else choice.package.wheel_bytes / GIB
    if package is not None and tuple(roles) == ("target",):
        return package
    if row is None or (choice.base is not None and "target" in roles):
        return None
    described = row.variant(choice.name)
    target = package or (row.target_gib if described is None else described.size_gib)
    sizes = [target if role == "target" else row.drafter_gib for role in roles]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def drafter_option(choice: Choice) -> str:
    """Write `` --drafter owner/name`` for a drafter that the name alone does not lead to; else nothing."""
    drafter, row = choice.drafter, choice.row
    if choice.drafts_itself:
        return f" --drafter {OWN}"
    if drafter == folder_of(LOOKUP):
        return f" --drafter {LOOKUP}"
    own = row is not None and (choice.own_drafter if row.bundled else drafter in (row.drafter, bundled.drafter_of(row)))
    if drafter is None or own:
        return ""
    return f" --drafter {drafter if isinstance(drafter, Path) else drafter.id}"


def _pull_command(choice: Choice) -> str:
    return f"dflash pull {choice.name}{drafter_option(choice)}"


def _stranger(model: str, own: Repo | Path | None, rows: Registry, user: Settings, draft: bool) -> Choice:
    """Choose a target that the registry does not know: fine where its drafter was named, or where it is here.

    Raises:
        UnknownModelError: it is neither. UsageError: it is here, and no drafter is known.
    """
    from dflash_local.catalog.repo_id import is_repo_id
    from dflash_local.catalog.row import Repo

    if not is_repo_id(model):
        raise unknown(model, rows)
    target = Repo(model)
    if own is not None:
        return Choice(model, target, own)
    store = model_store(user)
    here = None if store is None else store.find(target)
    if here is None or open_source(here.folder).config() is None:
        raise unknown(model, rows)
    base, _ = base_of(model, target, user) if draft else (None, "")
    if base is None and draft:
        raise UsageError(
            f"no drafter is known for {model}: it has the architecture of no target of the registry",
            "name one with --drafter, or run without one: --mode ar",
        )
    return Choice(model, target, None if base is None else base.drafter, base=base)


def _drafter(text: str) -> Repo | Path:
    from dflash_local.catalog.repo_id import is_repo_id
    from dflash_local.catalog.row import Repo

    if text == LOOKUP:
        return folder_of(LOOKUP)
    if is_on_disk(text):
        return given_path(text)
    if not is_repo_id(text):
        raise UsageError(
            f"--drafter {text!r} is neither on this machine nor a repository",
            f"give the folder or GGUF file of a DFlash drafter, owner/name, {OWN} for the target's own layer, or "
            f"{LOOKUP} for copies of the text",
        )
    return Repo(text)


def _named_drafter(row: Row, model: str) -> Repo | Path | None:
    """Return the row's drafter, or the mirror of it, or the other drafter, that the user asked for by name."""
    from dflash_local.catalog.row import Repo

    wanted = model.strip().lower()
    others = (*row.mirrors, *(one.repo for one in row.other_drafters))
    other = next((name for name in others if wanted == name.lower()), None)
    if other is None:  # without its owner, as long as that is not the row's own drafter
        bare = (one.repo for one in row.other_drafters if wanted == one.repo.lower().partition("/")[2])
        own = row.drafter is not None and wanted == row.drafter.id.lower().partition("/")[2]
        other = None if own else next(bare, None)
    return Repo(other) if other else row.drafter or bundled.drafter_of(row)


def _is_own(drafter: Repo | Path, row: Row) -> bool:
    if isinstance(drafter, Path):
        return drafter == bundled.drafter_of(row)
    known = ([row.drafter.id] if row.drafter else []) + list(row.mirrors)
    return drafter.id.lower() in (name.lower() for name in known)


# Targets that a package of the Python registry has, too


def _with_package(choice: Choice, model: str, user: Settings) -> Choice:
    """Choose the package's file for the target, but where the Hub's repository was named, or is all that is here.

    Args:
        model: as the user typed it.
    """
    from dflash_local.store.package import file_of, find

    row, store = choice.row, model_store(user)
    if row is None or row.package is None or row.target is None or choice.target != row.target:
        return choice
    wanted, full = model.strip().lower(), row.target.id.lower()
    if wanted in (full, full.partition("/")[2]):
        return replace(choice, name=row.target.id)
    if store is None or store.packages is None:
        return choice
    if find(store.packages, row.package) is None:
        with suppress(DFlashError):  # a damaged repository is not here
            here = store.find(row.target)
            if here is not None and here.complete:
                return choice
    return replace(choice, target=file_of(store.packages, row.package), package=row.package)


def package_plan(choice: Choice, store: ModelStore) -> PackagePlan | None:
    """Plan what is to be fetched for the target of a choice; None where it is no package's file."""
    from dflash_local.store.package import prepare

    if choice.package is None or store.packages is None or choice.row is None or choice.row.target is None:
        return None
    return prepare(store.packages, choice.package, f"dflash pull {choice.row.target.id} takes it from the Hub")
