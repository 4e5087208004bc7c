"""What a composer sends that is large and superseded by the next of its kind: one at a time is on its way."""

from __future__ import annotations

from typing import Literal

from planetary.fabric.protocol import messages as m
from planetary.moe.protocol import mixture_messages as mm

Upload = tuple[Literal["state", "surrogates", "fragment", "sketch"], str, int]
"""The next is made when this has left the machine. With its kind come tier and fragment, or the layer."""

STATE: Upload = "state", "", 0
SURROGATES: Upload = "surrogates", "", 0


def fragment_upload(tier: str, fragment: int) -> Upload:
    """Return the upload of a fragment."""
    return "fragment", tier, fragment


def sketch_upload(layer: int) -> Upload:
    """Return the upload of a layer's sketch."""
    return "sketch", "", layer


def upload_of(message: m.Message) -> Upload | None:
    """Return which upload a message is."""
    match message:
        case mm.SaveShard():
            return STATE
        case mm.PublishSurrogates():
            return SURROGATES
        case mm.PublishFragment():
            return fragment_upload(message.tier, message.fragment)
        case mm.OfferSketches():
            return sketch_upload(message.layer)
        case _:
            return None
