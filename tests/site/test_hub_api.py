"""A hub and gateways with links of their own, on loopback, with toy jobs: the control API, and input that cannot be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from site_support import Running, running, toy_kinds  # noqa: F401

from planetary.cli.main import main
from planetary.core.clock import SystemClock
from planetary.core.errors import UserError
from planetary.fleet.gateway.gateway import Security
from planetary.fleet.shell.shell import Address
from planetary.net.authority import Authority
from planetary.net.identity import Identity
from planetary.site.config import Controllers, SitePolicy
from planetary.site.placement.hub_link import HubLinkOptions
from planetary.site.placement.placed_jobs import PlacementState
from planetary.site.placement.status import PLACED_STATES, HubSiteStatus, PlacedJobStatus
from planetary.site.submission import config_of_tables

pytestmark = pytest.mark.usefixtures("toy_kinds")

# An offer that a busy machine does not answer within the patience goes to the next site, which is another history.
PATIENCE_S = 3.0
POLICIES = (
    SitePolicy(name="paris", patience_s=PATIENCE_S),
    SitePolicy(name="tokyo", patience_s=PATIENCE_S, data_sets=("notes",)),
    SitePolicy(name="lab", roles=("server",)),
)
PATH = "/v1/federation/jobs"


class Federation:
    """A hub and its sites; a site has one worker that answers."""

    def __init__(self, folder: Path, hub: Running) -> None:
        self.folder, self.hub = folder, hub

    @contextlib.asynccontextmanager
    async def site(
        self, name: str, *, port: int = 0, address: Address | None = None, **more: Any
    ) -> AsyncIterator[Running]:
        address = address or Address("127.0.0.1", port or self.hub.site.port, "")
        link = HubLinkOptions(address=address, name=name)
        (self.folder / name).mkdir(exist_ok=True)
        async with running(self.folder / name, name=name, link=link, **more) as found:
            found.join(f"{name}/0", answers=True)
            yield found

    async def submit(self, name: str, workers: int = 99, **more: Any) -> Any:
        config = {"run": {"name": name}, "fabric": {"workers": workers}, **more.pop("config", {})}
        return await self.hub.post(PATH, {"config": config, **more})

    async def job(self, name: str) -> dict[str, Any]:
        return (await self.hub.get(f"{PATH}/{name}")).json()

    async def until(self, name: str, **expected: Any) -> dict[str, Any]:
        async def holds() -> bool:
            found = await self.job(name)
            return all(found[key] == value for key, value in expected.items())

        try:
            await self.hub.until(holds)
        except TimeoutError:
            raise AssertionError(f"expected {expected}, found {await self.job(name)}") from None
        return await self.job(name)

    async def until_here(self, *names: str) -> None:
        async def holds() -> bool:
            sites = (await self.hub.get("/v1/federation/sites")).json()["sites"]
            return {one["name"] for one in sites if one["connected"] and one["workers"]} >= set(names)

        await self.hub.until(holds)


def run(folder: Path, test: Callable[[Federation], Awaitable[None]], **more: Any) -> None:
    async def whole() -> None:
        (folder / "hub").mkdir(exist_ok=True)
        async with (
            asyncio.timeout(60),
            running(folder / "hub", Controllers(), name="hub", policies=POLICIES, **more) as hub,
        ):
            await test(Federation(folder, hub))

    asyncio.run(whole())


async def line_is_counted(found: Federation) -> bool:
    sites = (await found.hub.get("/v1/federation/sites")).json()["sites"]
    return sites[0]["gb_today"] > 0 == sites[1]["gb_today"]


@pytest.mark.slow
def test_jobs_are_managed_over_the_api_of_the_hub(tmp_path: Path) -> None:
    """Jobs are placed listed shown and cancelled over the API of the hub."""

    async def test(found: Federation) -> None:
        async with found.site("paris") as paris:
            await found.until_here("paris")
            answer = await found.submit("toy")
            assert answer.status_code == 202, answer.text
            job = await found.until("toy", state="placed", site="paris", state_there="running")
            assert job["why"] == "it is the only site that can take it now"
            assert (await paris.job(job["name_there"]))["by"].startswith("the hub hub-")
            await found.submit("toy")
            waiting = await found.until("toy-2", state="waiting")
            assert "paris: its controller training has 1 jobs and runs 1 at once" in waiting["why"]
            page = (await found.hub.get("/status.json")).json()
            assert [(one["job_id"], one["site"]) for one in page["jobs"]] == [("toy", "paris"), ("toy-2", "")]
            assert page["sites"][0]["jobs"] == ["toy"]
            listed = (await found.hub.get(f"{PATH}?state=waiting")).json()["jobs"]
            assert [msgspec.convert(one, PlacedJobStatus).job_id for one in listed] == ["toy-2"]
            sites = (await found.hub.get("/v1/federation/sites")).json()["sites"]
            assert [msgspec.convert(one, HubSiteStatus).connected for one in sites] == [True, False, False]
            await found.hub.until(lambda: line_is_counted(found))

            cancelled = await found.hub.post(f"{PATH}/toy/cancel", {"reason": "enough"})
            assert cancelled.status_code == 202
            await found.until("toy", state="cancelled", reason="enough", state_there="cancelled")
            assert (await paris.job("toy"))["state"] == "cancelled"
            await found.until("toy-2", state="placed", site="paris")
            assert (await found.hub.post(f"{PATH}/toy/cancel")).status_code == 409
            status = (await paris.get("/v1/federation/status")).json()
            assert (status["enabled"], status["link"]["connected"], status["link"]["site"]) == (True, True, "paris")
            assert status["link"]["hub"] == page["hub"]

    run(tmp_path, test)


def test_a_job_ends_at_its_site_and_at_the_hub(tmp_path: Path) -> None:
    async def test(found: Federation) -> None:
        async with found.site("paris"):
            await found.until_here("paris")
            await found.submit("toy", workers=1)
            ended = await found.until("toy", state="finished")
            assert ended["reason"] == "all have answered"
            assert ended["ended_at"] >= ended["placed_at"] >= ended["submitted_at"] > 0

    run(tmp_path, test)


@pytest.mark.slow
def test_lost_sites_job_is_placed_elsewhere_and_cancelled(tmp_path: Path) -> None:
    """A site that is lost has its job placed elsewhere and cancels it when it is back."""

    async def test(found: Federation) -> None:
        async with found.site("tokyo") as tokyo:
            async with found.site("paris"):
                await found.until_here("paris", "tokyo")
                await found.submit("toy", needs={"workers": 0})
                await found.until("toy", state="placed", site="paris")
            moved = await found.until("toy", state="placed", site="tokyo")
            assert (moved["attempt"], moved["strays"]) == (2, {"paris": "away"})
            async with found.site("paris") as back:
                await found.until("toy", strays={})
                assert (await back.job("toy"))["state"] == "cancelled"
                assert (await tokyo.job("toy"))["state"] == "running"
                assert (await found.job("toy"))["site"] == "tokyo"

    run(tmp_path, test)


@pytest.mark.slow
def test_site_goes_on_with_its_run_of_a_repeated_job(tmp_path: Path) -> None:
    async def test(found: Federation) -> None:
        async with found.site("paris"):
            await found.until_here("paris")
            await found.submit("toy", needs={"workers": 0})
            await found.until("toy", state="placed", site="paris")
        async with found.site("tokyo"):
            await found.until("toy", state="placed", site="tokyo", attempt=2)
            async with found.site("paris"):
                await found.until("toy", strays={})
        async with found.site("paris") as back:
            placed = await found.until("toy", state="placed", site="paris", attempt=3)
            again = back.site.book.jobs[placed["name_there"]]
            assert (again.job, Path(again.folder).name, again.resume) == ("toy.2", "toy", True)

    run(tmp_path, test)


@pytest.mark.slow
def test_sites_name_is_its_machines_until_forgiven(tmp_path: Path) -> None:
    """A site's name belongs to the machine that joined with it until it is forgiven."""
    now = SystemClock().wall()
    security = Security.by(Authority.open(tmp_path / "authority", now))
    assert security.invites is not None
    tokens = {node: security.invites.issue(now, expires=0.0, node=node) for node in ("", "tokyo")}

    def address(hub: Running, machine: str, node: str = "") -> Address:
        identity = Identity.open(tmp_path / f"{machine}.key")
        return Address("127.0.0.1", hub.site.port, tokens[node], identity=identity)

    async def link_of(site: Running) -> dict[str, Any]:
        async def settled() -> bool:
            found = (await site.get("/v1/federation/status")).json()["link"]
            return bool(found["connected"] or found["refused"])

        await site.until(settled)
        return (await site.get("/v1/federation/status")).json()["link"]

    async def first(found: Federation) -> None:
        async with found.site("paris", address=address(found.hub, "a")) as paris:
            assert (await link_of(paris))["connected"]
        async with found.site("paris", address=address(found.hub, "b")) as paris:
            assert "the name paris belongs to the machine with the key" in (await link_of(paris))["refused"]
        async with found.site("paris", address=address(found.hub, "a", "tokyo")) as paris:
            assert "is for node tokyo, not for paris" in (await link_of(paris))["refused"]

    async def later(found: Federation) -> None:
        async with found.site("paris", address=address(found.hub, "b")) as paris:
            assert (await link_of(paris))["connected"]

    run(tmp_path, first, security=security)
    run(tmp_path, later, security=security, forgive=("paris",))


