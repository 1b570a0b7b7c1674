"""The terminal screens, in Textual: chat with a meter, and a race of a pair against itself."""
