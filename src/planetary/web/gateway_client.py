"""Requests over HTTP to a gateway: the control API of a site, or the endpoint of a served model."""

from __future__ import annotations

import contextlib
import http
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from planetary.core.errors import ConflictError, PeerError, PlanetaryError, ResourceError, TrustError, UserError
from planetary.net.http_opener import opener_for

_ERRORS: dict[int, type[PlanetaryError]] = {
    400: UserError,
    401: TrustError,
    403: TrustError,
    404: UserError,
    413: UserError,
}


class GatewayClient:
    """Asks one gateway. Methods raise the error in the answer, and `PeerError` without an answer.

    Attributes:
        url: of the gateway's root.
        token: that it shows; "": none.
        fingerprint: of the certificate authority of a gateway that speaks HTTPS; "": the system's authorities count.
        fingerprint_from: where it comes from, for errors.
        is_token_assumed: whether the token is that of another command's gateway on this machine, which may have
            nothing to do with the one at the address.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 30.0) -> None:
        """Ask the gateway at `url`; nothing is sent yet.

        Args:
            url: of the gateway's page; the query's token counts where `token` is "".
            token: that it is shown.
            timeout_s: of the connection, and of every silence while an answer is awaited.
        """
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"expected the address of a gateway, such as http://127.0.0.1:18010, found {url!r}")
        shown = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
        self.url = parts._replace(path=parts.path.rstrip("/"), query="", fragment="").geturl()
        self.token, _, self.fingerprint = (token or shown).partition("@")
        self.fingerprint_from = "the token's fingerprint (behind its @)"
        self.is_token_assumed = False
        self._timeout_s = timeout_s
        self._opener: urllib.request.OpenerDirector | None = None

    def get(self, path: str) -> Any:
        """Return the response at a path."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: object) -> Any:
        """Return the answer to a body."""
        return self._ask("POST", path, json.dumps(body).encode())

    def text(self, path: str) -> str:
        """Return the response at a path that is no JSON."""
        with self._opened("GET", path) as answer:
            return answer.read().decode()

    def download(self, path: str, file: BinaryIO) -> int:
        """Write the bytes at a path into a file, and return how many they are."""
        with self._opened("GET", path) as answer:
            expected, size = answer.headers.get("Content-Length"), 0
            while piece := answer.read(1 << 20):
                try:
                    file.write(piece)
                except OSError as error:
                    raise ResourceError(f"cannot write {file.name}: {error.strerror or error}") from error
                size += len(piece)
        if expected is not None and size != int(expected):
            raise PeerError(f"{self.url}{path} ended after {size} of {expected} bytes: ask again")
        return size

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of a stream. The control API sends one every few seconds."""
        with self._opened("GET", path, accept="text/event-stream") as answer:
            while line := answer.readline():
                yield line

    def put(self, path: str, file: Path) -> Any:
        """Return the answer to the bytes of a file, which are read as they are sent."""
        with file.open("rb") as data:
            return self._ask("PUT", path, data, length=file.stat().st_size)

    def _ask(self, method: str, path: str, body: Any, *, length: int | None = None) -> Any:
        with self._opened(method, path, body, length=length) as answer:
            return json.loads(answer.read())

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, body: Any = None, *, length: int | None = None, accept: str = "application/json"
    ) -> Iterator[Any]:
        """Give the answer to be read, and raise for what goes wrong until it is."""
        try:
            with self._request(method, path, body, length, accept) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise _refusal(error, self.url) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise TrustError(
                    f"{self.url} shows a certificate that is not known here: {reason.verify_message}. Give the token "
                    "with its fingerprint (TOKEN@FINGERPRINT), as `planetary token` prints it on the gateway"
                ) from error
            raise PeerError(
                f"cannot ask {self.url}: {reason}; is a gateway running, and is this its address?"
            ) from error

    def _request(self, method: str, path: str, body: Any, length: int | None, accept: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", data=body, method=method)
        request.add_header("Accept", accept)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        if body is not None:
            request.add_header("Content-Type", "application/json" if length is None else "application/octet-stream")
        if length is not None:
            request.add_header("Content-Length", str(length))
        try:
            return self._open(request)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.UNAUTHORIZED and self.is_token_assumed and method == "GET":
                self.token, self.is_token_assumed = "", False  # a run on loopback is shown without a token
                return self._request(method, path, body, length, accept)
            raise

    def _open(self, request: urllib.request.Request) -> Any:
        if self._opener is None:
            https = self.fingerprint and self.url.startswith("https:")
            handlers = [_HttpsOfGateway(self._context())] if https else []
            self._opener = opener_for(self.url, *handlers)
        return self._opener.open(request, timeout=self._timeout_s)

    def _context(self) -> ssl.SSLContext:
        """Return a context that trusts this gateway alone. Raises `TrustError` where the authority is another one."""
        from planetary.net.authority import authority_in
        from planetary.net.certificates import client_context

        parts = urllib.parse.urlsplit(self.url)
        shown = ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=self._timeout_s)
        try:
            expected = bytes.fromhex(self.fingerprint)
        except ValueError:
            raise UserError("the fingerprint behind the token's @ is not hexadecimal: was it copied whole?") from None
        remedy = (
            "compare both with the fingerprint that the gateway prints at its start, and make a new token on its "
            "machine (planetary token NAME)"
        )
        shown_der = ssl.PEM_cert_to_DER_cert(shown)
        return client_context(authority_in(shown_der, expected, self.url, self.fingerprint_from, remedy))


class _HttpsOfGateway(urllib.request.HTTPSHandler):
    """Opens HTTPS connections to gateways, whose certificates have one name whatever address was dialled."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._trusting = context

    def https_open(self, req: urllib.request.Request) -> Any:
        def connection(host: str, **options: Any) -> http.client.HTTPConnection:
            return _ConnectionToGateway(host, context=self._trusting, **options)

        return self.do_open(connection, req)  # type: ignore[arg-type]


class _ConnectionToGateway(http.client.HTTPSConnection):
    """Checks the name of gateways in place of the host's."""

    def __init__(self, host: str, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(host, context=context, **options)
        self._trusting = context

    def connect(self) -> None:
        from planetary.net.authority import SERVER_NAME

        http.client.HTTPConnection.connect(self)
        self.sock = self._trusting.wrap_socket(self.sock, server_hostname=SERVER_NAME)


def _refusal(error: urllib.error.HTTPError, url: str) -> PlanetaryError:
    try:
        found = json.loads(error.read())["error"]
        text, code = str(found["message"]), str(found.get("code") or "conflict")
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        text = f"{url} answered {error.code} {error.reason}: is this the address of a gateway?"
        code = "conflict"
    if error.code == http.HTTPStatus.CONFLICT:
        return ConflictError(text, code)
    return _ERRORS.get(error.code, PeerError)(text)
