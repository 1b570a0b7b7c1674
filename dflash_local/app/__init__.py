"""What command line, terminal screen and page share: from a name to a loaded pair and a conversation with it."""
