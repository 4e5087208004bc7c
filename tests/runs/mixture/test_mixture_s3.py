"""A mixture in real processes whose payloads lie on an S3 server that is away for a while, or at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from split_mixture import SplitMixture
from test_mixture_processes import TINY
from version_streams import expert_streams

from planetary.runs.mixture.methods.ownership import round_robin
from s3_server import KEY, S3Server
from waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.doors("moto", "s3fs"), pytest.mark.timeout(900)]

ON_S3 = (*TINY, "moe.store=s3://payloads/run", "moe.expert_workers=1", "fabric.workers=3", "train.rounds=40")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    made = S3Server()
    made.start()
    variables = {"AWS_ENDPOINT_URL": made.url, "AWS_ACCESS_KEY_ID": KEY["key"], "AWS_SECRET_ACCESS_KEY": KEY["secret"]}
    for name, value in {**variables, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", endpoint_url=made.url, **KEY).makedirs("payloads", exist_ok=True)
    yield made
    made.stop()


def test_a_run_goes_on_while_its_s3_store_is_away(tmp_path: Path, shared_cache: Path, server: S3Server) -> None:
    mixture = SplitMixture(tmp_path, shared_cache, "parallax-offload.toml", ON_S3, 3)
    try:
        until(mixture, lambda: rounds(mixture) >= 3)
        assert not outages(tmp_path)
        server.stop()
        until(mixture, lambda: len(outages(tmp_path)) >= 2)
        server.start()
        before = rounds(mixture)
        until(mixture, lambda: rounds(mixture) > before)
        until(mixture, mixture.finished)
    finally:
        mixture.close()
    assert rounds(mixture) == 40
    assert all(expert_streams(mixture.records(), round_robin(1, 3, 2).tolist()).values())


def test_an_s3_store_that_is_away_at_the_start_is_told(tmp_path: Path, shared_cache: Path, server: S3Server) -> None:
    server.stop()
    mixture = SplitMixture(tmp_path, shared_cache, "parallax-offload.toml", ON_S3, 3)
    try:
        with pytest.raises(AssertionError, match="s3://payloads/run failed at writing a probe"):
            until(mixture, mixture.finished)
    finally:
        mixture.close()


def outages(folder: Path) -> list[str]:
    """Lines of all logs that tell of a store operation that failed and will be tried again."""
    lines = [line for path in folder.rglob("*.log") for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if "s3://payloads/run failed at" in line and "trying again" in line]


def rounds(mixture: SplitMixture) -> int:
    """How many are finished."""
    mixture.news()
    return sum(event["event"] == "round_finished" for event in mixture.events)


def until(mixture: SplitMixture, reached: Callable[[], bool]) -> None:
    """Wait for something; fails when the gateway ends badly."""

    def reached_or_ended() -> bool:
        mixture.finished()
        return reached()

    wait_until(reached_or_ended, "the mixture's progress", said=mixture.tail_of_log)
