"""The versions on which an artifact depends beside its source: of Python, of this package and of the installed ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

from planetary import version

PACKAGE = Path(version.__file__).parent
"""The folder of this package."""

_INSTALLED = tuple(
    str(Path(path).absolute()) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)


def environment() -> str:
    """Return the digest of the versions of Python, of this package and of all installed ones."""
    names = {f"python {sys.version}", f"planetary {version.__version__}"}
    if not is_installed(PACKAGE):
        names.add(str(PACKAGE))  # two checkouts of one version may differ
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}:
        with contextlib.suppress(OSError):
            names.update(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def is_installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to the system, whose versions stand for it."""
    return str(path).startswith((*_INSTALLED, "/proc/", "/sys/", "/dev/", "/usr/lib/", "/usr/share/", "/etc/"))
