"""Files through which a gateway reports to the process that started it: the addresses, and the final error."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from planetary.core import decoding, errors


class Announcement(msgspec.Struct, frozen=True):
    """The gateway listens. The file holds a secret, so only the owner can read it."""

    host: str
    port: int
    dashboard: str  # URL
    token: str
    folder: str  # run folder
    endpoint: str = ""  # URL at which a served model answers
    # SHA-256 of the certificate an HTTPS page shows, and of the authority, which a TOKEN@FINGERPRINT names;
    # hexadecimal; "": the page is plain HTTP
    certificate: str = ""
    authority: str = ""

    @property
    def page(self) -> tuple[str, ...]:
        """Address of the page, and of an HTTPS page how a person recognises the certificate, in lines."""
        if not self.certificate:
            return (self.dashboard,)
        pairs = ":".join(self.certificate[at : at + 2].upper() for at in range(0, len(self.certificate), 2))
        return (
            self.dashboard,
            f"certificate SHA-256 {pairs}",
            f"authority SHA-256 {self.authority} (the part behind the @ of a token)",
        )


class Failure(msgspec.Struct, frozen=True):
    """The gateway ended with an error."""

    kind: str  # name of a class in `core.errors`
    text: str

    def error(self) -> errors.PlanetaryError:
        """Return the error itself; a `PlanetaryError` if this version has no such class."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, errors.PlanetaryError):
            return found(self.text)
        return errors.PlanetaryError(self.text)


Report = TypeVar("Report", Announcement, Failure)


def write_announcement(path: Path, announcement: Announcement) -> None:
    """Write the file, whole or not at all."""
    _write(path, announcement)


def read_announcement(path: Path) -> Announcement | None:
    """Return the announcement; None while it is not there yet."""
    return _read(path, Announcement)


def write_failure(announcement: Path, failure: Failure) -> None:
    """Write the error beside the file `announcement`, whole or not at all."""
    _write(_failure_beside(announcement), failure)


def read_failure(announcement: Path) -> Failure | None:
    """Return the error that the gateway of the file `announcement` ended with; None if it reported none."""
    return _read(_failure_beside(announcement), Failure)


def _failure_beside(announcement: Path) -> Path:
    return announcement.with_name(f"{announcement.name}.failure")


def _write(path: Path, report: Any) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".announce-")  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(report))
    os.replace(temporary, path)


def _read(path: Path, kind: type[Report]) -> Report | None:
    try:
        return decoding.from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
