"""The tour and the architecture page name places that exist, and their numbers are true."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from policy_cluster import PolicyCluster
from small_policy import small_policy
from small_training import small_training

import planetary
from planetary.compiler.frontend.export import load_model
from planetary.compiler.step.train_step import build_train_step
from planetary.core.config import load_config
from planetary.core.configuration.presets import PRESETS
from planetary.core.configuration.step_options import StepOptions
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from served_completion import complete

ROOT = Path(__file__).parents[1]
PACKAGE = Path(planetary.__file__).parent
PAGE = (ROOT / "docs" / "tour.md").read_text()
PLACE = re.compile(r"`([a-z_0-9/]+\.py):([A-Za-z_0-9.]+)`")
ROW = re.compile(r"^\| `([a-z_0-9/]+\.py)` \| (\d+) \|", re.MULTILINE)
ROW_OF_SUB_PACKAGE = re.compile(r"^\| `([a-z/]+)/([a-z]+)` \|", re.MULTILINE)
# Files that a journey enters at most: lower these when a hop is removed. Key: the journey's number.
MOST_FILES = {"1": 18, "2": 19, "3": 15, "4": 23, "5": 26, "6": 18, "7": 18}
CONNECTION = slice(8, 15)  # hops of journey 2 that every message of the journeys after it takes, too

PRODUCT = """
func.func @main(%w: tensor<4xf32>, %x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %made = stablehlo.multiply %w, %x : tensor<4xf32>
  %error = stablehlo.subtract %made, %y : tensor<4xf32>
  %loss = stablehlo.reduce(%error init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  return %loss : tensor<f32>
}
"""


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def hops_of(journey: str) -> str:
    """The numbered lines of a journey."""
    return "\n".join(line for line in journey.splitlines() if re.match(r"\d+\. `", line))


@pytest.mark.parametrize("place", sorted(set(PLACE.findall(PAGE))), ids=":".join)
def test_every_place_of_the_tour_exists(place: tuple[str, str]) -> None:
    file, name = place
    assert (PACKAGE / file).is_file()
    assert name in names_in(PACKAGE / file)


def test_there_are_seven_journeys_and_every_hop_names_a_place() -> None:
    journeys = PAGE.split("\n## ")[2:]
    assert [journey[:2] for journey in journeys] == ["1.", "2.", "3.", "4.", "5.", "6.", "7."]
    for journey in journeys:
        hops = re.findall(r"^(\d+)\. (.*)$", journey.partition("\n")[2], re.MULTILINE)
        assert [int(number) for number, _ in hops] == list(range(1, len(hops) + 1))
        assert len(hops) > 5
        assert all(PLACE.match(text) for _, text in hops)


def test_every_message_event_and_record_of_the_tour_exists() -> None:
    quoted = [code for code in re.findall(r"`([^`\n]+)`", PAGE) if "/" not in code]
    named = {name for code in quoted for name in re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", code)}
    classes = {
        name for path in PACKAGE.rglob("*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {"TrainResult", "OfferSketches"} <= named
    assert named <= classes, f"docs/tour.md: no such classes: {sorted(named - classes)}"


def test_hops_and_files_of_a_journey_are_counted_and_do_not_grow() -> None:
    files = {journey[0]: [file for file, _ in PLACE.findall(hops_of(journey))] for journey in PAGE.split("\n## ")[2:]}
    for journey in PAGE.split("\n## ")[2:]:
        entered = files[journey[0]]
        text, count = " ".join(journey.split()), len(set(entered))
        assert f"{len(entered)} hops, {count} files" in text
        if "files with those of the connection" in text:
            count = len({*entered, *files["2"][CONNECTION]})
            assert f"; {count} files with those of the connection." in text
        assert count <= MOST_FILES[journey[0]]


def called_during(run: Callable[[], object], *, in_threads: bool = False) -> set[tuple[str, str]]:
    """File and qualified name of every function of the package that `run` calls, and the class of every method.

    `in_threads`: those called in threads that it starts, too.
    """
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.getprofile()
    threading.setprofile(note if in_threads else None)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    named = {(Path(file).relative_to(PACKAGE).as_posix(), name) for file, name in found}
    return named | {(file, name.partition(".")[0]) for file, name in named}


def test_a_gradient_passes_every_hop_of_its_journey(tmp_path: Path) -> None:
    (tmp_path / "product.mlir").write_text(PRODUCT)
    model = load_model(tmp_path / "product.mlir")
    hops = PLACE.findall(hops_of(PAGE.split("\n## ")[2]))
    called = called_during(lambda: build_train_step(model, StepOptions()))
    assert [hop for hop in hops if hop not in called] == []


def test_a_result_passes_every_hop_of_its_journey() -> None:
    """With the codecs of the default run, one bit up and relayed down, in the simulator."""
    default = [key for key in PRESETS["rda-relay"].overrides(2) if not key.startswith("train.inner_steps")]
    cluster = SimCluster(1, small_training(workers=2, rounds=3, given=default), 2)
    hops = PLACE.findall(hops_of(PAGE.split("\n## ")[3]))
    called = called_during(lambda: cluster.run(2000.0), in_threads=True)
    assert [hop for hop in hops if hop not in called] == []


def test_the_default_run_takes_the_path_of_the_second_journey() -> None:
    default, journey = load_config(ROOT / "examples" / "stdlib.toml"), PRESETS["rda-relay"].settings
    assert journey["sync.compression"] == default.sync.compression
    assert journey["sync.broadcast_compression"] == default.sync.broadcast_compression
    assert journey["outer.merge"] == default.outer.merge


def test_a_completion_passes_every_hop_of_its_journey(tmp_path: Path) -> None:
    """On real connections and a real HTTP port, with a known function in place of the compiled ones."""
    answers = []
    request = {"prompt": "12", "max_tokens": 4, "temperature": 0}
    hops = PLACE.findall(hops_of(PAGE.split("\n## ")[7]))
    called = called_during(lambda: answers.append(complete(tmp_path, request)), in_threads=True)
    assert answers[0]["usage"]["completion_tokens"] == 4
    assert [hop for hop in hops if hop not in called] == []


def test_a_rollout_passes_every_hop_of_its_journey() -> None:
    """In the simulator; every rollout is computed again, and nothing is imitated."""
    cluster = PolicyCluster(0, small_policy(rounds=3, verified=1.0, imitated=0), 2)
    hops = PLACE.findall(hops_of(PAGE.split("\n## ")[8]))
    called = called_during(lambda: cluster.run(2000.0), in_threads=True)
    assert [hop for hop in hops if hop not in called] == []


def test_a_killed_worker_passes_every_hop_of_its_journey() -> None:
    """In the simulator, which has processes of its own in place of `fleet/shell/child.py`."""
    kill = Fault(at_s=5.0, kind="kill_worker", worker=1)
    cluster = SimCluster(1, small_training(workers=3, checkpoint_every=1, rounds=3), 3, [kill])
    hops = PLACE.findall(hops_of(PAGE.split("\n## ")[6]))
    called = called_during(lambda: cluster.run(2000.0))
    assert cluster.struck == ["kill_worker"]
    assert [hop for hop in hops if hop not in called] == [("fleet/shell/child.py", "Child.wait")]


def test_architecture_page_lists_sub_packages_in_contract_order() -> None:
    """The architecture page has the sub packages in the order of the contracts."""
    rows = ROW_OF_SUB_PACKAGE.findall((ROOT / "docs" / "architecture.md").read_text())
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.removeprefix("planetary."): c["layers"] for c in contracts for name in c.get("containers", ())}
    inner = [path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/*/**/__init__.py")]
    assert {str(path.parent) for path in inner} >= {"fleet", "runs", "runs/rounds"}
    for package in sorted({path.parent for path in inner if not path.parent.is_relative_to("compiler/autodiff")}):
        if str(package) in {"cli", "compat", "cli/commands"}:
            continue
        described = [name for row, name in rows if row == str(package)]
        assert sorted(described) == sorted(path.name for path in inner if path.parent == package)
        here = layers[".".join(package.parts)]
        height = {name: i for i, layer in enumerate(here) for name in re.split(r"\s*[|:]\s*", layer)}
        assert [height[name] for name in described] == sorted(height[name] for name in described), package


def test_reading_order_has_the_gateway_and_an_executed_step() -> None:
    rows = ROW.findall(PAGE)
    assert rows[0][0] == "run/train.py"
    assert {"fleet/gateway/gateway.py", "runs/rounds/gateway/gateway.py"} <= {file for file, _ in rows}
    lines = {file: len((PACKAGE / file).read_text().splitlines()) for file, _ in rows}
    wrong = {file: lines[file] for file, said in rows if abs(lines[file] - int(said)) > 15}
    assert not wrong, f"docs/tour.md: these files have other numbers of lines: {wrong}"
    on_page = re.search(r"It is ([\d,]+) lines in all", PAGE)
    in_readme = re.search(r"one order of ([\d,]+) lines", (ROOT / "README.md").read_text())
    for total in (on_page, in_readme):
        assert total is not None
        assert abs(sum(lines.values()) - int(total[1].replace(",", ""))) <= 100
    said = re.search(r"`runs/rounds/worker/compute.py:inner_steps`: `([^`]+)`", PAGE)
    assert said is not None
    assert said[1] in (PACKAGE / "runs/rounds/worker/compute.py").read_text()
    assert "runs/rounds/worker/compute.py" in lines


def test_example_survives_kills_and_recomputes_the_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The example kills a worker and the gateway and computes the parameters again."""
    runpy.run_path(str(ROOT / "examples" / "tour.py"), run_name="__main__")
    told = capsys.readouterr().out
    events = [line.split()[2] for line in told.splitlines() if " s  " in line]
    assert events[0] == "run_started"
    assert events[-1] == "run_finished"
    assert {"worker_lost", "lease_returned", "run_resumed"} <= set(events)
    assert "faults that hit: kill_worker, kill_gateway" in told
    assert "equal in every bit after 4 rounds" in told
