"""Openers of HTTP addresses: no proxy stands between this machine and itself, whatever the environment says."""

from __future__ import annotations

import urllib.parse
import urllib.request

from planetary.net.addresses import is_local_name


def opener_for(url: str, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return an opener for an address, with the environment's proxies unless it is of this machine's loopback."""
    is_local = is_local_name(urllib.parse.urlsplit(url).hostname or "")
    return urllib.request.build_opener(*handlers, *([urllib.request.ProxyHandler({})] if is_local else []))
