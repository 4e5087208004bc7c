"""Tokens drawn where they are computed, so that the log-probabilities of a whole vocabulary stay there.

A draw is a pure function of log-probabilities, options, seed and position (`scheduling.sampling`): the text is the same
whichever worker draws it. The gateway draws only where a grammar limits the tokens, since it alone knows the grammar's
state.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.tensors import Tensors
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.program.shape import DRAWN, DRAWN_VALUES, IDS, ROW, VALUES
from planetary.runs.serve.scheduling.sampling import Candidates, Drawing, Drawn, draw


def with_draws(message: ComputeCall, found: Tensors) -> dict[str, np.ndarray]:
    """Return the results of a call as they are sent.

    Args:
        message: B sequences.
        found: results of the functions, with the row where a draw needs it.

    Returns:
        `found` with `drawn` i32 [B] and `drawn_values` f32 [B], the drawn tokens and their log-probabilities in nats (0
        where nothing is drawn), without the row unless the gateway draws, and with no more of the likeliest tokens than
        are given out, but one at least.
    """
    tokens, values = np.zeros(len(message.tokens), np.int32), np.zeros(len(message.tokens), np.float32)
    for place, drawing in enumerate(message.drawings):
        if drawing is not None:
            row = found[ROW][place] if ROW in found else None
            position = message.starts[place] + len(message.tokens[place])
            one = Candidates(found[IDS][place], found[VALUES][place], row)
            drawn = draw(one, drawing.options, position, generated=drawing.generated, most=message.vocabulary)
            tokens[place], values[place] = drawn
    sent = {name: array for name, array in found.items() if name != ROW or message.full}
    for name in (IDS, VALUES):
        sent[name] = np.ascontiguousarray(found[name][:, : max(1, message.likeliest)])
    return {**sent, DRAWN: tokens, DRAWN_VALUES: values}


def next_call(message: ComputeCall, sent: Tensors) -> ComputeCall | None:
    """Return the call after `message`, of which `sent` are the results; None: the gateway sends the next one.

    That is so after `message.extra_steps` further calls, and as soon as a sequence has ended: another may take the
    slot.
    """
    if not message.extra_steps:
        return None
    tokens = [int(token) for token in sent[DRAWN]]
    following: list[Drawing] = []
    for token, drawing in zip(tokens, message.drawings, strict=True):
        if drawing is None or token in drawing.ends:
            return None
        following.append(drawing.after(token))
    starts = tuple(start + len(new) for start, new in zip(message.starts, message.tokens, strict=True))
    return msgspec.structs.replace(
        message,
        tokens=tuple((token,) for token in tokens),
        starts=starts,
        drawings=tuple(following),
        extra_steps=message.extra_steps - 1,
    )


def candidates_of(sent: Tensors) -> list[Candidates]:
    """Return the results of a call as the scheduler takes them, one entry a sequence, without scores."""
    row = sent.get(ROW)
    return [
        Candidates(ids, values, None if row is None else row[i], None, Drawn(int(token), float(value)))
        for i, (ids, values, token, value) in enumerate(
            zip(sent[IDS], sent[VALUES], sent[DRAWN], sent[DRAWN_VALUES], strict=True)
        )
    ]
