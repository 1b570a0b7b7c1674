"""Text in, ids out and back: tokenizers, chat templates, channels, stop strings. Knows no model and no torch."""
