"""The parts the screens are made of, one to a file."""
