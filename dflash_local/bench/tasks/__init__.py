"""The six tasks of the drafters' model cards: their data, prompts and scoring, and a measurement over them."""
