"""Is a loaded pair what it should be on this card: target, drafter, weight format, template and card, a line each."""
