"""An import path without the folder that the user stands in, where files of a stranger may lie."""

import os

_PACKAGE_FOLDER = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))


def without_current_folder(entries: list[str]) -> list[str]:
    """Return the entries without those that are the current folder, however they are spelled.

    The folder that this package lies in stays: who works in a checkout of it runs its files anyway.
    """
    try:
        current = os.path.realpath(os.getcwd())
    except OSError:  # the folder was removed: nothing is imported from it
        return [entry for entry in entries if entry]
    if current == _PACKAGE_FOLDER:
        return entries
    return [entry for entry in entries if os.path.realpath(entry) != current]
