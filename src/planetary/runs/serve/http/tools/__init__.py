"""Tools of a chat: their definitions, and the calls a model writes."""
