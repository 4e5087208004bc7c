"""The kind of a data file: its first bytes decide, and notation is never trained on as if it were text."""

from __future__ import annotations

import csv
import functools
import http.server
import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from test_formats import PACK, as_separated, config_for, gzipped, texts_of

from planetary.core.config import apply_overrides
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.own_files import own_files
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data import kinds, sources
from planetary.data.files import SourceFile, path_part
from planetary.data.formats import notations
from planetary.data.prepare import prepare
from planetary.data.recipe import recipe_of

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", PAGE, re.DOTALL))

TEXTS = [f"mill {number} by the river, {'x' * 50 * number}" for number in range(9)]
LINES = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()
ARRAY = json.dumps([{"text": text} for text in TEXTS], indent=1).encode()
TABLE = "id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS))
ONE_OBJECT = json.dumps({"data": [{"text": text} for text in TEXTS]}, indent=1).encode()


def kind_in(folder: Path, name: str, data: bytes, declared: str = "") -> str:
    (folder / name).write_bytes(data)
    return sources.source_contents(str(folder / name), declared).kinds[0]


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        *((name, LINES) for name in ("t.json", "t.jsonl", "t.ndjson", "t", "part-00000", "t.data")),
        *((name, ARRAY) for name in ("t.json", "t.jsonl", "t")),
        ("t.json", json.dumps([{"text": text} for text in TEXTS]).encode()),
        ("t.csv", TABLE.encode()),
        ("t.jsonl", b"\xef\xbb\xbf" + LINES),
    ],
)
def test_records_are_read_as_records(name: str, data: bytes, packing: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}{packing}").write_bytes(PACK[packing](data))
    assert texts_of(tmp_path / f"{name}{packing}") == TEXTS


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.txt", LINES, 'begins like JSON lines.* data.format = "jsonl".* data.format = "text"'),
        ("t.md", ARRAY, 'a JSON array of records.* data.format = "json"'),
        ("t.txt", TABLE.encode(), 'begins like a CSV table.* data.format = "csv"'),
        ("t", TABLE.encode(), 'begins like a CSV table.* data.format = "csv"'),
        ("t.txt", TABLE.replace(",", "\t").encode(), 'tab-separated values.* data.format = "tsv"'),
        ("t.csv", LINES, 'named like a CSV table and begins like JSON lines.* data.format = "jsonl"'),
        ("t.json", ONE_OBJECT, "is one JSON object, and no records"),
        ("t.ipynb", ONE_OBJECT, "is one JSON object, and no records"),
        ("t.json", b"a text", "named like JSON and begins with b'a text'"),
        ("t.txt", b"<!DOCTYPE html>\n<html>", 'is HTML or XML: Extract the texts first; data.format = "text"'),
        ("t.jsonl", b"<html><body>sign in", "is HTML or XML"),
        ("t.txt", b'<?xml version="1.0"?><a/>', "is HTML or XML"),
        ("t.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "run git lfs pull"),
        ("t.txt", b"{\\rtf1 text}", "a rich text"),
        ("t.bin", np.arange(1, 2000, dtype="<u2").tobytes(), 'Raw 16-bit tokens .* data.format = "u16"'),
        ("t.bin", (20240520).to_bytes(4, "little") + bytes(2000), r"tokens of llm.c \(16 bits .*tail -c \+1025"),
        ("t.u16", (20240520).to_bytes(4, "little") + bytes(2000), r"tokens of llm.c \(16 bits .*tail -c \+1025"),
        ("t.u32", (20240801).to_bytes(4, "little") + bytes(2000), r"tokens of llm.c \(32 bits"),
        ("t.idx", b"MMIDIDX\x00\x00" + bytes(99), "the index of a Megatron data set: give the .bin"),
        ("t.u16", b"\x93NUMPY\x01\x00", 'a numpy array, whose header .* data.format = "npy"'),
        ("t.npy", b"no array", "is to be a numpy array of tokens .* begins with b'no array'"),
        ("t.jsonl.gz", gzipped(b'{"text": 1}\n'), r"line 1: expected .* under 'text'"),
        ("t.csv", b"id,text\n1,not quoted, cut\n", "line 2 has more columns than the header"),
        ("t.json", b'[{"text": "a"}, {"text": "b"', "ends within its JSON array|is not valid JSON"),
        ("t.json", b'[{"text": "a"} {"text": "b"}]', "element 2: expected ','"),
        ("t.json", b'[{"text": "a"}] tail', "behind its JSON array"),
    ],
)
def test_notation_under_another_name_is_an_error(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=words):
        texts_of(tmp_path / name)


