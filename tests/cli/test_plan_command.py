"""`planetary plan`: links by flags or as `planetary doctor` measured them, and numbers that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from planetary.cli.main import main
from planetary.run.doctor.findings import Measurements

SIZE = ["plan", "--params=1e8", "--workers=4", "--step-time=130ms"]


@pytest.fixture
def links(tmp_path: Path) -> Path:
    path = tmp_path / "links.json"
    found = Measurements(rtt_s=0.08, up=1e6, down=20e6, peers=4, ring_rate=5e6, ring_rtt_s=0.02)
    path.write_bytes(msgspec.json.encode(found))
    return path


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert main([*SIZE, *arguments, "--json"]) == 0
    return {one["preset"]: one for one in json.loads(capsys.readouterr().out)["presets"]}


def test_a_measured_link_counts_each_way(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([f"--measured={links}", "--gateway-bandwidth=10Gbit"], capsys)
    star, ring = found["diloco"], found["eager-diloco"]
    assert star["wait_s"] == pytest.approx(star["up"] / 1e6 + star["down"] / 20e6 + 2 * 0.08)
    assert star["bits_up"] == star["bits_down"] == 32
    assert found["diloco-int4"]["bits_up"] == pytest.approx(4.03, abs=0.01)
    assert ring["wait_s"] > 0
    slower = planned([f"--measured={links}", "--bandwidth=1Mbit", "--gateway-bandwidth=10Gbit"], capsys)
    assert slower["diloco"]["wait_s"] > 10 * star["wait_s"]  # flags win


def test_recommendation_has_steps_fragments_bits_loss_and_cost(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZE, f"--measured={links}", "--price=2"]) == 0
    shown = capsys.readouterr().out
    recommended = shown[shown.index("recommended:") :]
    for text in (
        "train.inner_steps",
        "fragment",
        "bits a number up",
        "published loss against",
        "measured here",
        "192.00 a day",
        "wait",
    ):
        assert text in recommended, recommended
    assert "sync.md" in recommended


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--bandwidth is missing"),
        (["--measured=no-such-file"], "is no file of `planetary doctor --save`"),
        (["--bandwidth=100Mbit", "--workers=0"], "workers: expected a number from 1"),
        (["--bandwidth=100Mbit", "--params=1.5"], "expected whole numbers of params and workers"),
        (["--bandwidth=100Mbit", "--params=nan"], "params: expected a number"),
        (["--bandwidth=100Mbit", "--rtt=90s"], "rtt (s): expected a number from 0 to 60"),
        (["--bandwidth=100Mbit", "--inner-steps=-1"], "inner steps: expected a number from 1 on"),
        (["--bandwidth=100Mbit", "--price=-1"], "price: expected a number"),
        (["--bandwidth=100Mbps"], "--bandwidth expects a rate"),
    ],
)
def test_impossible_numbers_are_refused_by_name(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SIZE, *arguments]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_measurements_without_a_link_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(Measurements(memory=1 << 30)))
    assert main([*SIZE, f"--measured={path}"]) == 2
    assert "has no measured link" in " ".join(capsys.readouterr().err.split())
