from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from planetary.artifacts import safetensors_file
from planetary.artifacts.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    go_back,
    list_checkpoints,
    load_checkpoint,
    load_latest,
    newest_intact,
    verify_checkpoint,
    write_checkpoint,
)
from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.core.errors import LocalProtocolError, ResourceError, TrustError, UserError
from planetary.core.tensors import TensorSpec

SPECS = (TensorSpec("w/é", "f32", (4, 3)), TensorSpec("b", "bf16", (5,)), TensorSpec("s", "f32", ()))


def make(round_: int, **changes: object) -> Checkpoint:
    rng = np.random.default_rng(round_)

    def draw() -> dict[str, np.ndarray]:
        return {spec.name: np.asarray(rng.standard_normal(spec.shape), np.float32) for spec in SPECS}

    info = CheckpointInfo(
        round=round_,
        config_hash="c" * 64,
        model="tiny",
        model_digest="d" * 64,
        param_specs=SPECS,
        data_key="k" * 64,
        controller=msgspec.Raw(json.dumps({"tokens_total": round_ * 1000, "ledger": {"next": round_}}).encode()),
        random_state={"seed": 7},
    )
    return Checkpoint(msgspec.structs.replace(info, **changes), draw(), draw())


def same(left: Checkpoint, right: Checkpoint) -> bool:
    tensors = all(
        a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() and a[k].shape == b[k].shape for k in a)
        for a, b in ((left.params, right.params), (left.velocity, right.velocity))
    )
    left_info, right_info = (
        msgspec.structs.replace(c.info, versions={}, controller=msgspec.Raw(b"0")) for c in (left, right)
    )
    controllers = msgspec.json.decode(left.info.controller) == msgspec.json.decode(right.info.controller)
    return tensors and left_info == right_info and controllers


def test_moments_have_names_of_their_own_beside_the_velocity(tmp_path: Path) -> None:
    moments = {"second:b": np.arange(5, dtype=np.float32), "steps:b": np.array(3, np.float32)}
    written = msgspec.structs.replace(make(3), moments=moments)
    path = write_checkpoint(tmp_path, written, keep=2)
    read = load_latest(tmp_path)
    assert same(read, written)
    assert {name: (tensor.tobytes(), tensor.shape) for name, tensor in read.moments.items()} == {
        name: (tensor.tobytes(), tensor.shape) for name, tensor in moments.items()
    }
    assert read_safetensors(path / "outer.safetensors")[1].keys() == {*written.velocity, *moments}
    for wrong in ({"b": np.zeros(5, np.float32)}, {"second:b": np.zeros(5)}):
        with pytest.raises(LocalProtocolError, match="moments must be float32 tensors with names"):
            write_checkpoint(tmp_path, msgspec.structs.replace(written, moments=wrong), keep=2)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = make(3)
    path = write_checkpoint(tmp_path / "checkpoints", written, keep=2)
    assert path == tmp_path / "checkpoints" / "round-000003"
    read = load_latest(tmp_path / "checkpoints")
    assert same(read, written)
    assert read.info.versions.keys() == {"planetary", "python", "numpy"}
    assert read.params["w/é"].flags.writeable
    assert sorted(entry.name for entry in path.iterdir()) == [
        "COMMITTED",
        "outer.safetensors",
        "params.safetensors",
        "state.json",
    ]


def test_state_json_is_for_people_too(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make(3), keep=1)
    state = json.loads((path / "state.json").read_text("utf-8"))
    assert state["info"]["controller"] == {"tokens_total": 3000, "ledger": {"next": 3}}
    assert state["info"]["param_specs"][1] == {"name": "b", "dtype": "bf16", "shape": [5]}
    record = state["files"]["params.safetensors"]
    assert record["sha256"] == hashlib.sha256((path / "params.safetensors").read_bytes()).hexdigest()
    assert [tensor["dtype"] for tensor in record["tensors"]] == ["f32", "f32", "f32"]