def test_the_key_says_otherwise(tmp_path: Path) -> None:
    assert kind_in(tmp_path, "t.txt", LINES, "text") == "text"
    assert kind_in(tmp_path, "t.txt", LINES, "jsonl") == "jsonl"
    assert kind_in(tmp_path, "t.html", b"<html>", "text") == "text"
    with pytest.raises(UserError, match=r"unknown data format 'jsn'; did you mean json"):
        kind_in(tmp_path, "t.txt", LINES, "jsn")
    with pytest.raises(UserError, match=r"is to be a Parquet table .* begins with b'plain'"):
        kind_in(tmp_path, "t", b"plain", "parquet")


@pytest.mark.parametrize(
    "text",
    [
        "Roses are red, violets are blue\nSugar is sweet, so are you\nAnd so, on\nAnd, on\n",
        "[Verse 1]\nla la\n",
        "[1] A. Author, Title.\n[2] B. Author, Title.\n",
        "{curly} words\n",
        "Dear reader,\nthis is prose, with commas.\nIt has three lines.\n",
        "id\n1\n2\n3\n",
        "<|endoftext|>once upon a time\n",
        "< 5 is small\n",
        '"quoted", he said\n',
        "",
    ],
)
def test_prose_is_no_notation(text: str, tmp_path: Path) -> None:
    assert kind_in(tmp_path, "t.txt", text.encode()) == "text"


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_json_array_is_read_in_pieces(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planetary.data.formats.notations.CHUNK_BYTES", chunk)
    values = [1, 23.5, "ü✓", {"a": [1, {"b": None}]}, [], "", -7]
    for text in (json.dumps(values), json.dumps(values, indent=2, ensure_ascii=False), "[ ]", "[]"):
        read = notations.Json().records(io.BytesIO(text.encode()), SourceFile("t.json", "t.json"))
        assert [value for _, value in read] == json.loads(text)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("https://h/a/x.jsonl?download=true#part", "h/a/x.jsonl"),
        ("simplecache::https://h/x.csv.gz?sig=a/b.txt", "h/x.csv.gz"),
        ("s3://b/k.parquet?versionId=3", "b/k.parquet"),
        ("/data/what?.txt", "/data/what?.txt"),
    ],
)
def test_a_link_is_judged_by_its_path(source: str, path: str) -> None:
    assert path_part(source) == path


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_link_with_a_query_is_the_file(web: str, tmp_path: Path) -> None:
    # Links in the texts: asked whether it is a folder, fsspec would take the file for a page of them.
    lines = b"".join(json.dumps({"text": f'<a href="/f{n}">{n}</a>'}).encode() + b"\n" for n in range(3))
    (tmp_path / "x.jsonl").write_bytes(lines)
    assert texts_of(f"{web}/x.jsonl?download=true") == [f'<a href="/f{n}">{n}</a>' for n in range(3)]
    (tmp_path / "page").write_bytes(b"<!doctype html><html>")
    with pytest.raises(UserError, match="the link of a web page"):
        texts_of(f"{web}/page?raw=1")


# --- folders ------------------------------------------------------------------------------------------------

CARD = "---\nlicense: mit\n---\n# A data set\n"


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


TRAIN, TEST = '{"text": "train"}\n', '{"text": "test"}\n'
CONFIGS = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path:
    - "a/*.jsonl"
    - 'b/**'
  - split: test
    path: c/x.jsonl
- config_name: other
  data_files: "c/*"   # all
