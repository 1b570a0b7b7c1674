"""The six tasks of the drafters' model cards: their data and prompts, and a measurement over them."""
