"""Examples of several arrays: what is read of files and data sets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from planetary.core.config import config_from_tables
from planetary.core.errors import ResourceError, UserError
from planetary.core.example_layout import ExampleLayout
from planetary.core.tensors import TensorSpec
from planetary.data.columns import ColumnSource, column_source
from planetary.data.fitting import fit_to_data
from planetary.data.prepare import prepare
from planetary.data.reader import batches_of, read_slice

X, Y = np.arange(24, dtype=np.float64).reshape(12, 2) / 8, np.arange(12)


def read(source: Path | str, *names: str) -> ColumnSource:
    return column_source(str(source), names, Path("/"))


def column(found: ColumnSource, name: str) -> np.ndarray:
    return found.layout.column(np.concatenate(list(found.examples())).reshape(-1), name)


def _npz(folder: Path) -> Path:
    np.savez(folder / "d.npz", x=X, y=Y)
    return folder / "d.npz"


def _npy(folder: Path) -> Path:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y.astype(">i8"))
    return folder


def _parquet(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": list(X), "y": Y}), folder / "d.parquet", row_group_size=5)
    return folder / "d.parquet"


def _arrow(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather

    fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(X.reshape(-1)), 2)
    feather.write_feather(pyarrow.table({"x": fixed, "y": Y}), str(folder / "d.arrow"))
    return folder / "d.arrow"


def _code(text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "d.py").write_text(text)
        return f"{folder / 'd.py'}:Data"

    return write


MAP_STYLE = """
import numpy as np
class Data:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return {"x": np.arange(2 * index, 2 * index + 2) / 8, "y": index}
"""
ITERATED = """
import numpy as np
def Data():
    for index in range(12):
        yield np.arange(2 * index, 2 * index + 2) / 8, index
