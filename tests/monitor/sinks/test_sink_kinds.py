"""Each sink against its own library, or a server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sink_story import FULL, LEFT, LOST, RESUMED, line, run_in, send

from planetary.core.errors import PeerError, UserError
from planetary.monitor.sinks.mlflow_sink import Mlflow, MlflowSink
from planetary.monitor.sinks.opentelemetry_sink import OpenTelemetry, OpenTelemetrySink
from planetary.monitor.sinks.tensorboard_sink import Tensorboard, TensorboardSink
from planetary.monitor.sinks.wandb_sink import Wandb, WandbSink
from planetary.monitor.sinks.webhook_sink import Webhook, WebhookSink
from waiting import wait_until

# --- TensorBoard ------------------------------------------------------------------------------------------------


def test_tensorboard_files_have_every_number_by_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="pip install -e '.[tensorboard]'")
    from tensorboardX.proto.event_pb2 import Event

    send(Tensorboard(TensorboardSink()), run_in(tmp_path), range(1, 3), LOST)
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:  # records: length, its checksum, bytes, their checksum
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = {(v.tag, e.step): v for e in events for v in e.summary.value}
    assert values["loss", 1].simple_value == 3.0
    assert values["loss", 2].simple_value == 1.5
    assert values["worker/n/1/transfer_s", 2].simple_value == 0.5
    texts = [v.tensor.string_val[0].decode() for (tag, _), v in values.items() if tag.startswith("events")]
    assert "worker n/1 lost: killed by signal 9" in texts


# --- webhook ----------------------------------------------------------------------------------------------------


class Hook:
    """A server on loopback that keeps what is posted to it."""

    def __init__(self, status: int = 200) -> None:
        posts: list[tuple[str, dict[str, Any]]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posts.append((self.path, json.loads(body)))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.posts = posts
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/T0/secret"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


def test_a_webhook_posts_the_chosen_events(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANETARY_TEST_HOOK", hook.url)
    sink = Webhook(WebhookSink(url_env="PLANETARY_TEST_HOOK"))
    send(sink, run_in(tmp_path), range(1, 3), LOST, LEFT, RESUMED, FULL)
    assert [path for path, _ in hook.posts] == ["/T0/secret"] * 3
    lost, full, ended = [body for _, body in hook.posts]
    assert lost == {
        "run": "demo",
        "text": "demo: worker n/1 lost: killed by signal 9",
        "event": "worker_lost",
        "t": 105.0,
        "worker": "n/1",
        "pid": 2,
        "node": "n",
        "reason": "killed by signal 9",
        "silent_s": 0.25,
        "kind": "crashed",
    }
    assert full["text"] == "demo: checkpoint of round 1 failed: No space left on device"
    assert (ended["event"], ended["ok"], ended["reason"]) == ("run_finished", True, "all 2 rounds are done")


def test_refusing_webhook_fails_without_showing_its_address(tmp_path: Path) -> None:
    """A webhook that refuses is a failure that does not show its address."""
    refusing = Hook(status=410)
    sink = Webhook(WebhookSink(url=refusing.url))
    sink.load()
    sink.open(run_in(tmp_path))
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:\d+ answered 410 Gone") as caught:
        sink.write_event(LOST)
    assert "secret" not in str(caught.value)
    refusing.close()
    with pytest.raises(PeerError, match=r"cannot reach 127\.0\.0\.1:\d+: .*refused") as caught:
        sink.write_event(LOST)
    assert "secret" not in str(caught.value)
    with pytest.raises(UserError, match="NO_SUCH_VARIABLE has no URL"):
        Webhook(WebhookSink(url_env="NO_SUCH_VARIABLE")).load()


# --- the heavy ones ---------------------------------------------------------------------------------------------


@pytest.mark.doors("opentelemetry")
def test_opentelemetry_has_gauges_and_an_event_counter(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import export

    reader = export.InMemoryMetricReader()
    sink = OpenTelemetry(OpenTelemetrySink(), lambda _: reader)
    sink.load()
    sink.open(run_in(tmp_path))
    sink.write_event(LOST)
    sink.write_round(line(2))
    data = reader.get_metrics_data()
    (resource,) = data.resource_metrics
    assert resource.resource.attributes["planetary.run"] == "demo"
    found = {
        (metric.name, *sorted(point.attributes.items())): point.value
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert found["planetary.round",] == 2
    assert found["planetary.loss",] == 1.5
    assert found["planetary.worker.seconds", ("worker", "n/1")] == 8.0
    assert found["planetary.events", ("event", "worker_lost")] == 1
    sink.close(True)


@pytest.mark.doors("mlflow")
def test_mlflow_has_the_run_with_metrics_and_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    options = MlflowSink(uri=uri, experiment="planets")
    send(Mlflow(options), run_in(tmp_path), range(1, 2), LOST, ok=False)
    send(Mlflow(options), run_in(tmp_path), range(2, 3), RESUMED)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("planets")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("demo", "FINISHED")
    assert found.data.params["train.rounds"] == "3"
    assert found.data.tags["planetary.outcome"] == "all 2 rounds are done"
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "loss")] == [(1, 3.0), (2, 1.5)]
    assert found.data.metrics["worker/n/1/seconds"] == 8.0


def records_of(data: bytes) -> Iterator[bytes]:
    """The whole records of wandb's file, which may be written now: LevelDB's log, blocks of 32 KiB after 7 bytes."""
    block, at, part = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # the rest of a block is padding
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):
            return
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


@pytest.mark.processes  # wandb has a service of its own
@pytest.mark.doors("wandb")
def test_wandb_offline_keeps_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    send(Wandb(WandbSink(project="planets")), run_in(tmp_path), range(1, 3), LOST)
    (path,) = tmp_path.glob("wandb/offline-run-*-5eed/run-5eed.wandb")
    history, begun = [], []

    def ended() -> list[Any]:
        records = [wandb_internal_pb2.Record.FromString(data) for data in records_of(path.read_bytes())]
        return records if any(record.WhichOneof("record_type") == "exit" for record in records) else []

    for record in wait_until(ended, "the run's end"):  # wandb's service writes on after the client has finished
        if record.WhichOneof("record_type") == "history":
            pairs = [(item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item]
            items = {key: json.loads(value) for key, value in pairs}
            history.append(items)
        elif record.WhichOneof("record_type") == "run":
            begun.append((record.run.project, record.run.display_name))
    assert begun[0] == ("planets", "demo")
    assert [(item["round"], item["loss"]) for item in history] == [(1, 3.0), (2, 1.5)]
    assert history[1]["worker/n/1/seconds"] == 8.0
    assert history[0]["events/worker_lost"] == 1