def test_sites_data_set_is_read_by_name_under_its_policy(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("a b c")

    async def test(found: Federation) -> None:
        sets = {"notes": str(text), "secret": str(text)}
        async with found.site("tokyo", data_sets=sets) as tokyo:
            await found.until_here("tokyo")
            await found.submit("hidden", config={"data": {"source": "site://secret"}})
            hidden = await found.until("hidden", state="waiting")
            assert "tokyo: its policy does not let it read the data set secret (data_sets: notes)" in hidden["why"]
            await found.submit("seen", config={"data": {"source": "site://notes"}})
            await found.until("seen", state="placed", site="tokyo")
            assert f'source = "{text}"' in tokyo.site.book.jobs["seen"].config

    run(tmp_path, test)
    with pytest.raises(UserError, match="this site has no data set 'other'"):
        config_of_tables({"data": {"source": "site://other"}}, (), {"notes": str(text)})


def test_submission_for_no_site_is_refused_with_reasons(tmp_path: Path) -> None:
    async def test(found: Federation) -> None:
        for body, words in (
            ({"config": {"run": {"name": "toy"}}, "needs": {"site": "lab"}}, "gives it no trainer (roles: server)"),
            ({"config": {"run": {"name": "toy"}}, "needs": {"site": "rome"}}, "this hub has no site 'rome'"),
            ({"config": {"run": {"nme": "toy"}}}, "unknown key run.nme; did you mean run.name?"),
            ({"config": {"federation": {"sites": [{"name": "a"}]}}}, "this hub has no site 'a'"),
            ({"config": {}, "needs": {"sites": 0}}, ">= 1"),
            ({"config": {}, "needs": {"sites": 3}}, "fewer than 3 sites may take a part of a job of the kind 'rounds'"),
            ({"config": {}, "needs": {"sites": 2, "site": "paris"}}, "fewer than 2 sites may take a part"),
            ({"config": {"run": {"name": "toy"}}, "needs": {"sites": 2}}, "a job over several sites is a training"),
            ({"config": {"data": {"max_epochs": 1}}, "needs": {"sites": 2}}, "data.max_epochs: the hub's train.rounds"),
            ({"config": {"data": {"source": "site://x"}}, "needs": {"sites": 2}}, "a run at the hub, too: site://x"),
            (
                {"config": {"federation": {"sites": [{"name": "paris"}, {"name": "tokyo"}]}}, "needs": {"sites": 3}},
                "names 2; give one",
            ),
            ({"config": {}, "toml": ""}, "one of the two"),
            ({"toml": "=", "needs": {}}, "the text is not valid TOML"),
            ({"config": {}, "needs": {"wrkers": 1}}, "wrkers"),
            ({"config": {}, "needs": {"workers": -1}}, ">= 0"),
            ({"config": {}, "name": "../x"}, "the name of one folder"),
        ):
            answer = await found.hub.post(PATH, body)
            assert answer.status_code == 400, (body, answer.text)
            assert words in answer.json()["error"]["message"], answer.text
        assert (await found.hub.get(f"{PATH}/none")).status_code == 404
        assert (await found.hub.post("/v1/dancing/jobs", {})).status_code == 404
        assert (await found.hub.get(PATH)).json() == {"jobs": []}

    run(tmp_path, test)


def test_refused_configuration_fails_and_the_next_job_runs(tmp_path: Path) -> None:
    """A configuration that the site refuses fails with its reason and the next job goes on."""

    async def test(found: Federation) -> None:
        async with found.site("paris"):
            await found.until_here("paris")
            await found.submit(
                "mixed", config={"moe": {"composers": 2}}, needs={"site": "paris"}
            )  # of a model without experts
            failed = await found.until("mixed", state="failed")
            assert failed["reason"].startswith("no site takes it: paris: a run with moe.composers trains"), failed
            await found.submit("toy", workers=1)
            await found.until("toy", state="finished")

    run(tmp_path, test)


def test_unknown_gateway_and_false_upstream_are_refused(tmp_path: Path) -> None:
    """A gateway that no hub knows and one whose upstream is no hub are refused and go on."""

    async def test(found: Federation) -> None:
        async def refused(site: Running, words: str) -> None:
            async def holds() -> bool:
                link = (await site.get("/v1/federation/status")).json()["link"]
                return words in link["refused"]

            await site.until(holds)
            await site.submit(workers=1)
            await site.until_state("toy", "finished")

        async with found.site("rome") as rome:
            await refused(rome, "knows no site named rome; its federation.sites has paris, tokyo, lab")
            async with found.site("paris", port=rome.site.port) as paris:
                await refused(paris, "rome is a gateway without sites")

    run(tmp_path, test)


def test_prometheus_reads_the_hubs_jobs_by_state_and_site(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install -e '.[prometheus]'")
    assert [*PLACED_STATES] == [state.value for state in PlacementState]

    async def test(found: Federation) -> None:
        await found.submit("first")
        async with found.site("paris"):
            await found.until("first", state="placed", site="paris", state_there="running")
            await found.submit("second", needs={"site": "tokyo"})
            await found.until("second", state="waiting")
            for path in ("/metrics", "/v1/metrics?format=prometheus"):
                text = (await found.hub.get(path)).text
                values = {
                    (
                        sample.name,
                        *(value for key, value in sorted(sample.labels.items()) if key != "run"),
                    ): sample.value
                    for family in parser.text_string_to_metric_families(text)
                    for sample in family.samples
                    if sample.name.startswith("planetary_hub_")
                }
                by_state = {key[1]: value for key, value in values.items() if key[0] == "planetary_hub_jobs"}
                assert by_state == {**dict.fromkeys(PLACED_STATES, 0), "placed": 1, "waiting": 1}
                at_sites = {key[1:]: value for key, value in values.items() if key[0] == "planetary_hub_site_jobs"}
                assert {key for key, value in at_sites.items() if value} == {("paris", "running")}
                assert len(at_sites) == len(POLICIES) * 4
                assert values["planetary_hub_site_connected", "paris"] == 1
                assert values["planetary_hub_site_connected", "tokyo"] == 0
                assert values["planetary_hub_site_line_bytes", "paris"] > 0

    run(tmp_path, test)


@pytest.mark.slow
def test_a_site_with_jobs_of_one_hub_takes_none_of_another(tmp_path: Path) -> None:
    async def test(found: Federation) -> None:
        async with found.site("paris") as paris:
            await found.until_here("paris")
            await found.submit("toy")
            await found.until("toy", state="placed")
            first = paris.site.placed
            assert first is not None
        (tmp_path / "second").mkdir()
        async with (
            running(tmp_path / "second", Controllers(), name="second", policies=POLICIES) as second,
            found.site("paris", port=second.site.port) as paris,
        ):

            async def refused() -> bool:
                return bool((await paris.get("/v1/federation/status")).json()["link"]["refused"])

            await paris.until(refused)
            why = (await paris.get("/v1/federation/status")).json()["link"]["refused"]
            assert "this gateway has jobs of the hub hub-" in why
            assert "(toy), and the hub at this address is second-" in why
            assert (await paris.job("toy"))["state"] == "running"
            await paris.post("/v1/jobs/toy/cancel")

            async def taken() -> bool:
                link = (await paris.get("/v1/federation/status")).json()["link"]
                return link["connected"] and link["hub"].startswith("second-") and not link["refused"]

            await paris.until(taken)

    run(tmp_path, test)


def test_commands_know_a_hub_from_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "toy.toml").write_text('[run]\nname = "toy"\n[fabric]\nworkers = 1\n')
    (tmp_path / "token").write_text("admin-of-the-test")

    async def test(found: Federation) -> None:
        async def command(*arguments: str) -> tuple[int, str]:
            flags = [f"--gateway={found.hub.url}", f"--token-file={tmp_path / 'token'}"]
            code = await asyncio.to_thread(main, [*arguments, *flags])
            shown = capsys.readouterr()
            return code, shown.out + shown.err

        submit = ("jobs", "submit", str(tmp_path / "toy.toml"))
        code, shown = await command(*submit, "--needs=site=paris")
        assert (code, "state       waiting" in shown) == (0, True)
        async with found.site("paris"):
            await found.until("toy", state="finished")
        code, shown = await command("jobs", "list")
        assert "finished  paris" in shown
        code, shown = await command("status")
        assert "places jobs on sites" in shown
        assert "roles server, patience 120 s" in shown
        code, shown = await command("jobs", "cancel", "toy")
        assert code != 0
        assert "it is finished" in shown
        code, shown = await command(*submit, "--send-files")
        assert "a hub takes a FILE" in shown

    run(tmp_path, test)
