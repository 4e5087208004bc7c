"""Write `data.txt`: short sentences of a small grammar, the same on every machine.

python examples/pcp/make_data.py
"""

from __future__ import annotations

import random
from pathlib import Path

BODIES = ["Mercury", "Venus", "Earth", "Mars", "Ceres", "Jupiter", "Europa", "Saturn", "Titan", "Uranus", "Neptune"]
KINDS = ["planet", "moon", "ring", "storm", "crater", "ocean", "comet", "shadow", "signal", "probe", "orbit", "winter"]
LOOKS = ["cold", "bright", "silent", "heavy", "distant", "frozen", "pale", "restless", "old", "narrow", "golden"]
VERBS = ["crosses", "follows", "hides", "measures", "answers", "outlives", "circles", "reflects", "divides"]
TIMES = ["every morning", "twice a year", "for ever", "at noon", "before sunrise", "once in a lifetime", "by night"]
SENTENCES = 2000


def _sentence(draw: random.Random) -> str:
    def noun() -> str:
        return draw.choice(BODIES) if draw.random() < 0.4 else f"the {draw.choice(LOOKS)} {draw.choice(KINDS)}"

    words = f"{noun()} {draw.choice(VERBS)} {noun()}"
    if draw.random() < 0.3:
        words += f", and {noun()} {draw.choice(VERBS)} it"
    if draw.random() < 0.5:
        words += f" {draw.choice(TIMES)}"
    return words[0].upper() + words[1:] + "."


def main() -> None:
    """Write the file beside this one."""
    draw = random.Random(20)
    text = "".join(_sentence(draw) + ("\n" if number % 4 == 3 else " ") for number in range(SENTENCES))
    (Path(__file__).parent / "data.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
