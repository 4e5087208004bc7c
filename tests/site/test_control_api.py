"""The control API as a client sees it: jobs, tokens, what is wrong, and its description."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib
import json
import os
import re
import signal
import ssl
import threading
import tomllib
import urllib.parse
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from msgspec import inspect
from openapi_spec_validator import validate
from site_support import ADMIN, Running, forget_the_kind, run, running, toy_kinds  # noqa: F401

import planetary
from planetary.artifacts.checkpoint import checkpoint_name
from planetary.cli.main import main
from planetary.client.connection import client_of
from planetary.core.clock import SystemClock
from planetary.core.configuration.ranges import describe
from planetary.core.errors import PlanetaryError, TrustError, UserError
from planetary.fleet.gateway.gateway import Security
from planetary.net import invite
from planetary.net.authority import Authority
from planetary.net.strangers import StrangerLimits
from planetary.run.processes.announcement import Announcement
from planetary.runs.serve.http import requests
from planetary.site import api
from planetary.site.api.event_streams import event_lines
from planetary.site.api.job_operations import status_of
from planetary.site.config import ControllerOptions, Controllers, load_site
from planetary.site.gateway_process import HostOptions, host_site
from planetary.site.jobs import JobState
from planetary.site.site import Site, SiteOptions
from planetary.web import http_server
from planetary.web.access import Access, AccessTokens, Scope
from planetary.web.api_errors import CODES
from planetary.web.gateway_client import GatewayClient

pytestmark = pytest.mark.usefixtures("toy_kinds")


def message_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


def code_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


def test_the_document_is_valid_and_names_every_operation_once(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        document = (await site.get("/v1/openapi.json")).json()
        validate(document)
        operations = [one for path in document["paths"].values() for one in path.values()]
        names = [one["operationId"] for one in operations]
        assert len(names) == len(set(names)) > 35
        open_to_all = {one["operationId"] for one in operations if not one["security"]}
        assert open_to_all == {"check_health", "check_ready", "check_healthz", "check_readyz", "get_document"}
        for path in ("/v1/jobs/{job}/cancel", "/v1/training/jobs", "/v1/rl/jobs", "/v1/workers/{worker}/drain"):
            assert path in document["paths"]
        served = document["paths"]["/v1/inference/{path}"]["post"]
        assert served["security"]
        assert {"application/json", "text/event-stream"} == set(served["responses"]["200"]["content"])
        metrics = document["paths"]["/v1/metrics"]["get"]["responses"]
        assert {"application/json", "text/plain; version=1.0.0; charset=utf-8"} == set(metrics["200"]["content"])
        files = document["paths"]["/v1/jobs/{job}/checkpoints/{round}/{file}"]["get"]["responses"]
        assert {"200", "206", "404", "416"} <= set(files)

    run(tmp_path, test)


def test_every_read_operation_answers_as_documented(tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    async def test(site: Running) -> None:
        await site.submit()
        await site.until_state("toy", "running")
        document = (await site.get("/v1/openapi.json")).json()
        checked = 0
        for path, methods in document["paths"].items():
            content = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema")
            if not schema or "{artifact}" in path or "{worker}" in path or path == "/v1/invites":
                continue
            if path.startswith("/v1/federation/") and "409" in methods["get"]["responses"]:
                continue  # of a hub: see test_hub_api.py
            answer = await site.get(path.replace("{job}", "toy"))
            assert answer.status_code in (200, 503), (path, answer.text)
            unknown = await site.get(path.replace("{job}", "toy"), params={"stat": "x"})
            if "{path}" not in path:
                assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "stat"), path
                assert "400" in methods["get"]["responses"], path
            if answer.status_code == 200:
                validator = Draft202012Validator({**schema, "components": document["components"]})
                errors = list(validator.iter_errors(answer.json()))
                assert not errors, (path, errors[:1])
                checked += 1
        assert checked > 10

    run(tmp_path, test)


def test_job_runs_alone_at_its_controller_and_is_cancelled(tmp_path: Path) -> None:
    """A job runs beside no other of its controller and is cancelled at once."""

    async def test(site: Running) -> None:
        first, second = await site.submit(), await site.submit()
        assert (first["job_id"], second["job_id"]) == ("toy", "toy-2")
        assert second["state"] == "queued"
        await site.until_state("toy", "running")
        cancelled = await site.post("/v1/jobs/toy/cancel", {"reason": "another idea"})
        assert cancelled.status_code == 202
        assert cancelled.json()["state"] in ("cancelling", "cancelled")
        ended = await site.until_state("toy", "cancelled")
        assert ended["reason"] == "another idea"
        await site.until_state("toy-2", "running")
        again = await site.post("/v1/jobs/toy/cancel")
        assert (again.status_code, code_of(again)) == (409, "job_over")
        assert "it is cancelled" in message_of(again)
        assert (await site.post("/v1/jobs/toy-2/cancel")).status_code == 202
        assert (await site.post("/v1/jobs/toy-2/cancel")).status_code == 409
        states = [one["state"] for one in (await site.get("/v1/jobs")).json()["jobs"]]
        assert states[0] == "cancelled"
        assert next(one["job_id"] for one in (await site.get("/v1/jobs?state=cancelled")).json()["jobs"]) == "toy"

    run(tmp_path, test)


def test_a_queued_job_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        await site.submit()
        await site.submit()
        assert (await site.post("/v1/jobs/toy-2/cancel")).json()["state"] == "cancelled"
        assert not (site.folder / "runs" / "toy-2").exists()

    run(tmp_path, test)


def test_scopes_are_kept_apart(tmp_path: Path) -> None:
    tokens = AccessTokens(tmp_path / "state")
    shown = {scope: tokens.make(scope.word, scope, 1.0) for scope in Scope}
    assert all(token not in (tmp_path / "state" / "api-tokens.jsonl").read_text() for token in shown.values())

    async def test(site: Running) -> None:
        job = {"config": {"run": {"name": "toy"}}}

        async def statuses(token: str) -> list[int]:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            async with httpx.AsyncClient(base_url=site.url, headers=headers) as client:
                return [
                    (await client.get("/v1/jobs")).status_code,
                    (await client.post("/v1/jobs", json=job)).status_code,
                    (await client.post("/v1/workers/nobody/drain")).status_code,
                    (await client.get("/healthz")).status_code,
                ]

        assert await statuses("") == [200, 401, 401, 200]
        assert await statuses("wrong") == [401, 401, 401, 200]
        assert await statuses(shown[Scope.READ]) == [200, 403, 403, 200]
        assert await statuses(shown[Scope.SUBMIT]) == [200, 202, 403, 200]
        assert await statuses(shown[Scope.ADMIN]) == [200, 202, 404, 200]
        submitted = (await site.get("/v1/jobs")).json()["jobs"]
        assert [one["by"] for one in submitted] == ["submit", "admin"]
        tokens.revoke("submit", 2.0)
        assert await statuses(shown[Scope.SUBMIT]) == [401, 401, 401, 200]

    run(tmp_path, test)


WRONG = (
    (b"{", 400, "no JSON"),
    (b'{"toml": "\xff"}', 400, "no JSON in UTF-8"),
    (b"[1]", 400, "Expected `object`"),
    (b'{"confg": {}}', 400, "unknown parameter 'confg'; did you mean config?"),
    (b"{}", 400, "no configuration"),
    (b'{"config": {"train": {"roundz": 3}}}', 400, "unknown key train.roundz; did you mean train.rounds?"),
    (b'{"config": {"fabric": {"workers": 1, "quorum": 2}}}', 400, "could never be closed by its quorum"),
    (b'{"toml": "a ="}', 400, "the text is not valid TOML"),
    (b'{"toml": "", "overrides": ["x"]}', 400, "expected section.key=value"),
    (b'{"toml": "[run]\\nname = \\"toy\\"", "config": {"run": {"name": "toy"}}}', 400, "config and toml are given"),
    (b'{"config": {"run": {"name": "toy"}}, "name": "../x"}', 400, "expected the name of one folder"),
    (b'{"resume": "nothing"}', 400, "there is no run named 'nothing'"),
    (
        b'{"config": {"run": {"name": "toy"}}, "priority": "high"}',
        400,
        "priority: expected a whole number >= -1000 and <= 1000",
    ),
    (b" " * (1 << 20) + b"{}", 413, "more than 1048576 bytes"),
)


def test_impossible_submission_is_refused_and_the_site_goes_on(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        for body, status, text in WRONG:
            answer = await site.client.post("/v1/jobs", content=body)
            assert answer.status_code == status, answer.text
            assert text in message_of(answer)
        assert (await site.get("/v1/jobs")).json() == {"jobs": []}
        assert (await site.submit())["job_id"] == "toy"

    run(tmp_path, test)


def test_every_error_has_a_stable_documented_code(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "site.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+) \| (.*) \|$", page, re.MULTILINE)
    assert {code: (tuple(map(int, statuses.split(", "))), text) for code, statuses, text in rows} == CODES
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in CODES)
    folder = Path(planetary.__file__).parent
    calls = [
        call
        for part in ("site", "web", "fleet", "runs/federation", "runs/rounds")
        for path in (folder / part).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("ApiError", "ConflictError")
    ]
    given = {
        ast.literal_eval(word.value)
        for call in calls
        for word in call.keywords
        if word.arg == "code"
        if isinstance(word.value, ast.Constant)
    }
    assert len(given) > 20
    assert given <= set(CODES)

    async def test(site: Running) -> None:
        document = (await site.get("/v1/openapi.json")).json()
        described = document["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"][
            "description"
        ]
        assert all(f"{code}: {text}" in described for code, (_, text) in CODES.items())
        refusals = document["paths"]["/v1/jobs/{job}/cancel"]["post"]["responses"]["409"]["description"]
        assert "job_over" in refusals
        for path, status, code in (
            ("/v1/jobs/nothing", 404, "job_not_found"),
            ("/v1/nothing", 404, "no_such_path"),
            ("/v1/site?a=1", 400, "unknown_parameter"),
            ("/v1/federation/jobs", 409, "no_hub"),
        ):
            answer = await site.get(path)
            assert (answer.status_code, code_of(answer)) == (status, code)

    run(tmp_path, test)


def test_every_field_of_a_body_has_words_for_its_values() -> None:
    modules = [requests, *(importlib.import_module(f"{api.__name__}.{one.name}") for one in iter_modules(api.__path__))]
    bodies = [
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__struct_config__.forbid_unknown_fields
    ]
    assert len(bodies) > 10
    for body in bodies:
        info = inspect.type_info(body)
        assert isinstance(info, inspect.StructType)
        assert all(describe(field.type) for field in info.fields)


@pytest.mark.parametrize("priority", [-1001, 1001, 10**30, "high"])
def test_a_priority_out_of_its_range_is_refused_with_the_range(tmp_path: Path, priority: object) -> None:
    async def test(site: Running) -> None:
        document = (await site.get("/v1/openapi.json")).json()
        schema = document["components"]["schemas"]["Submission"]["properties"]["priority"]["anyOf"]
        assert {"type": "integer", "minimum": -1000, "maximum": 1000} in schema
        job = {"config": {"run": {"name": "toy"}}, "priority": priority}
        refused = await site.post("/v1/jobs", job)
        assert (refused.status_code, code_of(refused)) == (400, "invalid_value")
        assert refused.json()["error"]["param"] == "priority"
        assert message_of(refused).startswith("priority: expected a whole number >= -1000 and <= 1000, found ")
        assert (await site.post("/v1/jobs", {**job, "priority": 1000})).json()["priority"] == 1000

    run(tmp_path, test)


def test_disabled_controller_and_foreign_kind_are_refused(tmp_path: Path) -> None:
    """A controller that is not enabled and a kind that is another's are refused."""

    async def test(site: Running) -> None:
        job = {"config": {"run": {"name": "toy"}}}
        disabled = await site.post("/v1/rl/jobs", job)
        assert (disabled.status_code, disabled.json()["error"]["code"]) == (409, "controller_not_enabled")
        other = await site.post("/v1/inference/jobs", job)
        assert other.status_code == 400
        assert "is for training, not for inference" in message_of(other)
        assert (await site.post("/v1/training/jobs", job)).status_code == 202
        without = await site.post("/v1/training/jobs")
        assert (without.status_code, without.json()["error"]["code"]) == (400, "no_config")

    run(tmp_path, test)


