"""Which gateway a client asks, and with which token."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path

from planetary.client import DEFAULT_URL
from planetary.core.errors import UserError
from planetary.web.gateway_client import GatewayClient

TOKEN_VARIABLE = "PLANETARY_API_TOKEN"
OPERATOR_TOKEN = "api-token.txt"


def client_of(url: str | None, token_file: Path | None, token: str = "") -> GatewayClient:
    """Return a client of the gateway at `url`, by default this machine's.

    The token is in `token_file`, or `token`; by default in the environment, or in the state folder of this user's own
    gateway.
    """
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise UserError(f"cannot read the token {token_file}: {error.strerror or error}") from None
    client, folder = GatewayClient(url or DEFAULT_URL, token), None if token_file is None else token_file.parent
    if not client.token:
        client.token, folder = _own_token(client.url)
        client.is_token_assumed = bool(client.token)
    if not client.fingerprint and folder is not None and client.url.startswith("https:"):
        from planetary.net.authority import fingerprint_in

        client.fingerprint = fingerprint_in(folder)  # the operator's own token lies beside the authority
        client.fingerprint_from = f"the authority in {folder}"
    return client


def _own_token(url: str) -> tuple[str, Path | None]:
    """Return the token of this user's gateway on this machine and the folder; no other gateway is shown it."""
    from planetary.core.places import default_state_folder
    from planetary.net.addresses import is_local_name

    host = urllib.parse.urlsplit(url).hostname or ""
    if not is_local_name(host):
        return "", None
    try:
        return (default_state_folder() / OPERATOR_TOKEN).read_text().strip(), default_state_folder()
    except OSError:
        return "", None
