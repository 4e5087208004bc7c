"""Whether every layer of JAX's libraries keeps its gradient: a table for bench/results/meaning.md.

    python bench/meaning_sweep.py [--only NAME] [--write bench/results/meaning.md]

The table of cases is bench/meaning/jax_cases.py (torch_cases.py beside it has a sweep of its own). Its `cases()` yields
(library, name, case), and a case is a function that returns (loss, params, batch) as a model's builder does, or a
sentence that says why the name is no layer. A layer is *equal* if loss and gradients are the framework's within 1e-3 of
the largest element, *refused* if an error names a line, and *silent* if its gradient differs and the comparison at the
import accepts it.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """What became of a layer: equal, refused, caught (at the import), unclear, silent, or no layer."""

    library: str
    name: str
    kind: str
    why: str = ""


def judge(library: str, name: str, case: Any) -> Outcome:
    """Export a layer and compare it with its framework."""
    from planetary.compiler.autodiff.differentiate import value_and_gradients
    from planetary.compiler.check.meaning import check_meaning
    from planetary.compiler.check.reference import run_reference
    from planetary.compiler.frontend.export import export_loss
    from planetary.core.errors import CompileError, UserError

    if isinstance(case, str):
        return Outcome(library, name, "no layer", case)
    try:
        loss, params, batch = case()
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        return Outcome(library, name, "unclear", f"cannot be made: {type(error).__name__}: {error}")
    try:
        model = export_loss(loss, params, batch, name=name)
        trained = [i for i, a in enumerate(model.manifest.arguments) if a.role == "param"]
        text = value_and_gradients(model.stablehlo, trained)
    except (CompileError, UserError) as error:
        named = re.search(r"\.py, line \d+|\.py:\d+", str(error)) is not None
        return Outcome(library, name, "refused" if named else "unclear", str(error).replace("\n", " ")[:300])
    values = {a.name: v for a, v in zip(model.manifest.arguments, _values(model, batch), strict=True)}
    assert model.author is not None
    held = {a.name: values[a.name] for a in model.manifest.arguments if a.role in ("param", "buffer", "statistic")}
    value, wanted = model.author.loss_and_gradients(held, batch)
    names = [model.manifest.arguments[i].name for i in trained]
    found = run_reference(text, "main", list(values.values()), ["f32"] * (1 + len(names)))
    largest = max(
        (float(np.abs(np.nan_to_num(one)).max(initial=0)) for one in wanted.values() if one is not None), default=0
    )
    wrong = [] if _close(found[0], np.float32(value)) else ["the loss"]
    wrong += [
        n for n, one in zip(names, found[1:], strict=True) if not _close(one, _or_zeros(wanted[n], one), 1e-3 * largest)
    ]
    try:
        check_meaning(model)
        caught = ""
    except CompileError as error:
        caught = str(error)
    if not wrong and not caught:
        return Outcome(library, name, "equal")
    return Outcome(library, name, "caught" if caught else "silent", caught[:300] or ", ".join(wrong))


def _values(model: Any, batch: Any) -> list[np.ndarray]:
    held = model.start | model.initial("buffer")
    rest = iter(batch)
    return [held[a.name] if a.name in held else np.asarray(next(rest)) for a in model.manifest.arguments]


def _or_zeros(wanted: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    return np.zeros_like(like) if wanted is None else wanted


def _close(found: np.ndarray, wanted: np.ndarray, least: float = 1e-6) -> bool:
    """Whether two gradients are equal; one whose terms cancel out is compared with the `least` size."""
    size = max(float(np.abs(np.nan_to_num(wanted)).max(initial=0)), least)
    return bool(np.allclose(found, wanted, rtol=0, atol=TOLERANCE * size, equal_nan=True))


def sweep(module: str, only: str = "") -> list[Outcome]:
    """Judge every case of a table."""
    table = importlib.import_module(f"meaning.{module}")
    return [judge(*case) for case in table.cases() if only in f"{case[0]}.{case[1]}"]


def report(outcomes: list[Outcome]) -> str:
    """The table, in Markdown."""
    kinds = ("equal", "refused", "caught", "silent", "unclear")
    lines = [
        "| library | layers | equal | refused with a line | stopped by the comparison | silent | unclear |",
        "|---|---|---|---|---|---|---|",
    ]
    layers = [one for one in outcomes if one.kind != "no layer"]
    for library in [*dict.fromkeys(one.library for one in layers), "all"]:
        counts = Counter(one.kind for one in layers if library in (one.library, "all"))
        total = sum(counts.values())
        lines.append(f"| {library} | {total} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    share = sum(one.kind == "equal" for one in layers) / max(len(layers), 1)
    lines += ["", f"{share:.1%} equal.", ""]
    for one in outcomes:
        if one.kind != "equal":
            lines.append(f"- {one.kind}: `{one.library}.{one.name}`: {one.why}")
    lines += ["", "Equal: " + ", ".join(f"`{one.library}.{one.name}`" for one in layers if one.kind == "equal") + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of library.name")
    parser.add_argument("--write", type=Path, help="a page of results; the table goes between its jax marks")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    outcomes = sweep("jax_cases", options.only)
    text = report(outcomes)
    sys.stdout.write(text)
    if options.write:
        head, start, rest = options.write.read_text().partition("<!-- jax: start -->\n")
        _, end, tail = rest.partition("<!-- jax: end -->\n")
        options.write.write_text(f"{head}{start}{text}{end}{tail}")
    sys.exit(any(one.kind in ("silent", "unclear") for one in outcomes))


if __name__ == "__main__":
    main()