def test_a_run_without_a_training_step_keeps_what_it_has(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        await site.submit()
        assert (await site.post("/v1/jobs/nothing/steps")).status_code == 404
        await site.until_begun("toy")
        for path in ("/v1/jobs/toy/steps", "/v1/jobs/toy/steps/rollback"):
            refused = await site.post(path)
            assert (refused.status_code, code_of(refused)) == (409, "step_fixed")
            assert "cannot be replaced" in message_of(refused)
        for wrong, said in (
            ("optimizer.weight_decai=0.1", "did you mean optimizer.weight_decay?"),
            ("train.rounds=4", "no part of the training step"),
            ("nonsense", "expected section.key=value"),
        ):
            refused = await site.post("/v1/jobs/toy/steps", {"overrides": [wrong]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "overrides")
            assert said in message_of(refused)
        unknown = await site.post("/v1/jobs/toy/steps", {"override": ["a.b=1"]})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "override")
        await site.post("/v1/jobs/toy/cancel")
        await site.until_state("toy", "cancelled")
        assert "the job toy is cancelled: a running one" in message_of(await site.post("/v1/jobs/toy/steps"))
        steps = (await site.get("/v1/jobs/toy/steps")).json()
        assert (steps["steps"], steps["roll_out"]["state"]) == ([], "")

    run(tmp_path, test)


def test_artifacts_and_steps_need_no_reader_of_the_kind(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        await site.submit(workers=1)
        site.join("w/0", answers=True)
        await site.until_state("toy", "finished")
        paths = ("/v1/jobs/toy/artifacts", "/v1/jobs/toy/steps")
        known = [(await site.get(path)).json() for path in paths]
        assert [one["artifact"] for one in known[0]["history"]] == ["f" * 64]
        forget_the_kind(site.folder / "runs" / "toy")
        answers = [await site.get(path) for path in paths]
        assert [(one.status_code, one.json()) for one in answers] == [(200, one) for one in known]
        status = await site.get("/v1/jobs/toy/status")
        assert status.status_code == 400
        assert "the kind of run 'comet' is not known here" in message_of(status)

    run(tmp_path, test)


def test_a_job_to_be_resumed_is_preparing(tmp_path: Path) -> None:
    """The journal of a killed process ends with a state that is no longer true."""

    async def test(site: Running) -> None:
        await site.submit(workers=1)
        site.join("w/0", answers=True)
        await site.until_state("toy", "finished")
        job, nobody = site.site.book.jobs["toy"], cast(Site, SimpleNamespace(runs={}))
        assert (await status_of(nobody, job)).state == "finished"
        to_resume = msgspec.structs.replace(job, state=JobState.RUNNING)
        left = await status_of(nobody, to_resume)
        assert (left.state, left.stage, left.ended_at) == ("preparing", "running", None)

    run(tmp_path, test)


def test_two_jobs_cannot_have_one_run_folder(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        await site.submit(name="toy")
        await site.until_state("toy", "running")
        taken = await site.post("/v1/jobs", {"config": {"run": {"name": "toy"}}, "name": "toy"})
        assert (taken.status_code, code_of(taken)) == (409, "folder_taken")
        assert "the job toy has the run folder" in message_of(taken)

    run(tmp_path, test)


def test_what_is_not_there_is_404_and_a_wrong_method_405(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        for path in (
            "/v1/jobs/x",
            "/v1/jobs/x/status",
            "/v1/jobs/x/events",
            "/v1/workers/x",
            "/v1/nothing",
            "/status.json?job=x",
        ):
            assert (await site.get(path)).status_code == 404, path
        assert (await site.client.delete("/v1/jobs")).status_code == 405
        assert (await site.client.get("/v1/jobs", headers={"host": "evil.example"})).status_code == 421
        assert (await site.client.get("/v1/jobs", headers={"origin": "http://evil.example"})).status_code == 403

    run(tmp_path, test)


def events_of(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        pairs = (line.partition(": ") for line in block.splitlines() if not line.startswith(":"))
        lines = {name: text for name, _, text in pairs}
        if lines:
            found.append((lines["id"], lines["event"], json.loads(lines["data"])))
    return found


def test_events_stream_to_the_end_and_resume_per_client(tmp_path: Path) -> None:
    """Events are streamed until the run is over and go on where a client was."""

    async def test(site: Running) -> None:
        await site.submit()
        await site.until_state("toy", "running")
        stream = asyncio.ensure_future(site.get("/v1/jobs/toy/events"))
        await site.post("/v1/jobs/toy/cancel")
        answer = await stream
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
        assert [one[1] for one in events] == ["run_started", "run_finished"]
        assert [one[0] for one in events] == ["1", "2"]
        later = await site.get("/v1/jobs/toy/events", headers={"last-event-id": "1"})
        assert [one[1] for one in events_of(later.text)] == ["run_finished"]
        assert (await site.get("/v1/jobs/toy/events?after=x")).status_code == 400

        async def first_of_site() -> list[str]:
            names: list[str] = []
            async with site.client.stream("GET", "/v1/events") as lines:
                async for line in lines.aiter_lines():
                    if line.startswith("event: "):
                        names.append(line.removeprefix("event: "))
                        if len(names) == 4:
                            return names
            return names

        expected = ["job_submitted", "job_started", "job_cancelled", "job_ended"]
        assert await asyncio.wait_for(first_of_site(), 10) == expected

    run(tmp_path, test)


def test_long_journal_is_streamed_in_fair_parts(tmp_path: Path) -> None:
    """Else a client that is gone is written to until the end of the journal, with a warning for each event."""
    journal = tmp_path / "events.jsonl"
    journal.write_text("".join(f'{{"event":"e","number":{number}}}\n' for number in range(1, 201)))

    async def test() -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def never(timeout_s: float) -> None:
            raise AssertionError

        task, seen, text = asyncio.ensure_future(others()), [], ""
        async for part in event_lines(journal, 10, never, lambda: True):
            seen.append(turns)
            text += part.decode()
        task.cancel()
        assert [one[2]["number"] for one in events_of(text)] == list(range(11, 201))
        assert len(seen) == 4
        assert seen == sorted(set(seen))

    asyncio.run(test())


def test_checkpoints_are_downloaded_whole_and_in_ranges(tmp_path: Path) -> None:
    data = bytes(range(200))
    place = tmp_path / "runs" / "toy" / "checkpoints" / checkpoint_name(3)

    async def test(site: Running) -> None:
        await site.submit()
        await site.until_open("toy")
        place.mkdir(parents=True)
        (place / "params.safetensors").write_bytes(data)
        (listed,) = (await site.get("/v1/jobs/toy/checkpoints")).json()["checkpoints"]
        assert (listed["round"], listed["files"]) == (3, [{"name": "params.safetensors", "nbytes": 200}])
        path = "/v1/jobs/toy/checkpoints/3/params.safetensors"
        for asked, status, expected in (
            ("", 200, data),
            ("bytes=10-19", 206, data[10:20]),
            ("bytes=-5", 206, data[-5:]),
            ("bytes=190-900", 206, data[190:]),
            ("lines=1-2", 200, data),  # RFC 9110, section 14.2: what is no range of bytes is ignored
            ("bytes=a", 200, data),
            ("bytes=5-3", 200, data),
        ):
            answer = await site.get(path, headers={"range": asked} if asked else {})
            assert (answer.status_code, answer.content) == (status, expected), asked
        for asked in ("bytes=200-", "bytes=-0"):
            beyond = await site.get(path, headers={"range": asked})
            assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */200")
            assert "the file has 200 bytes" in message_of(beyond)
        for path, said in (
            ("4/params.safetensors", "no checkpoint of round 4; there are: 3"),
            ("3/outer.safetensors", "there is no file 'outer.safetensors' in it; there are: params.safetensors"),
            ("3/..%2f..%2fconfig.toml", "Not Found"),
        ):
            absent = await site.get(f"/v1/jobs/toy/checkpoints/{path}")
            assert absent.status_code == 404
            assert said in message_of(absent)

    run(tmp_path, test)


def test_tls_handshakes_that_do_not_end_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "StrangerLimits", lambda: StrangerLimits(at_once=2, settled_s=0.0))

    async def test(site: Running) -> None:
        port = site.client.base_url.port
        assert port is not None
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await silent[0][0].read() == b""  # its place was the third's
        assert (await site.get("/v1/jobs")).status_code == 200
        for _, writer in silent:
            writer.close()

    run(tmp_path, test, security=Security.by(Authority.open(tmp_path / "state", SystemClock().wall())), tls=True)


def test_metrics_are_json_and_for_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="pip install -e '.[prometheus]'")

    async def test(site: Running) -> None:
        await site.submit(name="toy")
        await site.submit(name="toy-serve")
        await site.until_open("toy")
        await site.until_open("toy-serve")
        assert set((await site.get("/v1/metrics")).json()["runs"]) == {"toy", "toy-serve"}
        text = (await site.get("/v1/metrics?format=prometheus")).text
        assert text.count("# TYPE planetary_sent_bytes_total") == 1
        assert 'planetary_sent_bytes_total{run="toy"}' in text
        assert 'planetary_sent_bytes_total{run="toy-serve"}' in text
        assert (await site.get("/v1/metrics?format=xml")).status_code == 400
        page = await site.get("/?job=toy")
        assert page.headers["content-type"].startswith("text/html")
        assert (await site.get("/status.json?job=toy-serve")).json()["run"] == "toy-serve"

    run(tmp_path, test)


def test_beyond_loopback_nothing_is_told_without_a_token(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        async with httpx.AsyncClient(base_url=site.url) as stranger:
            for path in ("/v1/jobs", "/", "/status.json", "/v1/events", "/metrics", "/v1/federation/status"):
                assert (await stranger.get(path)).status_code == 401, path
            for path in ("/health", "/healthz", "/readyz", "/v1/openapi.json"):
                assert (await stranger.get(path)).status_code == 200, path
            assert (await stranger.get("/status.json?token=page")).status_code == 200
            assert (
                await stranger.post("/v1/jobs?token=root", json={})
            ).status_code == 401  # in an address it only reads
        assert (await site.get("/v1/federation/status")).json() == {
            "enabled": False,
            "runs": [],
            "places_jobs": False,
            "link": None,
        }

    known = {"the page's": (Scope.READ, "page"), "root": (Scope.ADMIN, "root"), "the test": (Scope.ADMIN, ADMIN)}
    run(tmp_path, test, access=Access(known=known))


def test_no_model_is_said_when_none_is_served(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        answer = await site.post("/v1/inference/chat/completions", {"messages": []})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")

    run(tmp_path, test)


def test_invites_are_refused_where_there_are_none(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        answer = await site.post("/v1/invites")
        assert answer.status_code == 409
        assert "--plain-loopback" in message_of(answer)

    run(tmp_path, test)


def test_invites_are_made_listed_and_revoked(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        made = await site.post("/v1/invites", {"expires_in_s": 60, "node": "gpu-box"})
        assert made.status_code == 201
        read = invite.read(made.json()["token"])
        assert (read.id, read.node) == (made.json()["id"], "gpu-box")
        listed = await site.get("/v1/invites")
        assert made.json()["token"] not in listed.text
        (one,) = listed.json()["invites"]
        assert (one["id"], one["node"], one["revoked_at"]) == (read.id, "gpu-box", None)
        assert (await site.client.delete(f"/v1/invites/{read.id[:6]}")).json()["revoked_at"] > 0
        assert (await site.client.delete("/v1/invites/zzz")).status_code == 404
        assert (await site.post("/v1/invites", {"node": "a b"})).status_code == 400
        assert (await site.post("/v1/invites", {"expires_in_s": -1})).status_code == 400

    run(tmp_path, test, security=Security.by(Authority.open(tmp_path / "state", SystemClock().wall())))


def test_commands_recognise_a_tls_gateway_by_their_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands recognise a gateway with TLS by the fingerprint of their token."""
    authority = Authority.open(tmp_path / "state", SystemClock().wall())
    fingerprint = authority.fingerprint.hex()
    (tmp_path / "state" / "api-token.txt").write_text(ADMIN)

    async def test(site: Running) -> None:
        assert site.url.startswith("https://")
        await site.submit()

        async def asked(token: str) -> Any:
            return await asyncio.to_thread(lambda: GatewayClient(site.url, token).get("/v1/jobs"))

        beside = await asyncio.to_thread(client_of, site.url, tmp_path / "state" / "api-token.txt")
        for answer in (await asked(f"{ADMIN}@{fingerprint}"), await asyncio.to_thread(beside.get, "/v1/jobs")):
            assert [job["job_id"] for job in answer["jobs"]] == ["toy"]
        for token, said in (
            (f"{ADMIN}@{'0' * 64}", r"is not the gateway that the token's fingerprint \(behind its @\) is for"),
            (ADMIN, "shows a certificate that is not known here"),
        ):
            with pytest.raises(TrustError, match=said) as refused:
                await asked(token)
            assert "invite" not in str(refused.value)
            if "@" in token:
                assert f"expected a certificate authority with the fingerprint {'0' * 64}" in str(refused.value)
                assert f"found {fingerprint}. " in str(refused.value)
                assert "planetary token NAME" in str(refused.value)
        other = Authority.open(tmp_path / "other", SystemClock().wall())
        (other.folder / "api-token.txt").write_text(ADMIN)
        stranger = await asyncio.to_thread(client_of, site.url, other.folder / "api-token.txt")
        with pytest.raises(TrustError, match=f"is not the gateway that the authority in {other.folder} is for"):
            await asyncio.to_thread(stranger.get, "/v1/jobs")
        (tmp_path / "token.txt").write_text(f"{ADMIN}@{fingerprint}")
        (tmp_path / "wrong.txt").write_text(f"{ADMIN}@{'0' * 64}")
        watch = ["watch", f"{site.url}/?job=toy", "--json"]
        assert await asyncio.to_thread(main, [*watch, f"--token-file={tmp_path / 'token.txt'}"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == "toy"
        assert await asyncio.to_thread(main, [*watch, f"--token-file={tmp_path / 'wrong.txt'}"]) == 4
        assert "is not the gateway" in " ".join(capsys.readouterr().err.split())
        with pytest.raises(UserError, match="not hexadecimal"):
            await asked(f"{ADMIN}@xyz")
        own_page = await site.get("/v1/jobs", headers={"origin": site.url})
        assert own_page.status_code == 200
        assert (await site.get("/v1/jobs", headers={"origin": site.url.replace("https", "http")})).status_code == 403

    run(tmp_path, test, security=Security.by(authority), tls=True)


def test_https_page_is_announced_with_its_fingerprints(
    tmp_path: Path,
) -> None:
    """A browser shows the one of the certificate, and a token names that of its authority."""
    config = tmp_path / "gateway.toml"
    config.write_text(f'gateway_id = "lab"\nruns_dir = "{tmp_path / "runs"}"\n[controllers.training]\nenabled = true\n')
    announced: list[Announcement] = []
    shown: list[bytes] = []

    def listening(announcement: Announcement) -> None:
        announced.append(announcement)
        threading.Thread(target=look, args=(announcement.dashboard,)).start()

    def look(page: str) -> None:
        try:
            port = urllib.parse.urlsplit(page).port or 0
            shown.append(ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=20)))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    options = HostOptions(state=tmp_path / "state", plain=False, api_host="127.0.0.1", api_port=0, api_tls=True)
    site = SiteOptions(
        name="lab",
        folder=tmp_path / "runs",
        cache=tmp_path / "cache",
        host="127.0.0.1",
        port=0,
        controllers=Controllers(training=ControllerOptions(enabled=True)),
    )
    asyncio.run(host_site(load_site(config), site, options, listening))
    digest = hashlib.sha256(shown[0]).hexdigest()
    authority = Authority.open(tmp_path / "state", SystemClock().wall())
    page = announced[0].page
    assert page[0] == announced[0].dashboard
    assert page[0].startswith("https://")
    assert page[1].replace(":", "").lower() == f"certificate sha-256 {digest}"
    assert page[2].split()[2] == authority.fingerprint.hex()
    assert Announcement("127.0.0.1", 1, "http://127.0.0.1:2/", "", "runs").page == ("http://127.0.0.1:2/",)


def test_a_submission_brings_the_files_of_its_model_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text("def build(): ...\n")
    (tmp_path / "notes.txt").write_text("some text " * 100)
    (tmp_path / "token.txt").write_text(ADMIN)
    (tmp_path / "toy.toml").write_text(
        '[run]\nname = "toy"\n[model]\nsource = "net.py:build"\n[data]\nsource = "notes.txt"\n'
    )
    digest = hashlib.sha256((tmp_path / "net.py").read_bytes()).hexdigest()

    async def test(site: Running) -> None:
        sent_from = [str(tmp_path / "toy.toml"), "--send-files"]

        def command() -> int:
            return main(
                ["jobs", "submit", *sent_from, f"--gateway={site.url}", f"--token-file={tmp_path / 'token.txt'}"]
            )

        assert await asyncio.to_thread(command) == 0, capsys.readouterr().err
        config = tomllib.loads(site.site.book.jobs["toy"].config)
        sent = site.folder / "runs" / "files"
        assert config["model"]["source"] == f"{sent / digest / 'net.py'}:build"
        assert Path(config["data"]["source"]).read_text() == "some text " * 100
        put = site.client.put
        again = await put(f"/v1/files/{digest}/net.py", content=b"anything: it is here")
        assert again.json() == {"digest": digest, "name": "net.py", "nbytes": 17}
        monkeypatch.setattr("planetary.site.submission.MOST_FILE", 1000)
        for path, content, said in (
            (f"{'0' * 64}/net.py", b"other bytes", "expected bytes of SHA-256 000"),
            ("xyz/net.py", b"", "64 hexadecimal digits"),
            (f"{digest}/.net", b"", "the name of one file"),
            (f"{digest}/large.bin", b"x" * 1001, "more than 1000 bytes"),
        ):
            refused = await put(f"/v1/files/{path}", content=content)
            assert refused.status_code == 400, refused.text
            assert said in message_of(refused)
        assert sorted(path.name for path in sent.rglob("*") if path.is_file()) == ["net.py", "notes.txt"]
        toy = {"run": {"name": "toy"}}
        for files, said in (
            ({"model.source": {"digest": "0" * 64, "name": "net.py"}}, "send it first"),
            ({"run.name": {"digest": digest, "name": "net.py"}}, "run.name takes no file"),
        ):
            refused = await site.post("/v1/jobs", {"config": toy, "files": files})
            assert refused.status_code == 400
            assert said in message_of(refused)

    run(tmp_path, test)


def test_submission_of_an_absent_file_is_refused_with_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is queued; a file that an earlier job may make in the runs' folder is no reason to refuse one."""
    absent = tmp_path / "elsewhere"

    async def test(site: Running) -> None:
        for section, key, name, remedy in (
            ("model", "source", "net.py:build", "send it along (planetary jobs submit --send-files), or put it there"),
            ("model", "source", "step.mlirbc", "--send-files"),
            ("model", "weights", "w.safetensors", "--send-files"),
            ("data", "source", "notes.txt", "--send-files"),
            ("data", "tokenizer", "tokenizer.json", "--send-files"),
            ("rl", "start", "warm", "put it there and submit again"),
            ("serve", "model", "runs/earlier", "put it there and submit again"),
        ):
            path = str(absent / name)
            refused = await site.post("/v1/jobs", {"config": {"run": {"name": "toy"}, section: {key: path}}})
            assert refused.status_code == 400, refused.text
            file = path.removesuffix(":build")
            assert f"{section}.{key} = {path}: this machine has no {file}; " in message_of(refused)
            assert remedy in message_of(refused)
            assert ("--send-files" in message_of(refused)) == (section in ("model", "data"))
        sent = {"run": {"name": "toy"}, "model": {"source": f"{site.folder / 'runs' / 'files' / 'f'}/net.py:build"}}
        assert (await site.post("/v1/jobs", {"config": sent})).status_code == 400
        assert site.site.book.jobs == {}
        made = {"model": {"weights": str(site.folder / "runs" / "first" / "model.safetensors")}}
        assert (await site.post("/v1/jobs", {"config": {"run": {"name": "toy"}, **made}})).status_code == 202
        (tmp_path / "token.txt").write_text(ADMIN)
        (tmp_path / "toy.toml").write_text('[run]\nname = "toy"\n[data]\nsource = "absent.txt"\n')
        command = [f"--gateway={site.url}", f"--token-file={tmp_path / 'token.txt'}", str(tmp_path / "toy.toml")]
        assert await asyncio.to_thread(main, ["jobs", "submit", *command]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"this machine has no {tmp_path / 'absent.txt'}; send it along" in said

    run(tmp_path, test)


def test_jobs_outlive_the_site(tmp_path: Path) -> None:
    """What runs goes on, what was cancelled stays cancelled, what was queued waits on."""

    async def whole() -> None:
        async with asyncio.timeout(60):
            async with running(tmp_path) as site:
                for _ in range(3):
                    await site.submit()
                await site.until_state("toy", "running")
                await site.post("/v1/jobs/toy/cancel")
                await site.until_state("toy-2", "running")
            async with running(tmp_path) as site:
                await site.until_state("toy-2", "running")
                states = [one["state"] for one in (await site.get("/v1/jobs")).json()["jobs"]]
                assert states == ["cancelled", "running", "queued"]
                assert (await site.post("/v1/jobs/toy/cancel")).status_code == 409
                assert (await site.submit())["job_id"] == "toy-4"

    asyncio.run(whole())
    journal = [json.loads(line) for line in (tmp_path / "runs" / "site.jsonl").read_text().splitlines()]
    assert [one["job"] for one in journal if one["event"] == "job_started"] == ["toy", "toy-2", "toy-2"]
    assert ADMIN not in (tmp_path / "runs" / "site.jsonl").read_text()


def test_site_is_ready_while_it_takes_jobs(tmp_path: Path) -> None:
    """Not as its newest job is: that one may be cancelled, or wait for workers."""

    async def test(site: Running) -> None:
        assert (await site.get("/ready")).status_code == 200
        await site.submit("toy")
        await site.post("/v1/jobs/toy/cancel")
        await site.until_state("toy", "cancelled")
        assert (await site.get("/ready")).status_code == 200
        assert (await site.get("/ready?job=toy")).status_code == 503
        site.site.stop("of the test")
        assert (await site.get("/ready")).status_code == 503

    run(tmp_path, test)


def test_a_token_of_another_gateway_hides_no_public_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder's token belongs to whichever gateway ran here last; a named one that is wrong is an error."""
    stale = tmp_path / "stale" / "api-token.txt"
    stale.parent.mkdir()
    stale.write_text("of-a-gateway-that-ran-yesterday")
    monkeypatch.setenv("PLANETARY_STATE", str(stale.parent))

    async def test(site: Running) -> None:
        await site.submit()
        assumed = await asyncio.to_thread(client_of, site.url, None)
        assert assumed.token == stale.read_text()
        assert [job["job_id"] for job in (await asyncio.to_thread(assumed.get, "/v1/jobs"))["jobs"]] == ["toy"]
        named = await asyncio.to_thread(client_of, site.url, stale)
        for ask in (lambda: named.get("/v1/jobs"), lambda: assumed.post("/v1/jobs", {})):
            with pytest.raises(PlanetaryError, match=r"a token with the scope (read|submit) is needed"):
                await asyncio.to_thread(ask)

    run(tmp_path, test)
