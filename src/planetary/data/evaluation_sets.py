"""Named sets of held-out tokens: a source of which every token is evaluated, in rows as training cuts its data."""

from __future__ import annotations

import numpy as np

from planetary.core.configuration.schema import DataSource
from planetary.core.errors import UserError
from planetary.data.prepare import encoded
from planetary.data.recipe import part_of
from planetary.data.tokenizer import Tokenizer

OWN_SET = "held_out"
"""Name of the held-out part of a run's own data."""


def read_set(name: str, source: DataSource, tokenizer: Tokenizer, place: str, vocabulary: int) -> np.ndarray:
    """Return the tokens of a source, int64 [n]; complements of tokens that are no targets.

    Args:
        name: of the set, for error texts.
        source: as of `data.sources`; `text_key` is set.
        tokenizer: of the model.
        place: path of its `tokenizer.json`, whose folder has the chat template, or a name as of `data.tokenizer`.
        vocabulary: of the model, in tokens.

    Raises:
        UserError: the source is not readable, empty, or has tokens that the model does not know.
        ResourceError: the host of a URL cannot be reached.
    """
    part = part_of(source, place)
    found = [piece.astype(np.int64) for _, piece in encoded(part, tokenizer)]
    tokens = np.concatenate([np.empty(0, np.int64), *found])
    if tokens.size < 2:
        raise UserError(
            f"the set {name} ({source.source}) has {tokens.size} tokens: expected two at least, one to read and one "
            "to predict"
        )
    largest = int(np.where(tokens < 0, ~tokens, tokens).max())
    if largest >= vocabulary:
        raise UserError(
            f"the set {name} ({source.source}) has token {largest}, and the model knows {vocabulary}: it was made with "
            "another tokenizer"
        )
    if not (tokens[1:] >= 0).any():
        raise UserError(f"the set {name} ({source.source}) has no target: in its chats the assistant says nothing")
    return tokens


def rows_of(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return tokens [n] as rows [R, length + 1], as training cuts them: a row's first token is read only.

    The rest is a row of its own, filled with the complement of token 0, which is no target. Rows without a target are
    left out.
    """
    rows = np.full((-(-tokens.size // (length + 1)), length + 1), ~0, np.int64)
    rows.reshape(-1)[: tokens.size] = tokens
    return rows[(rows[:, 1:] >= 0).any(1)]
