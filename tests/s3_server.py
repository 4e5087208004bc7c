"""A real S3 server on loopback, which a test can stop and start again.

Needs moto, which `make test-doors` installs; a test that uses it has the mark `doors("moto", "s3fs")`.
"""

from __future__ import annotations

import urllib.request
from typing import Any

KEY = {"key": "somebody", "secret": "anything"}


class S3Server:
    """On a port of its own choice; its objects stay while it is stopped."""

    def __init__(self) -> None:
        self.port = 0
        self.running: Any = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Answer from now on."""
        from moto import server as moto

        first = self.port == 0
        self.running = moto.ThreadedMotoServer("127.0.0.1", port=self.port, verbose=False)
        self.running.start()
        self.port = self.running.get_host_and_port()[1]
        if first:  # all servers of a process share their objects: those of an earlier test are there
            urllib.request.urlopen(f"{self.url}/moto-api/reset", b"").close()

    def stop(self) -> None:
        """Refuse connections from now on. Stopping twice is fine."""
        if self.running is not None:
            self.running.stop()
        self.running = None
