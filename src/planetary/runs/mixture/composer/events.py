"""Events and instructions of a composer's machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from planetary.fleet.protocol import messages as m
from planetary.machine.events import Event, Instruction
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.payloads.shard import HeldFragment, Key

# --- events -------------------------------------------------------------------------------------------------------


class GrantArrived(Event, frozen=True):
    """The gateway grants a shard, from a step on. Only from now on does anything count that is sent.

    Attributes:
        held: fragments that came with the shard's saved state; None: the composer goes on with the state it has.
        speaks: shards with surrogates to publish; None: the composer's own.
    """

    shard: int
    epoch: int
    step: int
    held: Mapping[Key, HeldFragment] | None = None
    speaks: tuple[int, ...] | None = None


class StoodDown(Event, frozen=True):
    """The gateway has no shard for this composer."""


class ConnectionLost(Event, frozen=True):
    """The connection was lost; messages in flight on it may never have arrived."""


class SpeakerAssigned(Event, frozen=True):
    """The gateway assigns the shards whose surrogates are published from here."""

    shards: tuple[int, ...]


class StepsReported(Event, frozen=True):
    """The gateway reports the steps every shard has taken."""

    steps: tuple[int, ...]


class MergeArrived(Event, frozen=True):
    """A merged version of a fragment has arrived, made of these shards' publications; `UsePayload` if it is newer.

    The present version means: nothing of this composer is being merged.
    """

    key: Key
    version: int
    shards: tuple[int, ...]


class SurrogatesInstalled(Event, frozen=True):
    """A shard's surrogates of a version, fitted at a progress of the run, are in the bank."""

    shard: int
    version: int
    progress: float


class TokensArrived(Event, frozen=True):
    """Tokens of `count` steps from `first` on have arrived; `UsePayload` if they are the next ones."""

    shard: int
    first: int
    count: int


class ExpertsArrived(Event, frozen=True):
    """A layer's experts have arrived; `UsePayload` if they are others than those here.

    `step`: the newest whose sketch they have learned from.
    """

    layer: int
    version: int
    step: int


class SketchesAnswered(Event, frozen=True):
    """The gateway reports which sketches of a layer it has and has not answered: see `SketchWindow.take_report`."""

    layer: int
    arrived: int
    waiting: tuple[int, ...]


class StepCompleted(Event, frozen=True):
    """A step was taken."""


class SketchSent(Event, frozen=True):
    """The sketch of a layer in the step under way is sent."""

    layer: int


class UploadBegun(Event, frozen=True):
    """An upload is packed, or waits to be sent."""

    what: Upload


class UploadSent(Event, frozen=True):
    """An upload has left this machine."""

    what: Upload


class StepBoundary(Event, frozen=True):
    """No step is under way: answer with the instructions; the last is `TakeStep` unless something is missing."""


# --- instructions -------------------------------------------------------------------------------------------------


class UsePayload(Instruction, frozen=True):
    """Use the payload that came with the event."""


class Publish(Instruction, frozen=True):
    """Publish a fragment as it is now, trained for `steps` steps from version `base`."""

    key: Key
    base: int
    steps: int


class Adopt(Instruction, frozen=True):
    """Take a merged version of a fragment; `carry`: with the progress made since it was published."""

    key: Key
    version: int
    carry: bool


class Fit(Instruction, frozen=True):
    """Fit the surrogates of the experts it speaks for and publish them."""


class Keep(Instruction, frozen=True):
    """Save the shard's state with the gateway."""


class EvaluateView(Instruction, frozen=True):
    """Evaluate the model as it is seen from here, with surrogates in it, and report that."""


class AskForTokens(Instruction, frozen=True):
    """Ask the gateway for the tokens of `count` steps from `first` on."""

    first: int
    count: int


class TakeStep(Instruction, frozen=True):
    """Take a step; then send the event `StepCompleted`."""


Upload = tuple[Literal["state", "surrogates", "fragment", "sketch"], str, int]
"""The next is made when this has left the machine. With the kind come tier and fragment, or the layer."""

STATE: Upload = "state", "", 0

SURROGATES: Upload = "surrogates", "", 0


def fragment_upload(tier: str, fragment: int) -> Upload:
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
