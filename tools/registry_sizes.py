"""Sizes that the registry lacks, asked of the Hub: ``python -m tools.registry_sizes [OWNER/NAME ...]``.

Prints a line for each repository whose size is null in ``registry.yaml``, or for the ones that are named. The files
that a pull would fetch are counted by their listing; nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from dflash_local import settings
from dflash_local.catalog.registry import load
from dflash_local.catalog.row import Row
from dflash_local.errors import DFlashError
from dflash_local.store.hub import Hub
from dflash_local.store.selection import wanted
from dflash_local.tables import GIB


def unsized(rows: Iterable[Row]) -> Iterator[str]:
    """Repositories of targets, drafters and variants whose size is not known."""
    for row in rows:
        sizes = ((row.target, row.target_gib), (row.drafter, row.drafter_gib))
        yield from (repo.id for repo, gib in sizes if repo is not None and gib is None)
        yield from (variant.repo for variant in row.variants if variant.size_gib is None)


def size_of(repo: str, hub: Hub) -> str:
    """``owner/name: 5.73 GiB at COMMIT``, or why that is not known."""
    try:
        listing = hub.listing(repo, None)
        total = sum(file.size for file in wanted(listing))
    except DFlashError as error:
        return f"{repo}: {error.message}"
    return f"{repo}: {total / GIB:.2f} GiB at {listing.commit}"


def main(argv: Sequence[str]) -> None:
    hub = Hub.of(settings.load())
    for repo in argv or unsized(load().rows):
        print(size_of(repo, hub), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
