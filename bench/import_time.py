"""How long `import planetary` and `planetary --help` take, beside `python -c pass`.

    python bench/import_time.py

Each command is started in turn, `ROUNDS` times over, so that the load of the machine meets all of them. Printed are
the least time, which other processes disturb least, the difference from `python -c pass`, and the ratio to it.
"""

from __future__ import annotations

import subprocess
import sys
import time

ROUNDS = 20
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import planetary": ["-c", "import planetary"],
    "planetary --help": ["-m", "planetary", "--help"],
    "planetary train --help": ["-m", "planetary", "train", "--help"],
    "planetary.Run": ["-c", "import planetary; planetary.Run"],
    "planetary.train": ["-c", "import planetary; planetary.train"],
}


def seconds(arguments: list[str]) -> float:
    """Return the wall time of one interpreter."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    base = min(times["python -c pass"])
    print("| command | least s | over `python -c pass`, s | ratio |\n|---|---|---|---|")
    for name, taken in times.items():
        least = min(taken)
        print(f"| `{name}` | {least:.3f} | {least - base:.3f} | {least / base:.1f} |")


if __name__ == "__main__":
    main()
