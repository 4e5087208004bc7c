"""The table of numbers in the README: each row is what the command beside it printed.

    python bench/readme_numbers.py --list                   # the jobs, with their minutes on two quiet cores
    python bench/readme_numbers.py                          # all of them (about two hours), then the table
    python bench/readme_numbers.py --only default-run start # some of them
    python bench/readme_numbers.py --table                  # the table alone, from bench/results/readme.json

`make readme-numbers` runs all. A job's command runs in a process of its own; the measured text is read from the output
or the run folder. bench/results/readme.json keeps every row with its date, commit and machine, so that a row that was
not measured again says of which commit it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README, KEPT = ROOT / "README.md", ROOT / "bench" / "results" / "readme.json"
BEGIN, END = "<!-- numbers -->\n", "<!-- end of numbers -->\n"
FLOAT32_EVERY = 10  # steps between two synchronisations of the run that bytes are compared with


@dataclass(frozen=True)
class Job:
    """A command and the rows that its output gives.

    Attributes:
        command: as the README shows it; `planetary` and `python` are those of this environment.
        minutes: on two quiet cores.
        rows: quantity -> measured text, from the command's output and its folder.
        extra: arguments that the README does not show: folders.
        needs: libraries beside the tests' own.
        page: the page of details, from the README.
    """

    command: str
    minutes: float
    rows: Callable[[str, Path], Mapping[str, str]]
    extra: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    page: str = ""


class Failed(Exception):
    """A command ended with an error."""


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines of an output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def cells(text: str) -> list[list[str]]:
    """Return the cells of the lines of a table in Markdown, without its head's rule."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.match(r"^\|[-:| ]+\|$", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def default_run(_: str, folder: Path) -> Mapping[str, str]:
    """The main job with its baseline."""
    report = json.loads((folder / "run" / "report.json").read_text())
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    params = next(event["params"] for event in events if event["event"] == "run_started")
    workers, steps = max(line["workers"] for line in metrics), metrics[0]["inner_steps"]
    speed, quality, traffic = report["speed"], report["quality"], report["traffic"]
    moved = traffic["bytes_up"] + traffic["bytes_down"]
    often = speed["rounds"] * steps / FLOAT32_EVERY
    dense = workers * 2 * often * params * 4
    rounds = f"{speed['rounds']} rounds of {steps} steps"
    size = f"{params:,} parameters, {workers} workers, {rounds}, {speed['tokens']:,} tokens"
    return {
        f"the default run: {size}": f"{speed['seconds']:.0f} s, with nothing in the cache",
        "its held-out loss; a byte bigram model of the same text": (
            f"{quality['eval_loss']:.3f}; {quality['bigram_loss']:.3f} nats per byte"
        ),
        f"its bytes up and down, headers included; against the same model in float32 every {FLOAT32_EVERY} steps": (
            f"{moved / 1e6:.1f} MB; 1/{dense / moved:.0f}"
        ),
        "its first finished round after the start, with nothing in the cache": f"{speed['first_round_s']:.0f} s",
        "its held-out loss against the same tokens on one worker without DiLoCo, at the same rate": (
            f"{quality['gap_to_baseline']:+.2%}".replace("%", " %")
        ),
    }


def start(output: str, _: Path) -> Mapping[str, str]:
    """Starts of a small model."""
    found = {row[0]: row[1] for row in cells(output) if len(row) > 1}
    names = [name for name in found if not name.startswith("until")]
    return {
        f"a small model until the first new round has ended: {'; '.join(names)}": "; ".join(
            f"{found[name]} s" for name in names
        )
    }


def recovery(output: str, _: Path) -> Mapping[str, str]:
    """Kills of workers."""
    row = next(row for row in cells(output) if row[0] == "the lease is trained again")
    kills = re.search(r"(\d+) kills in (\d+) runs", output)
    assert kills is not None
    return {
        "`kill -9` of a worker until its lease is trained again": (
            f"median {row[1]} s, p95 {row[2]} s, worst {row[3]} s over {kills[1]} kills; every run finished"
        )
    }


def passed(quantity: str, text: str) -> Callable[[str, Path], Mapping[str, str]]:
    """Return a row for tests that pass."""

    def rows(output: str, _: Path) -> Mapping[str, str]:
        found = re.search(r"(\d+) passed", output)
        assert found is not None, "no test ran"
        assert "failed" not in output, "a test failed"
        return {quantity: f"{text} ({found[1]} {'test' if found[1] == '1' else 'tests'})"}

    return rows


def train_step(output: str, _: Path) -> Mapping[str, str]:
    """Our step against PyTorch and JAX."""
    rows = [row for row in cells(output) if len(row) > 10 and row[1] == "iree"]
    sizes = ", ".join(row[0] for row in rows)
    return {
        f"a training step ({sizes}), float32, against PyTorch eager (`jax.jit`); peak memory against PyTorch's": (
            f"{', '.join(row[8] for row in rows)} ({', '.join(row[6] for row in rows)}) of the time; "
            f"{', '.join(row[10] for row in rows)}"
        )
    }


