"""The forms of answers: each interface's translation of a request to a chat or completion, and of the texts back."""
