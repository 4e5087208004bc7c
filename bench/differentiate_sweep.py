"""Compare `differentiate` with `jax.vjp` on the wide table of tests/compiler/sweep_cases.py; print what differs.

python bench/differentiate_sweep.py [--group real] [--match scan] [--dtype float32] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compiler"))

import jax
from sweep_cases import Case, cases
from vjp_oracle import check_together, jax_can

TOGETHER = 25  # cases compiled as one module


def ratios_of(chunk: list[Case]) -> dict[str, float | str]:
    """Deviation over tolerance by case; an error's text where one was raised."""
    try:
        return dict(check_together(chunk))
    except Exception as error:  # noqa: BLE001 - a sweep reports every failure
        if len(chunk) == 1:
            return {f"{chunk[0].name} {chunk[0].dtype}": f"{type(error).__name__}: {str(error)[:300]}"}
    half = len(chunk) // 2
    return {**ratios_of(chunk[:half]), **ratios_of(chunk[half:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", default="")
    parser.add_argument("--match", default="")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    passed: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    skipped = 0
    start = time.perf_counter()
    groups: dict[tuple[str, str], list[Case]] = collections.defaultdict(list)
    for case in cases(options.group, options.dtype, options.seed):
        if options.match in case.name:
            refusal = jax_can(case)
            if refusal:
                print(f"SKIP {case.name} {case.dtype}: JAX itself says {refusal}")
                skipped += 1
            else:
                groups[case.group, case.dtype].append(case)
    for (group, _), members in groups.items():
        for first in range(0, len(members), TOGETHER):
            for name, ratio in ratios_of(members[first : first + TOGETHER]).items():
                if isinstance(ratio, str) or not ratio <= 1:
                    failed[group] += 1
                    print(f"FAIL {group} {name}: {ratio}")
                else:
                    passed[group] += 1
    total, bad = sum(passed.values()), sum(failed.values())
    for group in sorted(passed | failed):
        print(f"{group:8} {passed[group]} passed, {failed[group]} failed")
    print(f"{total} of {total + bad} passed, {skipped} skipped, {time.perf_counter() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