"""


@pytest.mark.parametrize("write", [_npz, _npy, _parquet, _arrow, _code(MAP_STYLE), _code(ITERATED)])
def test_equal_columns_are_equal_examples(tmp_path: Path, write: Callable[[Path], Path | str]) -> None:
    """Every kind of source gives the same layout, bytes and identity; 64-bit numbers are stored in 32 bits."""
    found = read(write(tmp_path), "x", "y")
    assert found.layout.columns == (TensorSpec("x", "f32", (2,)), TensorSpec("y", "i32", ()))
    assert found.count == 12
    np.testing.assert_array_equal(column(found, "x"), X.astype(np.float32))
    np.testing.assert_array_equal(column(found, "y"), Y)
    (tmp_path / "other").mkdir()
    assert found.digest == read(_npz(tmp_path / "other"), "x", "y").digest


def test_batches_have_each_column_in_the_type_of_the_loss(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=np.arange(48).astype(np.uint8).reshape(4, 3, 4), keep=np.eye(4, 2, dtype=bool))
    found = read(tmp_path / "d.npz")
    arguments = [TensorSpec("batch.keep", "i1", (2, 2)), TensorSpec("image", "f32", (2, 3, 4))]
    found.layout.check(arguments, 2, "d.npz")
    batches = list(batches_of(arguments, np.concatenate(list(found.examples())).reshape(-1), found.layout))
    assert [part.dtype for part in batches[0]] == [np.bool_, np.float32]
    np.testing.assert_array_equal(batches[1][1], np.arange(24, 48).reshape(2, 3, 4))
    np.testing.assert_array_equal(batches[0][0], np.eye(4, 2, dtype=bool)[:2])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([("x", "f32", (2, 2)), ("label", "i32", (2,))], "columns x: f32[2], y: i32[] .* no column is called 'label'"),
        ([("x", "f32", (2, 2))], r"it does not take 'y'. .* data.columns = \[\"x\"\]"),
        ([("x", "f32", (2, 3)), ("y", "i32", (2,))], r"'x' has to be of shape \[2, 2\]"),
        ([("x", "f32", (2, 2)), ("y", "f32", (2,))], "not every value of 'y' as i32 is one as f32"),
        ([("x", "bf16", (2, 2)), ("y", "i32", (2,))], "not every value of 'x' as f32 is one as bf16"),
    ],
)
def test_mismatch_names_columns_and_arguments(arguments: Sequence[tuple[str, str, tuple[int, ...]]], said: str) -> None:
    layout = ExampleLayout((TensorSpec("x", "f32", (2,)), TensorSpec("y", "i32", ())))
    with pytest.raises(UserError, match=said.replace("[2], y", r"\[2\], y").replace("i32[]", r"i32\[\]")):
        layout.check([TensorSpec(*one) for one in arguments], 2, "d.npz")


def _bad(**columns: np.ndarray) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.savez(folder / "d.npz", **columns)  # pyright: ignore[reportArgumentType]
        return folder / "d.npz"

    return write


def _table(columns: dict[str, list[object]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), folder / "d.parquet")
        return folder / "d.parquet"

    return write


RAISES = "def Data():\n    yield {'x': 1.0}\n    yield {'x': 2.0}\n    raise OSError('the disk is gone')\n"
LATER = "import numpy as np\nclass Data:\n    def __len__(self): return 3\n    def __getitem__(self, i): return "


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_bad(x=X, y=Y[:7]), "different numbers of examples: x: 12, y: 7"),
        (_bad(x=np.array([1, "a", None], object)), r"Python objects \(dtype object\)"),
        (_bad(x=np.array(["a", "b"])), "column 'x' holds <U1 .*Encode texts"),
        (_bad(x=np.array([0.5, np.nan, 1.0])), "example 1: 'x' holds nan, which is no finite number"),
        (_bad(x=np.array([[0.5, 1], [2, 1e300]])), r"example 1: 'x' holds 1e\+300, which is no finite"),
        (_bad(x=np.array([1, 2**40])), "example 1: 'x' holds 1099511627776, which does not fit into i32"),
        (_bad(x=np.array([1j])), "holds complex128"),
        (_bad(x=np.float32(1)), "is one number, and a column has one for each example"),
        (_bad(x=np.empty((0, 3))), "is empty"),
        (_table({"x": [[1.0], [1.0, 2.0]]}), "lengths from 1 to 2: every example needs the same shape"),
        (_table({"x": [1.0, None]}), "'x' has 1 missing values"),
        (_table({"x": ["a", "b"]}), "'x' holds object"),
        (_code(RAISES), r"failed at example 2: OSError: the disk is gone \(.*d.py:4\)"),
        (
            _code(LATER + "{'x': np.zeros(1 + i // 2)}"),
            r"example 2: 'x' is float64\[2\], and float64\[1\] in",
        ),
        (
            _code(LATER + "{'x': 1.0} if i < 2 else {'z': 1.0}"),
            "example 2: the columns are z, and those of example 0",
        ),
        (_code(LATER + "(1.0, 2.0)"), "a tuple and data.columns with its names"),
        (_code("Data = 3"), "gives int: expected a data set with __len__ and __getitem__"),
        (_code("data = 3"), "defines no Data"),
        (_code("import nothing_like_it"), "failed while it was loaded: ModuleNotFoundError"),
    ],
)
def test_unusable_columns_are_refused(tmp_path: Path, write: Callable[[Path], Path | str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(write(tmp_path))


def test_absent_column_is_named_with_those_that_exist(tmp_path: Path) -> None:
    for folder, write in (("npz", _npz), ("npy", _npy), ("parquet", _parquet), ("code", _code(MAP_STYLE))):
        (tmp_path / folder).mkdir()
        with pytest.raises(UserError, match=r"no column 'z' .*; it has 'x', 'y'"):
            read(write(tmp_path / folder), "x", "z")
    (tmp_path / "t.txt").write_text("words")
    with pytest.raises(UserError, match=r"has no columns of arrays: expected \.npz"):
        read(tmp_path / "t.txt", "x")


def test_other_values_at_a_second_reading_are_refused(tmp_path: Path) -> None:
    """As in a run that is resumed: an iterator must give the same examples."""
    changing = f"""
