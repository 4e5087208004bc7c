"""Write the table of presets into docs/synchronisation.md: `python docs/make_presets.py`. A test keeps it current."""

from __future__ import annotations

from pathlib import Path

from planetary.core.configuration.presets import PRESETS
from planetary.core.configuration.toml import toml_value
from planetary.sync.plan import GAPS, MEASURED

PAGE = Path(__file__).with_name("synchronisation.md")
BEGIN, END = "<!-- presets -->\n", "<!-- end -->\n"


def table() -> str:
    """Return the presets as Markdown."""
    gaps = "published loss against data-parallel training | measured here against float32 averages"
    lines = [f"| preset | method | settings | {gaps} | source |", "|---|---|---|---|---|---|"]
    for preset in PRESETS.values():
        settings = ", ".join(f"`{key} = {toml_value(value)}`" for key, value in preset.settings.items())
        if preset.alone:
            alone = ", ".join(f"`{key} = {toml_value(value)}`" for key, value in preset.alone.items())
            settings += f"; with one worker {alone}"
        gap, source = GAPS[preset.name]
        measured = MEASURED[preset.name]
        here = "not measured" if measured is None else f"{measured.loss:+.2f} % ({measured.source})"
        lines.append(
            f"| `{preset.name}` | {preset.summary} | {settings} | {gap} ({source}) | {here} | {preset.source} |"
        )
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with the current table in it."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
