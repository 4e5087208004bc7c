"""Proxies of the environment, which are not for this machine's own addresses."""

from __future__ import annotations

import os

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")


def spare_loopback() -> None:
    """Have no proxy of the environment asked for this machine's own addresses, by this process and those it starts."""
    for name in ("no_proxy", "NO_PROXY"):
        given = os.environ.get(name) or os.environ.get(name.swapcase(), "")
        listed = [one.strip() for one in given.split(",") if one.strip()]
        os.environ[name] = ",".join([*listed, *(one for one in _LOOPBACK if one not in listed)])
