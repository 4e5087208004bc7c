"""What machines read on the dashboard's port: Prometheus and the probes of an orchestrator."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from run_story import status

from planetary.fleet.protocol.status import RunStatus
from planetary.monitor.dashboard import Dashboard
from planetary.runs.serve.status import ServingStatus

GRAFANA = Path(__file__).parents[2] / "examples" / "grafana-dashboard.json"


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_prometheus_reads_the_run_and_its_workers() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install -e '.[prometheus]'")
    first, second = status().workers
    second = msgspec.structs.replace(second, slow="its steps", step_s=1.5, share=0.9, name='n"\\1')
    with Dashboard(lambda: status(workers=(first, second))) as board:
        code, text = asked(board.url + "metrics")
    assert code == 200
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    run = ("run", "demo")
    assert found["planetary_rounds_finished_total", run] == 6
    assert found["planetary_loss", run] == 2.44
    assert found["planetary_tokens_total", run] == 368_640
    assert found["planetary_run_state", run, ("state", "training")] == 1
    assert found["planetary_run_state", run, ("state", "failed")] == 0
    assert found["planetary_workers", run, ("state", "lost")] == 1
    assert found["planetary_worker_slow", run, ("worker", "laptop/0")] == 0
    assert found["planetary_worker_slow", run, ("worker", 'n"\\1')] == 1
    assert found["planetary_worker_step_seconds", run, ("worker", 'n"\\1')] == 1.5
    assert ("planetary_worker_step_seconds", run, ("worker", "laptop/0")) not in found


def test_answering_gateway_is_healthy_and_ready_when_joinable() -> None:
    """A gateway that answers is healthy and is ready when workers can take part."""
    alive: list[bool] = [True]
    now: list[RunStatus] = [status(state="preparing", stage="exporting the model")]
    with Dashboard(lambda: now[0], is_alive=lambda: alive[0]) as board:
        assert asked(board.url + "health") == (200, '{"status": "ok"}')
        code, text = asked(board.url + "ready")
        assert (code, json.loads(text)["stage"]) == (503, "exporting the model")
        now[0] = status()
        assert asked(board.url + "ready")[0] == 200
        now[0] = ServingStatus(run="m", state="waiting")
        assert asked(board.url + "ready")[0] == 503  # no worker answers
        now[0], alive[0] = status(state="finished"), False
        assert asked(board.url + "ready")[0] == 503
        assert asked(board.url + "health") == (503, '{"status": "the gateway does not answer"}')


def test_probes_need_no_token_and_metrics_do() -> None:
    with Dashboard(status, host="0.0.0.0") as board:
        place = re.sub(r"//[^/]+/.*", f"//127.0.0.1:{board.port}/", board.url)
        token = board.url.partition("?")[2]
        names = ("health", "ready", "metrics", "status.json")
        assert [asked(place + name)[0] for name in names] == [200, 200, 401, 401]
        assert asked(f"{place}status.json?{token}")[0] == 200


def test_the_example_for_grafana_asks_for_metrics_that_exist() -> None:
    pytest.importorskip("prometheus_client", reason="pip install -e '.[prometheus]'")
    from planetary.monitor.dashboard import exposition

    served = set(re.findall(r"^# TYPE (\w+)", exposition(status()).decode(), re.MULTILINE))
    board = json.loads(GRAFANA.read_text())
    asked_for = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\bplanetary_\w+", target["expr"])
    }
    assert len(asked_for) > 8
    assert asked_for <= served
