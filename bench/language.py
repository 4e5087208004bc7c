"""Count words of our own list in docstrings, comments and pages: `python bench/language.py`, part of `make lint`.

A rate above a limit below is an error. Limits are lowered with the text, and never raised: write the noun ("the
payload", "the holder") in place of "what ..." and "whoever ...", the actor's name in place of "its", and at most one
relative clause a sentence. A test's name has at most 60 characters; the story is its docstring.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "planetary"
DOCUMENTED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
PERSONS = re.compile(r"\b(nobody|everybody|whoever|somebody|is told|are told|hears of)\b", re.IGNORECASE)
THAT = re.compile(r"\bthat\b", re.IGNORECASE)
ITS = re.compile(r"\bits\b", re.IGNORECASE)
CONTINUES = re.compile(
    r"# (that|whether|of|for|in|on|at|by|with|without|from|to|as|between|until|since|before|after|below|above|under"
    r"|over|within|about|against|beside|behind|during|through|among|than|which|who|whose|its|those|also|up|out)\b"
)
"""A comment behind a line which continues the line in place of naming a value."""
LONG_TEST = re.compile(r"^ *(?:async )?def (test_\w{56,})", re.MULTILINE)
"""A test's name of more than 60 characters."""
REFERS = re.compile(r"See `[\w.]+`\.|See the (module|class)\.")
"""A docstring without a fact of its own: `help()` shows the base's where an override has none."""

MOST_WHAT = {"machine": 1.5, "wire": 1.5, "web": 1.0}
"""Per 1,000 words of a package, where it is not `MOST`."""
MOST = 0.5
MOST_THAT = {"src": 14.0, "docs": 12.0}
MOST_ITS = {"src": 3.0, "docs": 7.0}
MOST_CONTINUING = 0.08
"""Part of the comments behind a line."""


def prose(path: Path) -> str:
    """Return the docstrings and comments of a module, or the text of a page without its code."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def rate(pattern: re.Pattern[str], text: str) -> float:
    """Return the occurrences per 1,000 words."""
    return 1000 * len(pattern.findall(text)) / (len(re.findall(r"\w+", text)) or 1)


def comments_behind(path: Path) -> list[str]:
    """Return the comments behind a line of code, without directives."""
    source = path.read_text()
    lines = source.splitlines()
    found = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    behind = [token.string for token in found if lines[token.start[0] - 1][: token.start[1]].strip()]
    return [one for one in behind if not re.match(r"# (type:|noqa|pyright|pragma|fmt)", one)]


def referring(path: Path) -> list[str]:
    """Return the places of docstrings that only refer to another one."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
    return [f"{path}: {node.name}" for node in nodes if REFERS.fullmatch(ast.get_docstring(node) or "")]


def texts() -> dict[str, list[Path]]:
    """Return the files whose language is counted together."""
    folders = [folder for folder in sorted(PACKAGE.iterdir()) if folder.is_dir() and folder.name != "__pycache__"]
    named = {folder.name: sorted(folder.rglob("*.py")) for folder in folders}
    return {**named, "docs": [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}


def main() -> int:
    faults = []

    def check(name: str, word: str, found: float, most: float) -> None:
        print(f"{name:12}{word:10} {found:6.2f} of {most}")
        if found > most:
            faults.append(f"{word} in {name}")

    named = {name: "\n".join(prose(path) for path in paths) for name, paths in texts().items()}
    for name, text in named.items():
        check(name, '"what"', rate(WHAT, text), MOST_WHAT.get(name, MOST))
        check(name, "persons", rate(PERSONS, text), MOST)
    package = "\n".join(text for name, text in named.items() if name != "docs")
    for name, text in (("src", package), ("docs", named["docs"])):
        check(name, '"that"', rate(THAT, text), MOST_THAT[name])
        check(name, '"its"', rate(ITS, text), MOST_ITS[name])
    files = sorted(PACKAGE.rglob("*.py"))
    comments = [one for path in files for one in comments_behind(path)]
    check("src", "comments", sum(bool(CONTINUES.match(one)) for one in comments) / len(comments), MOST_CONTINUING)
    for place in (place for path in files for place in referring(path)):
        print(f"a docstring that only refers to another: {place}")
        faults.append(place)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in LONG_TEST.findall(path.read_text()):
            print(f"a test's name of {len(name)} characters: {path.relative_to(ROOT)}: {name}")
            faults.append(name)
    if faults:
        print(f"more than the limit: {', '.join(faults)}; see bench/language.py")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
