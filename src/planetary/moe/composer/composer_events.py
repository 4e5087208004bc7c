"""What a composer's machine is told, and what it asks its driver for."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from planetary.moe.composer.uploads import Upload
from planetary.moe.payloads.shard_payload import Held, Key

# --- events -------------------------------------------------------------------------------------------------------


class ShardGranted(msgspec.Struct, frozen=True):
    """The gateway grants a shard, from a step on. Only from now on does anything count that is sent.

    Attributes:
        held: fragments that came with the shard's saved state; None: the composer goes on with what is here.
        speaks: shards whose surrogates it publishes; None: its own.
    """

    shard: int
    epoch: int
    step: int
    held: Mapping[Key, Held] | None = None
    speaks: tuple[int, ...] | None = None


class StoodDown(msgspec.Struct, frozen=True):
    """The gateway has no shard for this composer."""


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection was lost; what was in flight on it may never have arrived."""


class SpeakerAssigned(msgspec.Struct, frozen=True):
    """The gateway assigns the shards whose surrogates are published from here."""

    shards: tuple[int, ...]


class StepsReported(msgspec.Struct, frozen=True):
    """The gateway reports the steps that every shard has taken."""

    steps: tuple[int, ...]


class MergeArrived(msgspec.Struct, frozen=True):
    """A merged version of a fragment has arrived, made of these shards' publications; `UsePayload` if it is newer.

    The version that is here already means that nothing of this composer's is being merged.
    """

    key: Key
    version: int
    shards: tuple[int, ...]


class SurrogatesInstalled(msgspec.Struct, frozen=True):
    """A shard's surrogates of a version, fitted at a progress of the run, are in the bank."""

    shard: int
    version: int
    progress: float


class TokensArrived(msgspec.Struct, frozen=True):
    """Tokens of `count` steps from `first` on have arrived; `UsePayload` if they are the next ones."""

    shard: int
    first: int
    count: int


class ExpertsArrived(msgspec.Struct, frozen=True):
    """A layer's experts have arrived; `UsePayload` if they are others than those here.

    `step`: the newest whose sketch they have learned from.
    """

    layer: int
    version: int
    step: int


class SketchesAnswered(msgspec.Struct, frozen=True):
    """The gateway reports which sketches of a layer it has and has not answered: see `SketchWindow.told`."""

    layer: int
    arrived: int
    waiting: tuple[int, ...]


class StepTaken(msgspec.Struct, frozen=True):
    """A step was taken."""


class SketchSent(msgspec.Struct, frozen=True):
    """The sketch of a layer in the step under way is sent."""

    layer: int


class UploadBegun(msgspec.Struct, frozen=True):
    """An upload is packed, or waits to be sent."""

    what: Upload


class UploadSent(msgspec.Struct, frozen=True):
    """An upload has left this machine."""

    what: Upload


class StepBoundary(msgspec.Struct, frozen=True):
    """No step is under way: answer with what to do now, in order; the last is `Step` unless something is missing."""


Event = (
    ShardGranted
    | StoodDown
    | ConnectionLost
    | SpeakerAssigned
    | StepsReported
    | MergeArrived
    | SurrogatesInstalled
    | TokensArrived
    | ExpertsArrived
    | SketchesAnswered
    | StepTaken
    | SketchSent
    | UploadBegun
    | UploadSent
    | StepBoundary
)


# --- instructions -------------------------------------------------------------------------------------------------


class UsePayload(msgspec.Struct, frozen=True):
    """Use the payload that came with the event."""


class Publish(msgspec.Struct, frozen=True):
    """Publish a fragment as it is now, trained for `steps` steps from version `base`."""

    key: Key
    base: int
    steps: int


class Adopt(msgspec.Struct, frozen=True):
    """Take a merged version of a fragment; `carry`: with the progress that was made since it was published."""

    key: Key
    version: int
    carry: bool


class Fit(msgspec.Struct, frozen=True):
    """Fit the surrogates of the experts that it speaks for and publish them."""


class Keep(msgspec.Struct, frozen=True):
    """Save the shard's state with the gateway."""


class View(msgspec.Struct, frozen=True):
    """Evaluate the model as it is seen from here, with surrogates in it, and report that."""


class AskForTokens(msgspec.Struct, frozen=True):
    """Ask the gateway for the tokens of `count` steps from `first` on."""

    first: int
    count: int


class Step(msgspec.Struct, frozen=True):
    """Take a step; then send the event `StepTaken`."""


Instruction = UsePayload | Publish | Adopt | Fit | Keep | View | AskForTokens | Step