tags:
- x
---
"""


@pytest.mark.parametrize(
    "files",
    [
        {"README.md": CARD, "dataset_infos.json": '{"Q": {}}', "train.jsonl": TRAIN, "LICENSE.txt": "mit"},
        {"README.md": CARD, "data/train-00000-of-00001.jsonl": TRAIN, "data/test-00000-of-00001.jsonl": TEST},
        {"README.md": CARD, "train/0.jsonl": TRAIN, "validation/0.jsonl": TEST, "load.py": "print()"},
        {"training.jsonl": TRAIN, "dev.jsonl": TEST, "notes.md": "notes"},
        {"README.md": CARD, "x.jsonl": TRAIN},
        {"README.md": CONFIGS, "a/1.jsonl": TRAIN, "c/x.jsonl": TEST, "d.jsonl": TEST},
        {
            "README.md": "---\nconfigs:\n- config_name: one\n  data_dir: en\n---\n",
            "en/x.jsonl": TRAIN,
            "de/x.jsonl": TEST,
        },
        {"dataset_infos.json": "{}", "x.jsonl": TRAIN, "y.jsonl": "", "notes.txt": "notes"},
    ],
)
def test_of_a_data_set_the_training_split_is_trained_on(files: dict[str, str | bytes], tmp_path: Path) -> None:
    assert texts_of(write(tmp_path, files)) == ["train"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"x.jsonl": TRAIN, "README.md": "# notes"}, r"several kinds .* texts \(README.md\), records \(x.jsonl\)"),
        ({"x.jsonl": TRAIN, "y.u16": bytes(8)}, "tokens .raw 16-bit tokens."),
        ({"README.md": CARD, "test.jsonl": TEST}, "of the splits test, and none is called train"),
        ({"README.md": CARD, "a.jsonl": TRAIN, "b.csv": TABLE}, r"as many files that end in .csv and .jsonl"),
        (
            {"README.md": CONFIGS.replace("  default: true\n", ""), "a/1.jsonl": TRAIN},
            "of the parts main, other, and none is its default",
        ),
        ({"README.md": CONFIGS, "c/x.jsonl": TEST}, r"names the training files a/\*.jsonl, b/\*\*, and none is here"),
        ({"README.md": "---\nconfigs:\n- &a {x: 1}\n---\n", "x.jsonl": TRAIN}, "cannot read `configs` in the card"),
    ],
)
def test_a_folder_that_does_not_tell_is_an_error(files: dict[str, str | bytes], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        texts_of(write(tmp_path, files))


def test_a_folder_of_texts_is_all_of_them(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"README.md": "# notes", "train.md": "about trains", "test.md": "about tests"}
    assert texts_of(write(tmp_path, files)) == ["# notes", "about tests", "about trains"]


# --- archives -----------------------------------------------------------------------------------------------


def shard(members: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def test_a_shard_names_its_member(tmp_path: Path) -> None:
    sample = {"0.txt": "caption", "0.json": '{"url": "u", "alt": {"en": "alternative"}}', "0.jpg": "", "0.prompt": "p"}
    (tmp_path / "s.tar").write_bytes(shard(sample))
    with pytest.raises(UserError, match=r"texts \(0.txt\) and records \(0.json\).* 'txt' or 'json.FIELD'"):
        texts_of(tmp_path / "s.tar")
    assert texts_of(tmp_path / "s.tar", "txt") == ["caption"]
    assert texts_of(tmp_path / "s.tar", "json.alt.en") == ["alternative"]
    assert texts_of(tmp_path / "s.tar", ".prompt") == ["p"]
    with pytest.raises(UserError, match=r"without a member that ends in .md"):
        texts_of(tmp_path / "s.tar", "md")
    (tmp_path / "l.tar").write_bytes(shard({"a.jsonl": TRAIN + TEST}))
    assert texts_of(tmp_path / "l.tar") == ["train", "test"]


# --- tokens -------------------------------------------------------------------------------------------------


def tokens_of(source: Path, declared: str = "") -> list[int]:
    found = list(sources.tokens(sources.source_contents(str(source), declared)))
    return np.concatenate(found).tolist() if found else []


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "<i8", ">u4"])
def test_an_array_of_tokens_is_its_tokens(dtype: str, tmp_path: Path) -> None:
    values = np.arange(200).reshape(2, 100).astype(dtype)
    np.save(tmp_path / "t.npy", values)
    assert tokens_of(tmp_path / "t.npy") == values.ravel().tolist()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.ones(3, np.float32), "an array of float32|a numpy array of float32, and tokens are integers"),
        (np.array([1, -1]), "holds -1, which is no token"),
        (np.array([2**40]), "which is no token"),
        (np.asfortranarray(np.ones((2, 2), np.int64)), "in the order of columns"),
    ],
)
def test_an_array_of_other_numbers_is_an_error(array: np.ndarray, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(UserError, match=words) as error:
        tokens_of(tmp_path / "t.npy")
    assert "astype" not in str(error.value)


def test_token_files_may_be_packed_and_several(tmp_path: Path) -> None:
    values = np.arange(50, dtype="<u2")
    (tmp_path / "1.u16.gz").write_bytes(gzipped(values.tobytes()))
    (tmp_path / "2.u16").write_bytes(values.tobytes())
    assert tokens_of(tmp_path) == [*range(50), *range(50)]
    (tmp_path / "t.bin").write_bytes(values.tobytes())
    assert tokens_of(tmp_path / "t.bin", "u16") == list(range(50))


# --- the run ------------------------------------------------------------------------------------------------


def test_the_first_lines_of_a_run_show_the_data(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(LINES)
    (note,) = prepare(config_for(tmp_path / "t.json"), tmp_path / "cache").notes
    assert note.startswith(f"{tmp_path}/t.json: ")
    assert "of JSON lines; the first begins 'mill 0 by the river" in note
    (tmp_path / "t.u16").write_bytes(np.arange(900, dtype="<u2").tobytes())
    (note,) = prepare(config_for(tmp_path / "t.u16"), tmp_path / "cache").notes
    assert "raw 16-bit tokens; the first begins '0 1 2 3" in note


def test_a_file_read_in_another_way_is_other_data(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(LINES * 9)
    config = config_for(tmp_path / "t.txt")
    made = [prepare(apply_overrides(config, [f"data.format={kind}"]), tmp_path / "c") for kind in ("text", "jsonl")]
    assert made[0].key != made[1].key
    assert config_hash(config) == config_hash(apply_overrides(config, ["data.format="]))


def test_a_package_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mailbox(kinds.DataFormat):
        name, title, endings = "mbox", "a mailbox", frozenset({".mbox"})

        def sniff(self, head: bytes) -> bool:
            return head.startswith(b"From ")

        def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, dict[str, str]]]:
            for n, text in enumerate(stream.read().decode().split("From ")[1:]):
                yield f"{file.url}, mail {n}", {"text": text.strip()}

    known, mailbox = kinds.kinds(), Mailbox()
    named = kinds.kind_named
    monkeypatch.setattr(kinds, "kinds", lambda: (mailbox, *known))
    for module in (kinds, sources):
        monkeypatch.setattr(module, "kind_named", lambda name: mailbox if name == "mbox" else named(name))
    for name in ("a.mbox", "b"):
        (tmp_path / name).write_text("From one\nFrom two\n")
        assert texts_of(tmp_path / name) == ["one", "two"]


def test_a_format_of_a_users_file_is_read_where_it_is_named(tmp_path: Path) -> None:
    """The page's example; the prepared data is another one when the file's text is."""
    own, data = tmp_path / "my_format.py", tmp_path / "dna.fasta"
    own.write_text(EXAMPLES["my_format.py"])
    data.write_text(">one\nACGT\nAC\n>two\nGG\n" * 40)
    config = apply_overrides(config_for(data), [f"data.format={own}:Fasta"])
    first = recipe_of(config, tmp_path)
    assert [document.text for document in first.parts[0].documents()][:2] == [b"ACGTAC\n", b"GG\n"]
    own.write_text(EXAMPLES["my_format.py"].replace("A FASTA file", "One FASTA file"))
    assert recipe_of(config, tmp_path).key != first.key
    sources = f'[{{ source = "{data}", format = "{own}:Fasta" }}, {{ source = "stdlib" }}]'
    mixed = apply_overrides(config_for("stdlib"), [f"data.sources={sources}"])
    assert [file.file for file in own_files(mixed, "the configuration")] == ["my_format.py"]
    own.write_text("from planetary.extend import DataFormat\nclass Fasta(DataFormat): pass\n")
    with pytest.raises(UserError, match="the class lacks documents, records, chats or tokens"):
        recipe_of(config, tmp_path)


def test_the_default_configuration_hash_is_as_before() -> None:
    assert config_hash(Config()) == config_hash(apply_overrides(Config(), ["data.format="]))


def test_a_table_as_spreadsheets_write_it_is_seen(tmp_path: Path) -> None:
    csv.field_size_limit(1 << 20)
    with pytest.raises(UserError, match="begins like a CSV table"):
        kind_in(tmp_path, "t.txt", as_separated(","))
