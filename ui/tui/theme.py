"""The theme of the screens: the one that the settings name, and a change of it written there."""

from __future__ import annotations

from functools import partial
from typing import Any

from textual.app import App

from dflash_local.errors import SettingsError
from dflash_local.settings import Settings
from dflash_local.store.settings_file import remember


def use_theme(app: App[Any], user: Settings) -> None:
    """Show an application in the user's theme, and keep the one that is chosen in it."""
    if user.theme in app.available_themes:
        app.theme = user.theme
    elif user.theme is not None:
        app.notify(f"the settings name a theme that is not there: {user.theme}", severity="warning", markup=False)
    if user.config_dir is not None:
        app.watch(app, "theme", partial(_keep, app, user), init=False)


def _keep(app: App[Any], user: Settings, theme: str) -> None:
    try:
        remember(user, theme=theme)
    except SettingsError as error:
        app.notify(str(error), severity="warning", markup=False)