def test_the_newest_stay(tmp_path: Path) -> None:
    for round_ in (1, 2, 3, 10):
        write_checkpoint(tmp_path, make(round_), keep=2)
    assert [entry.round for entry in list_checkpoints(tmp_path)] == [3, 10]
    assert load_latest(tmp_path).info.round == 10
    assert not list(tmp_path.glob(".*"))


def test_a_resume_from_further_back_replaces_the_rounds_after_it(tmp_path: Path) -> None:
    for round_ in (1, 2, 3):
        write_checkpoint(tmp_path, make(round_), keep=5)
    again = make(2, model="second time")
    write_checkpoint(tmp_path, again, keep=5)
    assert [entry.path.name for entry in list_checkpoints(tmp_path)] == ["round-000001", "round-000002"]
    assert load_latest(tmp_path).info.model == "second time"


def test_without_checkpoints_there_is_nothing_to_load(tmp_path: Path) -> None:
    (tmp_path / "round-x").mkdir()
    (tmp_path / "round-000007").write_text("a file is no checkpoint")
    for folder in (tmp_path, tmp_path / "absent"):
        assert list_checkpoints(folder) == []
        with pytest.raises(UserError, match="there is no checkpoint in"):
            load_latest(folder)
    with pytest.raises(UserError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "absent")


# --- damage -------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["params.safetensors", "outer.safetensors", "state.json", "COMMITTED"])
@pytest.mark.parametrize("damage", ["first", "middle", "last", "cut", "longer", "gone"])
def test_damaged_checkpoint_is_named_and_the_previous_offered(tmp_path: Path, name: str, damage: str) -> None:
    before = make(1)
    earlier = write_checkpoint(tmp_path, before, keep=2)
    path = write_checkpoint(tmp_path, make(2), keep=2) / name
    size = path.stat().st_size
    match damage:
        case "first":
            flip(path, 0)
        case "middle":
            flip(path, size // 2)
        case "last":
            if name == "COMMITTED":
                return  # a changed line end after the digest is no damage
            flip(path, size - 1)
        case "cut":
            path.write_bytes(path.read_bytes()[: size // 2])
        case "longer":
            path.write_bytes(path.read_bytes() + b"x")
        case "gone":
            path.unlink()
    with pytest.raises(TrustError) as caught:
        load_latest(tmp_path)
    text = str(caught.value)
    assert f"{tmp_path}/round-000002 is damaged" in text
    assert name in text
    assert f"newest intact one is {earlier} (round 1)" in text
    assert same(load_checkpoint(earlier), before)
    assert newest_intact(tmp_path) is not None
    assert verify_checkpoint(earlier) == ""
    assert "damaged" in verify_checkpoint(path.parent)


def test_when_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    flip(write_checkpoint(tmp_path, make(1), keep=2) / "params.safetensors", 200)
    with pytest.raises(TrustError, match="No other checkpoint in this folder is intact"):
        load_latest(tmp_path)


def test_a_newer_format_is_refused_with_its_number(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make(1), keep=2)
    raw = (path / "state.json").read_bytes().replace(b'"format": 1', b'"format": 9')
    (path / "state.json").write_bytes(raw)
    (path / "COMMITTED").write_text(hashlib.sha256(raw).hexdigest())
    with pytest.raises(TrustError, match="has format 9, this version of planetary reads 1"):
        load_checkpoint(path)


def test_unverified_loading_still_refuses_a_cut_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make(1), keep=2)
    flip(path / "params.safetensors", (path / "params.safetensors").stat().st_size - 1)
    assert load_checkpoint(path, verify=False).info.round == 1
    raw = (path / "params.safetensors").read_bytes()
    (path / "params.safetensors").write_bytes(raw[:-1])
    with pytest.raises(TrustError, match="was cut"):
        load_checkpoint(path, verify=False)


def test_tensors_that_do_not_fit_their_specs_are_a_bug(tmp_path: Path) -> None:
    good = make(1)
    for params in (
        {**good.params, "b": np.zeros(4, np.float32)},
        {**good.params, "b": np.zeros(5, np.float64)},
        {name: array for name, array in good.params.items() if name != "b"},
    ):
        with pytest.raises(LocalProtocolError, match="parameters must be float32"):
            write_checkpoint(tmp_path, Checkpoint(good.info, params, good.velocity), keep=1)
    assert list(tmp_path.iterdir()) == []


# --- a full disk --------------------------------------------------------------------------------------------


def test_file_size_limit_leaves_the_previous_checkpoint_valid(tmp_path: Path) -> None:
    before = make(1)
    write_checkpoint(tmp_path, before, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # the kernel refuses the next bytes, as on a full disk
    try:
        with pytest.raises(ResourceError) as caught:
            write_checkpoint(tmp_path, make(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "writing the checkpoint of round 2" in str(caught.value)
    assert "the checkpoint of round 1 stays valid" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["round-000001"]
    assert same(load_latest(tmp_path), before)


# --- the tensor files ---------------------------------------------------------------------------------------


arrays = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    max_size=4,
)


@given(arrays)
def test_the_safetensors_library_reads_the_same(tensors: dict[str, np.ndarray]) -> None:
    import safetensors.numpy

    specs = [TensorSpec(name, "f32", array.shape) for name, array in tensors.items()]
    raw = b"".join(safetensors_pieces(specs, tensors))
    read = safetensors.numpy.load(raw)
    assert read.keys() == tensors.keys()
    assert all(read[name].tobytes() == array.tobytes() for name, array in tensors.items())
    assert all(read[name].shape == array.shape for name, array in tensors.items())


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    import safetensors.numpy

    tensors = {"a": np.arange(6, dtype=np.int64).reshape(2, 3), "m": np.array([True, False])}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"note": "metadata is skipped"})
    specs, read = read_safetensors(tmp_path / "x.safetensors")
    assert {spec.name: spec.dtype for spec in specs} == {"a": "i64", "m": "i1"}
    assert all(read[name].tobytes() == array.tobytes() for name, array in tensors.items())


def test_large_tensors_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 8)
    values = np.arange(5, dtype=np.float32)
    pieces = list(safetensors_pieces([TensorSpec("x", "f32", (5,))], {"x": values}))
    assert [len(piece) for piece in pieces[1:]] == [8, 8, 4]
    assert b"".join(pieces[1:]) == values.tobytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{x",
        (60).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'.ljust(60) + b"1234",
        (60).to_bytes(8, "little") + b'{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'.ljust(60) + b"1234",
        (60).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'.ljust(60) + b"1234",
        (60).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(60) + b"1234",
    ],
)
def test_a_malformed_tensor_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(TrustError):
        read_safetensors(tmp_path / "x")


