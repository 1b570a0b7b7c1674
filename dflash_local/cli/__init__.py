"""The ``dflash`` command. Imports nothing heavy until a command needs it."""
