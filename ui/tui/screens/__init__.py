"""The full-window views of the terminal application."""
