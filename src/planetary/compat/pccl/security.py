"""Settings without a counterpart in PCCL, from the environment: authority, invite, and restart of a group.

PCCL's classes take an address and nothing else, and its masters listen on all interfaces. An unedited program
therefore receives certificates through its environment only.
"""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

from planetary.core.errors import UserError
from planetary.net.authority import Authority
from planetary.net.invite import is_token, mint

AUTHORITY = "PLANETARY_AUTHORITY"
INVITE = "PLANETARY_INVITE"
RESTART = "PLANETARY_RESTART"
INVITE_FILE = "newest-invite.txt"
_INVITE_LIFE_S = 7 * 86400.0


def authority() -> Authority | None:
    """Return the certificate authority in the folder that `PLANETARY_AUTHORITY` names; None where it is not set.

    The folder is made if it is not there. An invite for the peers is written into it, as `newest-invite.txt`.

    Raises:
        TrustError: the folder's files are no authority.
        UserError: the folder cannot be written.
    """
    folder = os.environ.get(AUTHORITY, "")
    if not folder:
        return None
    state, now = Path(folder).absolute(), time.time()
    found = Authority.open(state, now)
    file = state / INVITE_FILE
    token = mint(found.invite_secret, found.fingerprint, expires=now + _INVITE_LIFE_S)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(token + "\n")
    except OSError as error:
        raise UserError(f"cannot write the invite of {AUTHORITY}={folder}: {error.strerror or error}") from error
    return found


def invite_token() -> str:
    """Return the invite in `PLANETARY_INVITE`, or in the file named there; "" where it is not set.

    Raises:
        UserError: it names a file that cannot be read.
    """
    given = os.environ.get(INVITE, "").strip()
    if not given or is_token(given):
        return given
    try:
        return Path(given).read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the invite of {INVITE}={given}: {error.strerror or error}") from error


def restarts() -> bool:
    """Return whether `PLANETARY_RESTART=1` lets a group that lost all its peers begin anew, at any revision."""
    return os.environ.get(RESTART, "") == "1"


def warn_unencrypted(subject: str) -> None:
    """Warn, once for each place it is called from, that `subject` is neither encrypted nor authenticated."""
    warnings.warn(
        f"{subject} HAS NO TLS: any host on the network can join, read and change the reduced data, as with PCCL. "
        f"To encrypt and authenticate without editing the program, set {AUTHORITY}=FOLDER for the master (it makes "
        f"FOLDER/{INVITE_FILE}) and {INVITE}=FOLDER/{INVITE_FILE} for every peer",
        RuntimeWarning,
        stacklevel=3,
    )