def utilisation(output: str, _: Path, settings: str = "") -> Mapping[str, str]:
    """Shaped lines, of one preset, with the settings that the command adds to it."""
    measured = json_lines(output)
    lines = ", ".join(f"{line['mbit']:.0f}" for line in measured)
    (preset,) = {line["preset"] for line in measured}
    return {
        f"time of 4 workers in steps of pinned duration (they sleep), 80 ms, at {lines} Mbit/s, an eighth of 30.8 "
        f"million parameters on an eighth of the lines; `{preset}`{settings}": (
            ", ".join(f"{100 * line['utilisation']:.1f}" for line in measured) + " %"
        )
    }


def goodput(output: str, _: Path) -> Mapping[str, str]:
    """Workers that keep getting lost."""
    possible = 492  # tokens/s of 8 workers that never wait: 8 * 30 * 8 tokens in 3.9 s
    return {
        "tokens that count, simulated, each of 8 workers killed every 20 rounds: against the same run without kills, "
        f"and that run's own tokens of the {possible} a second that are possible": "; ".join(
            f"{one['way']} {100 * one['mean']:.0f} %, {100 * one['tokens_per_s'] / possible:.0f} %"
            for one in json_lines(output)
        )
    }


def serving(output: str, _: Path) -> Mapping[str, str]:
    """Served functions against llama.cpp."""
    measured: dict[str, list[str]] = {"of": [], "eight": []}
    sizes = re.findall(r"^(\S.*), one thread; numpy", output, re.MULTILINE)
    for name, value in ((row[0], row[1]) for row in cells(output) if len(row) == 2):
        if re.fullmatch(r"\S+: a token of one text, of llama\.cpp, .*", name):
            measured["of"].append(value)
        if re.fullmatch(r"\S+: tokens of eight texts, of one, in equal time", name):
            measured["eight"].append(value)
    return {
        f"a token of a served Llama ({', '.join(sizes)}; float32, bf16 each) against llama.cpp; eight texts at once "
        "against one": f"{', '.join(measured['of'])} of the time; {', '.join(measured['eight'])} times the tokens"
    }


def rewards(output: str, _: Path) -> Mapping[str, str]:
    """Three tasks with three seeds each."""
    found = json_lines(output)
    start_ = [one["start"][0] for one in found]
    end = [one["held_out"] for one in found]
    least, most = min(one["cpu_s"] for one in found), max(one["cpu_s"] for one in found)
    return {
        "reward of what a policy samples for held-out prompts of sort, reverse and add, 3 seeds each, fixed rounds": (
            f"from {min(start_):.2f} to {max(start_):.2f} after the imitation to {min(end):.2f} to {max(end):.2f} in "
            f"the last ten rounds; {least:.0f} to {most:.0f} processor seconds"
        )
    }


def sweep(output: str, _: Path) -> Mapping[str, str]:
    """Generated gradients."""
    found = re.search(r"(\d+) of (\d+) passed, (\d+) skipped", output)
    assert found is not None
    return {
        "generated differentiation cases against `jax.vjp`, 6 element types": (
            f"{int(found[1]):,} of {int(found[2]):,}; {found[3]} that JAX itself refuses"
        )
    }


def layers(output: str, _: Path) -> Mapping[str, str]:
    """Layers of the libraries of JAX."""
    rows = {row[0]: row for row in cells(output) if len(row) > 2 and row[1].isdigit() and row[0] != "all"}
    column = next(row for row in cells(output) if "equal" in row).index("equal")
    total, equal = (sum(int(row[at]) for row in rows.values()) for at in (1, column))
    return {f"layers of {', '.join(rows)}: gradients as the framework's own": f"{equal} of {total}"}


def torch_layers(output: str, _: Path) -> Mapping[str, str]:
    """Layers of PyTorch, in both modes."""
    head = next(row for row in cells(output) if row[0] == "mode")
    rows = [dict(zip(head, row, strict=True)) for row in cells(output) if row[0] in ("evaluation", "training")]
    assert len(rows) == 2, "one mode is missing"
    silent, without = (max(int(row[key]) for row in rows) for key in ("silently different", "error without a line"))
    least = min(rows, key=lambda row: int(row["equal"]))
    return {
        "layers of `torch.nn`: gradients as PyTorch's own, in evaluation and in training": (
            f"{least['equal']} of {least['layers']}, {least['refused with a line']} refused with the line, "
            f"{without} without one, {silent} silently different"
        )
    }


