"""The next call of a worker that draws tokens itself, so that no message passes between two tokens of a text.

Drawing is a pure function of log-probabilities, options, seed and position. The gateway draws the same tokens from the
same numbers when they arrive, and what it draws counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from planetary.serve.program.serving_shape import IDS, ROW, VALUES
from planetary.serve.protocol.serving_messages import ComputeCall
from planetary.serve.scheduling.sampling import Candidates, draw


def next_call(message: ComputeCall, found: Mapping[str, np.ndarray]) -> ComputeCall | None:
    """Return the call after `message`, of which `found` are the results; None: the gateway sends the next one.

    That is so after `message.ahead` further calls, and as soon as a text has ended: another may take its place.
    """
    if not message.ahead:
        return None
    drawn = []
    for row, drawing in enumerate(message.drawings):
        full = found[ROW][row] if ROW in found else None
        position = message.starts[row] + len(message.tokens[row])
        candidates = Candidates(found[IDS][row], found[VALUES][row], full)
        drawn.append(draw(candidates, drawing.options, position, most=message.vocabulary).token)
    if any(token in drawing.ends for token, drawing in zip(drawn, message.drawings, strict=True)):
        return None
    starts = tuple(start + len(new) for start, new in zip(message.starts, message.tokens, strict=True))
    return msgspec.structs.replace(
        message, tokens=tuple((token,) for token in drawn), starts=starts, ahead=message.ahead - 1
    )
