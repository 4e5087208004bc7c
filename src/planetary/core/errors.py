"""All exceptions of planetary, in one tree.

    PlanetaryError
    ├── UserError            the input is wrong: a config key, a path, a flag, a data file
    ├── CompileError         a model cannot be turned into a training step
    │   └── UnsupportedOpError   an operation without a differentiation rule lies on a gradient's path
    ├── TrustError           a token, certificate, digest or version is not as required
    ├── ProtocolError        bytes or messages that break the protocol
    │   ├── LocalProtocolError   we were about to send or do something illegal: a bug here
    │   └── RemoteProtocolError  the other side sent something illegal: its connection is closed
    ├── PeerError            a peer is gone, silent, or reported a failure
    ├── ResourceError        the machine lacks something: disk, memory, a port, a device
    ├── NumericsError        a loss, gradient or parameter is NaN or infinite
    └── ClosedError          the object was closed, or the run was stopped
        └── ConflictError        a request does not fit the present state; another time it may

Code branches on the class and never on the text. The text states the attempt, the expectation, the finding
and the remedy. Only the command line turns a class into an exit code.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PlanetaryError(Exception):
    """Base of every error that planetary raises on purpose."""


class UserError(PlanetaryError):
    """The user's input is wrong; the text names the input and the expected form."""


class CompileError(PlanetaryError):
    """A model cannot be parsed, differentiated, compiled or verified."""


class UnsupportedOpError(CompileError):
    """An operation without a differentiation rule lies between a `wrt` argument and an output.

    Attributes:
        op: name of the operation, e.g. `"stablehlo.sort"`.
        location: file, line and function of the model's source, as far as they are known.
    """

    def __init__(self, op: str, location: str, why: str = "it has no differentiation rule") -> None:
        super().__init__(f"cannot differentiate {op} at {location}: {why}")
        self.op = op
        self.location = location


class TrustError(PlanetaryError):
    """A token, certificate, digest or version is not as required; nothing was executed or loaded."""


class ProtocolError(PlanetaryError):
    """Bytes or messages that break the protocol."""


class LocalProtocolError(ProtocolError):
    """We were about to send or do something the protocol forbids: a bug in planetary."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something the protocol forbids; the connection is closed."""


class PeerError(PlanetaryError):
    """A peer is gone, silent beyond the deadline, or reported a failure."""


class ResourceError(PlanetaryError):
    """The machine lacks something: disk space, memory, a free port, a device."""


class NumericsError(PlanetaryError):
    """A loss, gradient or parameter is NaN or infinite."""


class ClosedError(PlanetaryError):
    """The object was closed or the run was stopped while something was under way."""


class ConflictError(ClosedError):
    """A request does not fit the present state of a job, run, worker or gateway.

    Attributes:
        code: stable name of the conflict, for programs; those of the control API are in `web.api_errors.CODES`.
    """

    def __init__(self, message: str, code: str = "conflict") -> None:
        super().__init__(message)
        self.code = code


def did_you_mean(word: str, known: Iterable[str], written: str = "{}") -> str:
    """Return "; did you mean X?" with the member of `known` that looks like `word`, or "." if none does.

    Args:
        word: as written by the user.
        known: the valid ones.
        written: how a member is shown.
    """
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {written.format(near[0])}?" if near else "."