from pathlib import Path
def Data():
    counter = Path({str(tmp_path / "count")!r})
    count = int(counter.read_text()) - 1
    counter.write_text(str(count))
    return [{{"x": i}} for i in range(count)]
"""
    (tmp_path / "count").write_text("5")
    with pytest.raises(UserError, match="3 examples after 4 when it was read a second time"):
        list(read(_code(changing)(tmp_path)).examples())
    random = "import numpy as np\ndef Data():\n    return [{'x': one} for one in np.random.default_rng().random(9)]\n"
    with pytest.raises(UserError, match="other values when it was read a second time"):
        list(read(_code(random)(tmp_path)).examples())


def test_endless_iterator_ends_with_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 40_000}))
    source = _code("import itertools\ndef Data():\n    return ({'x': i} for i in itertools.count())\n")(tmp_path)
    with pytest.raises(ResourceError, match="iterator without an end"):
        read(source)


def test_prepared_examples_are_all_there_once(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(300))
    tables = {"data": {"source": str(tmp_path / "d.npz")}, "train": {"batch_size": 4, "inner_steps": 2}}
    config = config_from_tables(tables)
    data = prepare(config, tmp_path / "cache")
    assert data.layout is not None
    files = [data.layout.column(read_slice(file.slice(0, file.count)), "x") for file in (data.train, data.held_out)]
    assert sorted(np.concatenate(files)) == list(range(300))
    assert 5 <= len(files[1]) <= 30
    order = data.order(config)
    assert order.per_epoch == data.train.count // 8
    assert prepare(config, tmp_path / "cache").key == data.key
    assert "300 examples of x: i32[]" in data.notes[0]


def test_sources_of_equal_columns_are_mixed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(100), y=np.ones(100))
    np.savez(tmp_path / "b.npz", y=np.zeros(60), x=np.arange(60))
    sources = [{"source": str(tmp_path / name), "weight": 1.0} for name in ("a.npz", "b.npz")]
    tables = {"data": {"sources": sources, "columns": ["x", "y"]}, "train": {"batch_size": 4, "inner_steps": 2}}
    data = prepare(config_from_tables(tables), tmp_path / "cache")
    assert data.layout is not None
    y = data.layout.column(read_slice(data.train.slice(0, data.train.count)), "y")
    assert abs(y.mean() - 0.5) < 0.02
    np.savez(tmp_path / "b.npz", y=np.zeros((60, 2)), x=np.arange(60))
    with pytest.raises(UserError, match="have other columns: examples of one run need the same form"):
        prepare(config_from_tables(tables), tmp_path / "cache")


def test_too_few_examples_for_a_batch_are_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(5))
    config = config_from_tables({"data": {"source": str(tmp_path / "d.npz")}, "train": {"batch_size": 4}})
    with pytest.raises(UserError, match=r"has \d examples, and one batch takes 4 \(train.batch_size\)"):
        fit_to_data(config, prepare(config, tmp_path / "cache"))
    assert prepare(config, tmp_path / "cache").train.count + prepare(config, tmp_path / "cache").held_out.count == 5
    few = {"train": {"batch_size": 1}, "fabric": {"workers": 5}, "data": {"source": str(tmp_path / "d.npz")}}
    config = config_from_tables(few)
    with pytest.raises(UserError, match=r"has 4 examples, fewer than fabric.workers = 5"):
        fit_to_data(config, prepare(config, tmp_path / "cache"))
    np.savez(tmp_path / "d.npz", x=np.arange(1))
    with pytest.raises(UserError, match=r"the train part of .* has no example, of 1 in all"):
        prepare(config, tmp_path / "cache")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"columns": ["x"], "packing": True}, "packing is for texts"),
        ({"columns": ["x", "x"]}, "names a column twice"),
        ({"columns": ["x"], "text_key": "t"}, "data.text_key: arrays are read by column"),
        ({"packing": True, "sampling": "fifo"}, "data.packing: expected data.sampling"),
    ],
)
def test_keys_that_do_not_fit_columns_are_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config_from_tables({"data": data})
