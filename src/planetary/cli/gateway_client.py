"""Requests to the control API of a gateway, for commands."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from planetary.core.errors import ClosedError, PeerError, PlanetaryError, TrustError, UserError

DEFAULT_URL = "http://127.0.0.1:18010"
TOKEN_VARIABLE = "PLANETARY_API_TOKEN"
OPERATOR_TOKEN = "api-token.txt"
_TIMEOUT_S = 30.0
_ERRORS: dict[int, type[PlanetaryError]] = {
    400: UserError,
    401: TrustError,
    403: TrustError,
    404: UserError,
    409: ClosedError,
    413: UserError,
}


class GatewayClient:
    """Asks one gateway. Its methods raise what the answer says is wrong, and `PeerError` without an answer.

    Attributes:
        url: of the gateway's root.
        token: that it shows; "": none.
    """

    def __init__(self, url: str, token: str) -> None:
        """`url`: of the gateway's page; its query's token counts where `token` is ""."""
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"expected the address of a gateway, such as {DEFAULT_URL}, found {url!r}")
        shown = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
        self.url = parts._replace(path=parts.path.rstrip("/"), query="", fragment="").geturl()
        self.token = token or shown

    def get(self, path: str) -> Any:
        """Return the response at a path."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: object) -> Any:
        """Return the answer to a body."""
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", data=body, method=method)
        request.add_header("Accept", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise _refusal(error, self.url) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise PeerError(
                f"cannot ask {self.url}: {reason}; is a gateway running, and is this its address?"
            ) from error


def client_of(url: str | None, token_file: Path | None) -> GatewayClient:
    """Return a client of the gateway at `url`, by default this machine's.

    The token is in `token_file`, the environment, or the state folder of this user's own gateway.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise UserError(f"cannot read the token {token_file}: {error.strerror or error}") from None
    client = GatewayClient(url or DEFAULT_URL, token)
    client.token = client.token or _own_token(client.url)
    return client


def _own_token(url: str) -> str:
    """Return the token of this user's gateway on this machine; no other one is shown it."""
    from planetary.net.addresses import is_loopback
    from planetary.run.places import default_state_folder

    host = urllib.parse.urlsplit(url).hostname or ""
    if host != "localhost" and not is_loopback(host):
        return ""
    try:
        return (default_state_folder() / OPERATOR_TOKEN).read_text().strip()
    except OSError:
        return ""


def _refusal(error: urllib.error.HTTPError, url: str) -> PlanetaryError:
    try:
        text = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        text = f"{url} answered {error.code} {error.reason}: is this the address of a gateway?"
    return _ERRORS.get(error.code, PeerError)(text)
