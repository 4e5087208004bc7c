"""Which files of a folder are trained on: those of the training split, where the folder is a data set of a hub.

The conventions are the Hugging Face Hub's (docs "Data files configuration"): the `configs` of the card's metadata, else
the word train, test or validation in the names of files and folders. The card, notes, licences and other splits are no
training data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from planetary.core.errors import UserError

CARD = "README.md"
TRAIN = "train"
_SPLITS: Mapping[str, tuple[str, ...]] = {  # words in the names of a split's files
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_DATA = frozenset({".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".txt", ".tar"})
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zstd"})
_ABOUT = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"})
_ABOUT_STEMS = frozenset({"readme", "license", "licence", "notice", "citation", "changelog", "requirements"})


def dataset_files(names: Mapping[str, str], source: str, read: Callable[[str], bytes]) -> dict[str, str]:
    """Return the files of a folder trained on, by their names in it.

    A folder is a data set if it has a card with metadata, a `dataset_info(s).json`, or files of a training split beside
    files of another split. All files of any other folder are trained on.

    Args:
        names: of all files, and the path of each.
        source: the folder, for error texts.
        read: returns the contents of a path.

    Raises:
        UserError: the folder does not tell which files to train on; the text names a pattern.
    """
    if "dataset_dict.json" in names or "state.json" in names:
        return _of_saved(names, source, read) or dict(names)
    metadata = _metadata(read(names[CARD])) if CARD in names else ""
    data = {name: path for name, path in names.items() if _is_data(name)}
    splits = {name: split_of(name) for name in data}
    found = set(splits.values())
    declared = bool(metadata) or "dataset_infos.json" in names or "dataset_info.json" in names
    if not data or not (declared or (TRAIN in found and found & {"test", "validation"})):
        return dict(names)
    chosen = _of_configs(metadata, data, source)
    if chosen is None:
        if found == {None}:
            chosen = list(data)
        elif TRAIN in found:
            chosen = [name for name, split in splits.items() if split == TRAIN]
        else:
            known = ", ".join(sorted(split for split in found if split))
            raise UserError(
                f"{source} is a data set whose files are of the splits {known}, and none is called train: name the "
                f"files to train on by a pattern, such as data.source = {str(PurePosixPath(source) / '*.jsonl')!r}"
            )
    return {name: data[name] for name in _of_one_kind(chosen, source)}


def split_of(name: str) -> str | None:
    """Return the split the name of a file, or of a folder above it, says; None: it says none."""
    for part in reversed(PurePosixPath(name).parts):
        words = set(re.split(r"[^a-z]+", part.lower()))
        for split, keywords in _SPLITS.items():
            if words & set(keywords):
                return split
    return None


def _of_saved(names: Mapping[str, str], source: str, read: Callable[[str], bytes]) -> dict[str, str] | None:
    """Return the tables of a folder that Hugging Face's `save_to_disk` wrote."""
    if "dataset_dict.json" in names:
        splits = json.loads(read(names["dataset_dict.json"])).get("splits", [])
        if TRAIN not in splits:
            raise UserError(
                f"{source} is a saved dataset of the parts {', '.join(splits)}: give the folder of one of them"
            )
        inner = {name.removeprefix("train/"): path for name, path in names.items() if name.startswith("train/")}
        return _of_saved(inner, source, read)
    if "state.json" not in names:
        return None
    parts = [part["filename"] for part in json.loads(read(names["state.json"])).get("_data_files", [])]
    return {name: names[name] for name in parts if name in names} or None


def _suffix(name: str) -> str:
    path = PurePosixPath(name)
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    about = path.name in _ABOUT or path.name.partition(".")[0].lower() in _ABOUT_STEMS
    return not about and _suffix(name) in _DATA


def _of_one_kind(names: Sequence[str], source: str) -> list[str]:
    """Return the files with the ending that most have, as the Hub's library does it."""
    counts = Counter(map(_suffix, names)).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        endings = " and ".join(sorted(ending for ending, _ in counts))
        raise UserError(
            f"{source} is a data set with as many files that end in {endings}: name those to train on by a pattern, "
            f"such as data.source = {str(PurePosixPath(source) / ('**/*' + counts[0][0]))!r}"
        )
    return [name for name in names if _suffix(name) == counts[0][0]]


# --- the card's metadata ------------------------------------------------------------------------------------


def _metadata(card: bytes) -> str:
    """Return the YAML at the start of a card; "" without any."""
    found = re.match(r"(?:\ufeff)?---\r?\n(.*?)\r?\n---", card.decode("utf-8", "replace"), re.DOTALL)
    return found.group(1) if found else ""


