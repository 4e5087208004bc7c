"""Payloads through the S3 protocol: a real server on loopback, which is stopped in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from payload_cases import LIFETIMES, check_damage, check_lifetimes, check_payloads

from planetary.artifacts.payload_store import PayloadStore
from planetary.core.errors import ResourceError
from s3_server import KEY, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.doors("moto", "s3fs")]


class Server(S3Server):
    """The server, and stores on it."""

    def store(self, url: str, **options: Any) -> PayloadStore:
        return PayloadStore(url, LIFETIMES, options={"endpoint_url": self.url, **KEY}, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    made.start()
    made.store("s3://payloads").files.mkdir("payloads")
    yield made
    made.stop()


def test_an_s3_server_does_what_a_folder_does(server: Server) -> None:
    check_payloads(server.store("s3://payloads/first"))
    check_lifetimes(server.store("s3://payloads/second"))
    check_damage(server.store("s3://payloads/third"), "payloads/third")


def test_a_bucket_that_does_not_exist_is_told_at_start(server: Server) -> None:
    with pytest.raises(ResourceError, match="create the bucket or folder"):
        server.store("s3://no-such-bucket/run").check()


def test_absent_server_fails_the_start_and_is_awaited_later(server: Server) -> None:
    """A server that is away is told at start and waited for in the middle."""
    pauses: list[float] = []

    def restart(seconds: float) -> None:
        pauses.append(seconds)
        server.start()

    store = server.store("s3://payloads/middle", sleep=restart)
    store.check()
    name = store.put("sketch", b"x" * 100_000)
    server.stop()
    with pytest.raises(ResourceError, match="s3://payloads/middle failed at writing a probe"):
        store.check()
    with pytest.raises(ResourceError, match=r"reading sketch/.*\(1 attempts"):
        server.store("s3://payloads/middle", patience_s=0).get(name)
    assert store.get(name) == b"x" * 100_000
    assert len(pauses) == 1
