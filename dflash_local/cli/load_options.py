"""Options of the command line, made of the fields of ``LoadConfig``: a command that loads a pair takes one of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from dflash_local import settings
from dflash_local.cli import options as opt
from dflash_local.cli.help_pages import LOADING, MORE_LOADING, HelpAll, HelpfulCommand
from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadOption

PARAMETER = "load"  # of the command, annotated as LoadConfig
SAMPLING = "sampling"  # of the command: the options of ``options.SAMPLING`` that were given
MODEL, VARIANT, HELP_ALL = "model", "variant", "help_all"
USUAL = ("context", "quantize", "device")  # options that help shows; --help-all shows all
VARIANT_HELP = "A pre-quantised target of MODEL, as dflash show MODEL lists them."
Result = TypeVar("Result")


def add_command(
    app: typer.Typer,
    name: str,
    command: Callable[..., Any],
    *,
    examples: Sequence[str],
    planning: bool = False,
) -> None:
    """Add a command; one that takes a ``load`` gets it from options of the command line over the user's settings.

    Any other parameter that is a dataclass stands for an option for each of its fields, annotated as a parameter is. An
    option that the command has itself under the name of a field of ``LoadConfig`` stays the command's.

    Args:
        examples: command lines that the command's help ends with.
        planning: only the options that the memory plan depends on.
    """
    added = app.command(name, cls=HelpfulCommand, epilog="\n".join(examples))
    added(_with_options(command, planning))


def _with_options(command: Callable[..., Result], planning: bool) -> Callable[..., Result]:
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation
        for name, each in signature.parameters.items()
        if name != PARAMETER and is_dataclass(each.annotation)
    }
    own = [each for parameter in signature.parameters.values() for each in _own(parameter)]
    names = {each.name for each in own}
    loads = PARAMETER in signature.parameters
    variants = loads and MODEL in names
    own += [_variant()] if variants else []
    offered = [
        option
        for option in LOAD_OPTIONS.values()
        if loads and not option.spelled and (option.planned or not planning) and option.name not in names
    ]

    @functools.wraps(command)
    def run(**given: Any) -> Result:
        given.pop(HELP_ALL)
        if loads:
            given[PARAMETER] = replace(settings.load().load_config, **_taken(offered, given))
        if variants and (variant := given.pop(VARIANT)) is not None:
            given[MODEL] = _repository(given[MODEL], variant)
        if SAMPLING in signature.parameters:
            values = {name: given.pop(name) for name in opt.SAMPLING}
            given[SAMPLING] = {name: value for name, value in values.items() if value is not None}
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        return command(**given)

    parameters = [*own, *map(_parameter, offered), _keyword(HELP_ALL, HelpAll, False)]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _own(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return the parameters of the command line for one of the command's, but for ``load``."""
    if parameter.name == PARAMETER:
        return []
    if parameter.name == SAMPLING:
        return [_keyword(name, annotation) for name, annotation in opt.SAMPLING.items()]
    if is_dataclass(parameter.annotation):
        hints = get_type_hints(parameter.annotation, include_extras=True)
        return [_keyword(each.name, hints[each.name], each.default) for each in fields(parameter.annotation)]
    return [parameter]


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _variant() -> inspect.Parameter:
    """Return ``--variant``, which names another MODEL: not how it is loaded but which files are."""
    option = typer.Option("--variant", help=VARIANT_HELP, metavar="NAME", rich_help_panel=LOADING)
    return _keyword(VARIANT, Annotated[str | None, option])


def _repository(model: str | None, variant: str) -> str:
    from dflash_local.app.resolve import of_variant

    if model is None:
        raise UsageError("--variant is of a MODEL, and none was given", "name the MODEL before it")
    return of_variant(model, variant, settings.load())


def _taken(offered: list[LoadOption], given: dict[str, Any]) -> Mapping[str, Any]:
    """Return the values of the load options, taken out of what was given."""
    found = {}
    for option in offered:
        value = given.pop(option.name)
        if value is not None:
            one_way = option.kind is bool and not option.has_variable
            found[option.name] = not option.default if one_way else value.value if isinstance(value, Enum) else value
    return found


@functools.cache
def _parameter(option: LoadOption) -> inspect.Parameter:
    """Return the option as a command's parameter, None where it is not given."""
    kind: Any = option.kind
    if option.choices:
        kind = cast(Any, Enum)(option.name, [(each, each) for each in option.choices], type=str)
    help_ = f"{option.help} One of {option.allowed}." if option.choices and option.metavar else option.help
    panel = LOADING if option.name in USUAL else MORE_LOADING
    shown = typer.Option(option.switch, help=help_, metavar=option.metavar, rich_help_panel=panel)
    return _keyword(option.name, Annotated[kind | None, shown])
