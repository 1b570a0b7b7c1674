"""dflash-local: DFlash speculative decoding on your own machine, exact and measured.

Importing the package imports nothing else: torch and transformers load only when a model does.
"""

__version__ = "0.1.0"
