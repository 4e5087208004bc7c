"""The findings of a check on one device, and the store that remembers them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from planetary.artifacts.store import BlobStore
from planetary.core import decoding
from planetary.core.errors import CompileError, TrustError
from planetary.core.trials.deviations import worst_of
from planetary.runtime.backends import runtime_identity


class DeviceReport(msgspec.Struct, frozen=True):
    """The findings of the check of a step on one device."""

    device: str  # device name from the driver
    worst_tensor: str
    worst_error: float  # fraction of the accepted error
    seconds: float = 0.0  # duration of one warm call of a program's largest function; 0: not measured

    @property
    def summary(self) -> str:
        """The findings, for people."""
        return (
            f"verified on {self.device}: the worst tensor, {self.worst_tensor}, is at {self.worst_error:.1%} of the "
            "accepted error"
        )


def report_of(what: str, device: str, errors: Mapping[str, float], against: str) -> DeviceReport:
    """Return the report of errors, fractions of the accepted ones. Raises `CompileError` for one above 1."""
    name, error = worst_of(errors)
    if not all(one <= 1 for one in errors.values()):  # also catches NaN
        raise CompileError(
            f"the {what} is wrong on {device}: {name!r} is {error:.3g} times the accepted error away from {against}. "
            "Nothing was trained with it; update the device's driver, or start this worker with another --backend"
        )
    return DeviceReport(device, name, error)


def check_once(store: BlobStore, key: str, check: Callable[[], DeviceReport]) -> DeviceReport:
    """Return the findings of `check`, which runs once for each `key`.

    Args:
        store: remembers reports.
        key: of `key_of`.
        check: compares compiled code with its reference on the device.

    Raises:
        CompileError: as the check; that is not remembered.
    """
    known = store.resolve(key)
    if known is not None:
        with contextlib.suppress(TrustError, msgspec.MsgspecError):
            return decoding.from_json(store.get(known), DeviceReport)
    report = check()
    store.link(key, store.put(msgspec.json.encode(report)))
    return report


def key_of(artifact: str, reference: str, backend: str, device: str, functions: Iterable[str] = ()) -> str:
    """Return the key of a check, of everything behind the result: artifact, device, runtime and driver.

    Args:
        artifact: digest of the artifact.
        reference: digest of the reference.
        backend: that runs it.
        device: the driver's name.
        functions: of a program, those that are checked.
    """
    where = f"{backend} {device} {runtime_identity(backend)}"
    return " ".join(["checked on device 4", artifact, reference, *sorted(functions), where])
