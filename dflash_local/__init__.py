"""dflash-local: DFlash speculative decoding on your own machine, exact and measured.

Importing the package imports nothing else: torch and transformers load only when a model does.
"""

# Like ``__main__`` and ``import_path``, this imports nothing that Python has not loaded by itself: under
# ``python -m dflash_local`` the current folder is still the first place that an import looks in.
import os

__version__ = "0.2.0"

# ``ui`` lies beside the package and is reached through a link. Git on a system without symbolic links writes a text
# file in its place: then the package is looked for beside it as well.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "ui")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load(model, drafter=None, **options):  # type: ignore[no-untyped-def]
    """Load a pair that is on this machine into this process; see ``app.library.LoadedPair``.

    Args:
        model: a name that ``dflash models`` lists, a folder or a GGUF file. drafter: a folder or a repository.
        options: fields of ``LoadConfig``, such as ``quantize="int4"``.

    Raises:
        DFlashError: the pair is not here, does not fit, or cannot be loaded.
    """
    from dflash_local.app import library

    return library.load(model, drafter, **options)
