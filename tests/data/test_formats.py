"""Data as people have it: every format gives the texts that were put in, and what is not understood is named."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import feather, parquet

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import ResourceError, UserError
from planetary.data.files import files_of
from planetary.data.prepare import prepare
from planetary.data.sources import documents, source_contents

TEXTS = ["first text\nof two lines", 'with "quotes", commas\tand tabs', "ünïcödé ✓", "x" * 5000, "the last one"]


def gzipped(data: bytes) -> bytes:
    """Without the time of day, which would be in the names of tests."""
    return gzip.compress(data, mtime=0)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzipped,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def texts_of(source: Path | str, field: str = "text") -> list[str]:
    parts: dict[str, bytes] = {}
    for document in documents(source_contents(str(source)), field):
        parts[document.name] = parts.get(document.name, b"") + document.text
    return [text.decode() for text in parts.values()]


def table() -> pa.Table:
    return pa.table({"id": list(range(len(TEXTS))), "text": TEXTS, "message": [{"text": text} for text in TEXTS]})


def as_json_lines() -> bytes:
    lines = [json.dumps({"text": text, "message": {"text": text}}) for text in TEXTS]
    return "\n".join(lines).encode()


def as_separated(separator: str) -> bytes:
    import csv

    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=separator)
    writer.writerow(["id", "text"])
    writer.writerows(enumerate(TEXTS))
    return b"\xef\xbb\xbf" + out.getvalue().encode()  # as spreadsheets write it


def as_parquet() -> bytes:
    out = io.BytesIO()
    parquet.write_table(table(), out, row_group_size=2)
    return out.getvalue()


def as_arrow_file() -> bytes:
    out = io.BytesIO()
    feather.write_feather(table(), out)
    return out.getvalue()


def as_arrow_stream() -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table().schema) as writer:
        writer.write_table(table())
    return out.getvalue()


def as_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number, text in enumerate(TEXTS):
            members = {f"{number}.json": json.dumps({"text": text}).encode(), f"{number}.jpg": b"\xff\xd8\xff"}
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


MADE = {
    "t.jsonl": as_json_lines,
    "t.csv": lambda: as_separated(","),
    "t.tsv": lambda: as_separated("\t"),
    "t.parquet": as_parquet,
    "t.feather": as_arrow_file,
    "t.arrow": as_arrow_stream,
    "t.tar": as_tar,
}


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize("name", list(MADE))
def test_every_format_gives_the_texts_that_were_put_in(name: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}{packing}"
    path.write_bytes(PACK[packing](MADE[name]()))
    assert texts_of(path) == TEXTS
    assert source_contents(str(path)).has_many_documents


@pytest.mark.parametrize("packing", list(PACK))
def test_a_packed_text_is_the_text(packing: str, tmp_path: Path) -> None:
    text = "\n".join(TEXTS) * 400  # more than one chunk of two compressors
    path = tmp_path / f"t.txt{packing}"
    path.write_bytes(PACK[packing](text.encode()))
    assert texts_of(path) == [text]
    assert not source_contents(str(path)).has_many_documents


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet", "t.arrow"])
def test_a_nested_field_is_a_path(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(MADE[name]())
    assert texts_of(tmp_path / name, "message.text") == TEXTS


def test_what_a_file_is_does_not_depend_on_its_name(tmp_path: Path) -> None:
    for name, data in (("a.txt", as_parquet()), ("b.bin", gzipped(b"plain")), ("c", as_tar())):
        (tmp_path / name).write_bytes(data)
    assert texts_of(tmp_path / "a.txt") == TEXTS
    assert texts_of(tmp_path / "b.bin") == ["plain"]
    assert texts_of(tmp_path / "c") == TEXTS


def test_a_folder_and_a_pattern_are_their_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "sub/a.txt", ".hidden.txt", ".git/x.txt", "_SUCCESS"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "c.txt.gz").write_bytes(gzipped(b"packed"))
    assert texts_of(tmp_path) == ["text of b.txt", "packed", "text of sub/a.txt"]
    assert source_contents(str(tmp_path)).has_many_documents
    assert [file.name for file in files_of(str(tmp_path / "**" / "*.txt"))] == ["b.txt", "sub/a.txt"]
    assert texts_of(f"{tmp_path}/[ab].txt") == ["text of b.txt"]
    assert texts_of(f"file://{tmp_path}/*.txt") == ["text of b.txt"]


def test_contents_depend_on_the_names_and_bytes_of_all_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same")
    first = source_contents(str(tmp_path)).digest
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    second = source_contents(str(tmp_path)).digest
    (tmp_path / "c.txt").write_text("other")
    assert len({first, second, source_contents(str(tmp_path)).digest}) == 3


def save_dataset(folder: Path) -> None:
    """As `datasets.Dataset.save_to_disk` does it, in two shards."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table().slice(0, 2), table().slice(2)), strict=True):
        with pa.ipc.new_stream(str(folder / name), part.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_tables(tmp_path: Path) -> None:
    save_dataset(tmp_path / "plain")
    assert texts_of(tmp_path / "plain") == TEXTS
    save_dataset(tmp_path / "parts" / "train")
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts_of(tmp_path / "parts") == TEXTS
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(UserError, match=r"of the parts a, b: give the folder of one"):
        texts_of(tmp_path / "parts")


def archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("t.txt", "text")
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.zip", archive(), "a zip archive"),
        ("t.txt", archive(), "a zip archive"),
        ("t.pdf", b"%PDF-1.7\n...", "a PDF: extract its text first"),
        ("t.txt", "text".encode("utf-16"), "UTF-16 text: convert it"),
        ("t.bin", b"abc\x00\x01\x02", "holds bytes that no text has"),
        ("t.parquet", b"no table at all", "named like parquet and begins with"),
        ("t.parquet", b"PAR1 but no table", "damaged, or no table"),
        ("t.arrow", b"ARROW1\x00\x00 but no table", "damaged, or no table"),
        ("t.gz", gzipped(gzipped(b"text")), "compressed twice"),
        ("t.gz", gzipped(b"text" * 9999)[:-20], "ends too early or is damaged"),
        ("t.xz", lzma.compress(b"text" * 9999)[:-20], "ends too early or is damaged"),
        ("t.jsonl", b'{"text": "a"}\n{"tex": {"b": 1}}', r"line 2: expected .* under 'text' .* found 'tex.b'"),
        ("t.csv", b"id,body\n1,a\n", r"expected a column 'text' \(data.text_key\), found 'id', 'body'"),
        ("t.csv", b"id,text\n1\n", "line 2 has too few columns"),
        ("t.tar", tarfile.TarInfo("a.jpg").tobuf() + bytes(1024), "without a member that ends in .txt"),
    ],
)
def test_what_cannot_be_trained_on_is_named(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=words):
        texts_of(tmp_path / name)