def _of_configs(metadata: str, data: Mapping[str, str], source: str) -> list[str] | None:
    """Return the training files the `configs` of a card name; None without such."""
    block = re.search(r"^configs:[^\S\n]*\n((?:[ \t-].*(?:\n|$)|\n)+)", metadata, re.MULTILINE)
    if block is None:
        return None
    advice = (
        f"name the files to train on by a pattern, such as data.source = {str(PurePosixPath(source) / '*.jsonl')!r}"
    )
    try:
        configs = parse_yaml(block.group(1))
        files = _train_patterns(configs, source, advice)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"cannot read `configs` in the card {source}/{CARD} ({error}): {advice}") from None
    if files is None:
        return None
    regexes = [_regex(pattern) for pattern in files]
    chosen = [name for name in data if any(regex.fullmatch(name) for regex in regexes)]
    if not chosen:
        raise UserError(f"the card {source}/{CARD} names the training files {', '.join(files)}, and none is here")
    return chosen


def _train_patterns(configs: Any, source: str, advice: str) -> list[str] | None:
    names = [one["config_name"] for one in configs]
    chosen = [one for one in configs if one.get("default") == "true" or one["config_name"] == "default"]
    if len(configs) > 1 and not chosen:
        raise UserError(f"{source} is a data set of the parts {', '.join(names)}, and none is its default: {advice}")
    config: dict[str, Any] = (chosen or configs)[0]
    files, folder = config.get("data_files"), str(config.get("data_dir", ""))
    if not files:
        return [f"{folder}/**"] if folder else None
    if isinstance(files, list) and isinstance(files[0], dict):
        files = {one["split"]: one["path"] for one in files}
    if isinstance(files, dict):
        if TRAIN not in files:
            raise UserError(f"{source} has the splits {', '.join(files)}, and none is called train: {advice}")
        files = files[TRAIN]
    return [str(PurePosixPath(folder) / path) for path in ([files] if isinstance(files, str) else files)]


def _regex(pattern: str) -> re.Pattern[str]:
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(signs.get(part, part if part.startswith("[") else re.escape(part)) for part in parts))


def parse_yaml(text: str) -> Any:
    """Return the value of the YAML that cards use: blocks of lists and mappings, plain and quoted words, `[a, b]`.

    Raises:
        ValueError: it has something else; the text has the line.
    """
    lines = [(len(line) - len(line.lstrip(" ")), line.strip()) for line in text.splitlines()]
    lines = [(indent, line) for indent, line in lines if line and not line.startswith("#")]
    value, rest = _block(lines)
    if rest:
        raise ValueError(f"unexpected line {rest[0][1]!r}")
    return value


_Lines = list[tuple[int, str]]


def _block(lines: _Lines) -> tuple[Any, _Lines]:
    if not lines:
        raise ValueError("a value is missing")
    indent, first = lines[0]
    if first.startswith("- "):
        return _list(lines, indent)
    if _PAIR.match(first):
        return _mapping(lines, indent)
    return _scalar(first), lines[1:]


_PAIR = re.compile(r"""("[^"]*"|'[^']*'|[\w.-]+):(?:\s+(.*))?$""")


def _list(lines: _Lines, indent: int) -> tuple[list[Any], _Lines]:
    found = []
    while lines and lines[0][0] == indent and lines[0][1].startswith("- "):
        inner = lines[0][1][2:].lstrip()
        value, lines = _block([(indent + 2, inner), *lines[1:]])
        found.append(value)
    return found, lines


def _mapping(lines: _Lines, indent: int) -> tuple[dict[str, Any], _Lines]:
    found: dict[str, Any] = {}
    while lines and lines[0][0] == indent and (pair := _PAIR.match(lines[0][1])):
        key, value = _scalar(pair.group(1)), pair.group(2)
        if value:
            found[key], lines = _scalar(value), lines[1:]
            continue
        after = lines[1:]
        # A list may stand at the indentation of the key.
        inside = after and (after[0][0] > indent or (after[0][0] == indent and after[0][1].startswith("- ")))
        found[key], lines = _block(after) if inside else ("", after)
    return found, lines


def _scalar(text: str) -> Any:
    text = re.sub(r"\s+#.*$", "", text)
    if text.startswith("[") and text.endswith("]"):
        return [_scalar(part.strip()) for part in _parts(text[1:-1])]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text[:1] in "{[&*!|>%@`\"'":
        raise ValueError(f"unexpected {text!r}")
    return text


def _parts(text: str) -> Iterable[str]:
    return [part for part in re.findall(r"""\s*("[^"]*"|'[^']*'|[^,]+)\s*,?""", text) if part.strip()]
