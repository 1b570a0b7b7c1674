"""One session, one worker, many listeners. Knows no torch, no models, no screens."""
