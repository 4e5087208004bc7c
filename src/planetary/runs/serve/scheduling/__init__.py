"""Which texts are computed next, where their cache is, and how a token is drawn: pure decisions."""
