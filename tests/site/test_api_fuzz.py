"""No request of any operation of the control API is a fault of the gateway, and none shows a secret."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from site_support import Running, run, toy_kinds  # noqa: F401

pytestmark = pytest.mark.usefixtures("toy_kinds")

NAMES = (
    "..",
    "a/b",
    "../../etc",
    "a\x00b",
    "a\nb",
    "x" * 10_000,
    "\uff41dmin",
    "con",
    "NUL.txt",
    "a.",
    " ",
    "",
    "%00",
    "\u202e",
    "-",
)
HUGE = "9" * 5000
TOMLS = (
    "a = " + "[" * 100_000,
    "a = " + "[" * 100_000 + "]" * 100_000,
    ".".join("a" * 200_000) + " = 1",
    f"[train]\nrounds = {HUGE}",
    "[train]\nrounds = 10000000000000000000000",
    "[train]\nrounds = 9223372036854775807",
    "[run]\nname = 1979-05-27T07:32:00Z",
    "a = 9999-99-99",
    "[run]\nname = [[[[1]]]]",
    "\x00",
    "[model]\nsource = '" + "x" * 5000 + ".mlir'",
    '[model]\nsource = "\\u0000.mlir"',
    "[model]\noptions = { n_layer = 1e308 }",
    "[data]\nsource = '" + "y" * 100_000 + "'",
    "[serve]\nmodel = '/dev/zero'",
)
BODIES = (
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{",
    b'{"a": ' * 100_000,
    b"[" * 200_000,
    b'{"config": {"train": {"rounds": ' + HUGE.encode() + b"}}}",
    b'{"config": {"train": {"rounds": 1e999}}}',
    b'{"config": {"train": {"rounds": 100000000000000000000000000}}}',
    b'{"config": {"run": {"name": "\\ud800"}}}',
    b'{"config": {"run": {"name": "\\u0000"}}}',
    b'{"config": {"model": {"source": "' + b"z" * 100_000 + b'"}}}',
    b'{"config": {"sinks": [1, null]}}',
    b'{"config": {"sinks": [{"kind": ' + b"9" * 400 + b"}]}}",
    b'{"overrides": ["' + b"a." * 50_000 + b'=1"]}',
    b'{"priority": 1' + b"0" * 300 + b"}",
    b'{"expires_in_s": 1e308}',
    b'{"expires_in_s": -1}',
    b'{"reason": "' + b"\\u0001" * 1000 + b'"}',
    b'{"files": {"model.source": {"digest": "..", "name": "../x"}}, "config": {}}',
)


async def _requests(site: Running) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and options of requests to every operation."""
    document = (await site.get("/v1/openapi.json")).json()
    made: list[tuple[str, str, dict[str, Any]]] = []
    for path, methods in document["paths"].items():
        filled = [path]
        while any("{" in one for one in filled):
            parts = [(one, one[one.index("{") : one.index("}") + 1]) for one in filled]
            filled = [one.replace(name, quote(value, safe="")) for one, name in parts for value in ("toy", *NAMES)][
                :120
            ]
        for method, operation in methods.items():
            for place in filled:
                made.append((method, place, {}))
            bodies = BODIES if "requestBody" in operation else ()
            made += [(method, path.replace("{job}", "toy"), {"content": body}) for body in bodies]
            queries = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            first = filled[0]
            made += [(method, first, {"params": {name: value}}) for name in (*queries, "other") for value in NAMES]
    made += [("post", "/v1/jobs", {"json": {"toml": text}}) for text in TOMLS]
    made += [("post", "/v1/jobs", {"json": {"config": {"run": {"name": name}}}}) for name in NAMES if name]
    made += [
        ("post", "/v1/jobs", {"json": {"config": {"run": {"name": "toy"}}, "name": name}}) for name in NAMES if name
    ]
    made += [("post", "/v1/jobs", {"json": {"resume": name}}) for name in NAMES]
    return made


@pytest.mark.slow
def test_no_request_is_a_fault_of_the_gateway(tmp_path: Path) -> None:
    faults = []

    async def test(site: Running) -> None:
        await site.submit("toy")
        requests = await _requests(site)
        assert len(requests) > 1000
        for method, path, options in requests:
            if path.endswith("/events") and method == "get" and "params" not in options:
                continue  # it streams for as long as the run goes on
            async with site.client.stream(method.upper(), path, **options) as answer:
                if answer.status_code >= 500 and answer.status_code != 503:
                    faults.append((answer.status_code, method, path[:80], str(options)[:120]))

    run(tmp_path, test)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.slow
def test_odd_name_of_a_job_is_refused_with_its_key(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        for name in filter(None, NAMES):
            given = {"config": {"run": {"name": "toy"}}, "name": name}
            for key, body in (("name", given), ("run.name", {"config": {"run": {"name": name}}})):
                answer = await site.post("/v1/jobs", body)
                assert answer.status_code == 400, answer.text
                assert key in answer.json()["error"]["message"]

    run(tmp_path, test)


SECRETS = {
    "ftp://user:HUNTER2@127.0.0.1:1/x.txt": "ftp://…@127.0.0.1:1/x.txt",
    "https://HUNTER2@example.org/x": "https://…@example.org/x",
    "s3://b/x?X-Amz-Signature=HUNTER2&part=3": "s3://b/x?X-Amz-Signature=…&part=3",
    "https://e.org/x?part=1&access_token=HUNTER2": "https://e.org/x?part=1&access_token=…",
}


@pytest.mark.slow
@pytest.mark.parametrize("url", SECRETS)
def test_secret_of_a_url_leaves_the_site_nowhere(tmp_path: Path, url: str) -> None:
    """Answers, pages and streams show the address without the secret; the files that have it are private."""

    async def test(site: Running) -> None:
        config = {"run": {"name": "toy"}, "fabric": {"workers": 9}, "data": {"source": url}}
        config["sinks"] = [{"kind": "webhook", "url": "https://example.org/HUNTER2"}]
        await site.post("/v1/jobs", {"config": config})
        await site.until_open("toy")
        document = (await site.get("/v1/openapi.json")).json()
        shown = ""
        for path, methods in document["paths"].items():
            if "get" in methods and "events" not in path:
                shown += (await site.get(path.replace("{job}", "toy"))).text
        await site.post("/v1/jobs", {"config": {**config, "data": {"tokenizer": f"{url}/none"}}})
        async with site.client.stream("GET", "/v1/events") as stream:
            async for line in stream.aiter_lines():
                shown += line
                if "job_started" in line:
                    break
        assert "HUNTER2" not in shown
        assert json.dumps(SECRETS[url], ensure_ascii=False)[1:-1] in shown
        holding = [one for one in tmp_path.rglob("*") if one.is_file() and b"HUNTER2" in one.read_bytes()]
        assert {one.name for one in holding} >= {"site.jsonl", "job.toml"}
        assert [one.name for one in holding if stat.S_IMODE(one.stat().st_mode) & 0o077] == []

    run(tmp_path, test)