JOBS: Mapping[str, Job] = {
    "default-run": Job(
        "planetary train examples/stdlib.toml --full --baseline",
        9,
        default_run,
        ("--run-dir=FOLDER/run", "--cache=FOLDER/cache"),
    ),
    "start": Job("python bench/start.py", 1, start, page="bench/results/start.md"),
    "recovery": Job("python bench/recovery.py", 12, recovery),
    "plain-training": Job(
        "pytest tests/runs/rounds/test_plain_training.py",
        1,
        passed("one worker, outer rate 1, no momentum, against a plain loop", "equal, bit for bit"),
    ),
    "gradients": Job(
        "pytest tests/compiler tests/runtime",
        8,
        passed("gradients of exported models against `jax.grad`; a compiled step against optax AdamW", "within 1e-5"),
    ),
    "train-step": Job(
        "python bench/train_step.py --sizes main 3.2M 10M --contenders iree jax torch --no-write",
        6,
        train_step,
        needs=("torch",),
        page="bench/results/train_step.md",
    ),
    "utilisation": Job(
        "python bench/utilisation.py --slower 8 --mbit 50 200 1000 --presets eager-relay",
        4,
        utilisation,
        page="bench/results/shaped_links.md",
    ),
    "utilisation-streaming": Job(
        "python bench/utilisation.py --slower 8 --mbit 200 1000 --rounds 20 --presets streaming-diloco "
        """--set sync.delay=6 --set 'sync.compression="int4"' --set 'sync.broadcast_compression="int4"'""",
        5,
        lambda output, folder: utilisation(output, folder, settings=" with four bits both ways and a delay of 6 steps"),
    ),
    "goodput": Job("python bench/goodput.py", 4, goodput),
    "serving": Job(
        "python bench/serving_rates.py llama --sizes 25M,99M",
        20,
        serving,
        needs=("llama_cpp", "gguf", "torch", "transformers"),
        page="bench/results/serving.md",
    ),
    "rewards": Job(
        "python bench/rl.py --tasks sort reverse add --seeds 21 22 23 --lags --kill-every 0",
        25,
        rewards,
        ("--out=FOLDER/rl.jsonl",),
        page="bench/results/rl.md",
    ),
    "sweep": Job("python bench/differentiate_sweep.py --seed 1", 6, sweep),
    "layers": Job(
        "python bench/meaning_sweep.py", 4, layers, needs=("flax", "equinox", "optax"), page="bench/results/meaning.md"
    ),
    "torch-layers": Job(
        "python bench/meaning/torch_cases.py",
        8,
        torch_layers,
        needs=("torch", "torchax"),
        page="bench/results/meaning.md",
    ),
}


def machine() -> str:
    """Return the processor and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} shared cores, {model}"


def measure(job: Job) -> Mapping[str, str]:
    """Run a job's command; return its rows. Raises `Failed` where it ends with an error."""
    binaries = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="planetary-numbers-") as scratch:
        words = shlex.split(job.command) + [word.replace("FOLDER", scratch) for word in job.extra]
        words[0] = str(binaries / words[0])
        done = subprocess.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise Failed(f"ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        print(done.stdout, flush=True)
        rows = job.rows(done.stdout, Path(scratch))
        for measured in rows.values():
            assert re.search(r"^$|^[ ,;]|  |[,;] *$", measured) is None, f"a value is missing: {measured!r}"
        return rows


def table(kept: Mapping[str, list[dict[str, str]]]) -> str:
    """Return the README's table of the rows that are kept."""
    usual = Counter((row["date"], row["commit"], row["machine"]) for rows in kept.values() for row in rows)
    ((common, _),) = usual.most_common(1)
    lines = [
        f"{common[2]}, {common[0]}, commit {common[1]}, where a row says nothing else; by `make readme-numbers`.",
        "",
        "| quantity | measured | with |",
        "|---|---|---|",
    ]
    for name in JOBS:
        for number, row in enumerate(kept.get(name, [])):
            other = [
                row[key]
                for key, value in zip(("machine", "date", "commit"), (common[2], common[0], common[1]), strict=True)
                if row[key] != value
            ]
            note = f" ({', '.join(other)})" if other else ""
            page = JOBS[name].page
            command = "same" if number else f"`{row['command']}`" + (f", [details]({page})" if page else "")
            lines.append(f"| {row['quantity']}{note} | {row['measured']} | {command} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, kept: Mapping[str, list[dict[str, str]]]) -> str:
    """Return the README's text with the current table in it."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(kept) + END + rest.partition(END)[2]


def load() -> dict[str, list[dict[str, str]]]:
    """Return the rows of every job that was measured."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--table", action="store_true", help="write the table from the rows that are kept")
    args = parser.parse_args()
    if args.list:
        for name, job in JOBS.items():
            print(
                f"{name:15} {job.minutes:4.0f} min  {job.command}"
                + (f"  (needs {', '.join(job.needs)})" if job.needs else "")
            )
        return
    kept = load()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    failures: list[str] = []
    facts = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": machine()}
    for name in [] if args.table else args.only:
        print(f"{name}: {JOBS[name].command}", flush=True)
        try:
            rows = measure(JOBS[name])
        except (Failed, AssertionError, StopIteration) as error:  # the other rows are measured all the same
            failures.append(f"{name}: {error!r}" if not isinstance(error, Failed) else f"{name}: {error}")
            print(f"  failed: {failures[-1]}", flush=True)
            continue
        kept[name] = [
            {"quantity": key, "measured": value, "command": JOBS[name].command, **facts} for key, value in rows.items()
        ]
        for key, value in rows.items():
            print(f"  {key}: {value}", flush=True)
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    README.write_text(with_table(README.read_text(), kept))
    if failures:
        raise SystemExit(f"{len(failures)} of {len(args.only)} jobs failed; their rows are the older ones")


if __name__ == "__main__":
    main()