def test_a_column_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(as_parquet())
    with pytest.raises(UserError, match=r"column 'id' \(data.text_key\) holds int"):
        texts_of(tmp_path / "t.parquet", "id")
    with pytest.raises(UserError, match=r"expected a column 'body' .* found 'id', 'text', 'message'"):
        texts_of(tmp_path / "t.parquet", "body")


@pytest.mark.parametrize(
    ("source", "words"),
    [("nowhere/*.txt", "no file has a name like that"), ("empty", "the folder has no files; supported: text, .jsonl")],
)
def test_nothing_to_read_is_said(source: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=words):
        texts_of(tmp_path / source)


def test_a_host_that_cannot_be_reached_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class ClientError(Exception):
        """As the clients of object stores have them: no OSError."""

    def unreachable(*_: object, **__: object) -> None:
        raise ClientError("could not connect to the endpoint")

    for method in ("isdir", "_open"):
        monkeypatch.setattr(MemoryFileSystem, method, unreachable)
    with pytest.raises(ResourceError, match=r"ClientError: could not connect .* Is its host reachable"):
        texts_of("memory://bucket/t.txt")


def config_for(source: Path | str) -> Config:
    keys = {"data.source": source, "data.held_out_fraction": 0.2, "train.sequence_length": 16, "train.batch_size": 1}
    return apply_overrides(Config(), [f"{key}={value}" for key, value in keys.items()])


def test_the_tokens_of_packed_tables_are_those_of_plain_lines(tmp_path: Path) -> None:
    texts = [f"text {number} " + "abc " * (number % 50) for number in range(400)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    (tmp_path / "t.jsonl").write_bytes(lines)
    (tmp_path / "t.jsonl.zst").write_bytes(PACK[".zst"](lines))
    parquet.write_table(pa.table({"text": texts}), tmp_path / "t.parquet", row_group_size=7)
    made = [
        prepare(config_for(tmp_path / name), tmp_path / "cache") for name in ("t.jsonl", "t.jsonl.zst", "t.parquet")
    ]
    assert len({data.train.digest for data in made}) == 1
    assert len({data.held_out.digest for data in made}) == 1
    assert len({data.key for data in made}) == 3  # of the files as they are stored