def test_a_type_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="complex<f32> cannot be kept"):
        list(safetensors_pieces([TensorSpec("z", "complex<f32>", (1,))], {}))


def test_protected_checkpoints_stay_besides_the_newest(tmp_path: Path) -> None:
    for round_ in range(1, 7):
        write_checkpoint(tmp_path, make(round_), keep=2, protected=(2,) if round_ > 2 else ())
    assert [entry.round for entry in list_checkpoints(tmp_path)] == [2, 5, 6]


def test_going_back_takes_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    """Going back gives the newest intact checkpoint and removes what came after."""
    for round_ in range(1, 6):
        write_checkpoint(tmp_path, make(round_), keep=9)
    [damaged] = [entry for entry in list_checkpoints(tmp_path) if entry.round == 3]
    state = damaged.path / "params.safetensors"
    state.write_bytes(b"x" + state.read_bytes()[1:])
    found = go_back(tmp_path, 3)
    assert found is not None
    assert same(found, make(2))
    assert [entry.round for entry in list_checkpoints(tmp_path)] == [1, 2]


def test_going_back_to_before_the_first_checkpoint_leaves_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make(4), keep=2)
    assert go_back(tmp_path, 3) is None
    assert list_checkpoints(tmp_path) == []
    assert go_back(tmp_path / "none", 3) is None
