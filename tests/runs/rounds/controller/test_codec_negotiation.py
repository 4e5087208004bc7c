"""Which workers a run with codecs takes, and whether they get whole parameters or a change."""

from __future__ import annotations

import msgspec
import pytest
from controller_bench import Bench
from small_training import small_policy

from planetary.core.config import config_from_tables
from planetary.core.errors import UserError
from planetary.core.registry import Chosen
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.admission import refuse
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.changes import CodedChange, RelayedChange, unchanged
from planetary.runs.rounds.records import ParametersSent
from planetary.runs.rounds.state import ControllerState


def hello(*codecs: str) -> m.Hello:
    version = small_policy(rounds=1, workers=1).iree_version
    return m.Hello(
        role="worker",
        protocol=m.FABRIC.version,
        software="test",
        token="",
        worker="a/0",
        node="a",
        pid=1,
        backend="cpu",
        target="host",
        iree_version=version,
        codecs=codecs,
    )


def test_worker_without_a_codec_is_refused_with_both_lists() -> None:
    plain = small_policy(rounds=1, workers=1)
    policy = msgspec.structs.replace(plain, compression=rm.Compression(up="sparse", down="int4"))
    refusal = refuse(hello("bf16", "int4"), policy, ControllerState(), {})
    assert refusal is not None
    assert refusal.code == "codec"
    assert "sends updates as sparse, and the planetary of worker a/0 has bf16, int4" in refusal.reason
    assert refuse(hello("sparse", "int4"), policy, ControllerState(), {}) is None
    assert refuse(hello(), plain, ControllerState(), {}) is None


def test_gateway_without_irees_compiler_takes_pjrt_only() -> None:
    policy = msgspec.structs.replace(small_policy(rounds=1, workers=1), iree_version="")
    refusal = refuse(hello(), policy, ControllerState(), {})
    assert refusal is not None
    assert "install iree-base-compiler there" in refusal.reason
    assert refuse(msgspec.structs.replace(hello(), backend="pjrt:cuda"), policy, ControllerState(), {}) is None


@pytest.mark.parametrize(
    ("sync", "outer", "words"),
    [
        ({"topology": "ring", "compression": "int4"}, {}, "only the star compresses"),
        ({"broadcast_compression": "int4"}, {}, "would lose the rest"),
        ({"compression": "sparse"}, {"merge": "median"}, "most numbers of most workers are 0"),
        ({"compression": "zip"}, {}, "unknown codec 'zip'. There are none, float32, bf16"),
        ({"compression": "sign", "broadcast_compression": "relay"}, {"momentum": 0.9}, "would not have the velocity"),
        ({"compression": "sign", "broadcast_compression": "relay", "overlap": "async"}, {}, "of a whole round"),
        ({"start_compression": "int8"}, {}, "workers that send deltas"),
    ],
)
def test_codecs_that_do_not_go_with_the_rest_are_refused(
    sync: dict[str, str], outer: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        config_from_tables({"sync": sync, "outer": outer})


def test_worker_gets_a_change_only_from_its_version() -> None:
    bench = Bench(workers=2)
    star = bench.controller.topology
    first, late = bench.join("a"), bench.join("b")
    workers = bench.controller.desk.workers
    star.stepped(e.OuterStepDone(1, 1.0, None, CodedChange(digest="d1")))

    def sent_to(session: int, version: int) -> rm.Parameters:
        bench.controller.desk.out.clear()
        star.send_parameters(workers[session], version)
        (send,) = [one for one in bench.controller.desk.out if isinstance(one, e.Send)]
        assert isinstance(send.message, rm.Parameters)
        whole = send.message.since < 0
        assert send.payload == (e.ParametersOf(version) if whole else e.ChangeOf(version))
        return send.message

    workers[first].version, workers[late].version = 0, -1
    assert sent_to(first, 1) == rm.Parameters(version=1, since=0, digest="d1")
    assert sent_to(late, 1) == rm.Parameters(version=1)
    workers[first].version = 0
    star.stepped(e.OuterStepDone(2, 1.0, None, CodedChange(digest="d2")))
    assert sent_to(first, 2) == rm.Parameters(version=2)
    assert sent_to(late, 2) == rm.Parameters(version=2, since=1, digest="d2")


RELAYED = RelayedChange(
    relay=rm.Relay(rule=Chosen("rda"), rate=1.0, tasks=(4, 5, 6), digests=("a", "b", "c")),
    digest="made",
    payload_bytes=100,
    more_bytes=24,
    whole_bytes=300,
)


def test_relayed_form_is_chosen_by_bytes_and_journalled() -> None:
    """A worker gets the payloads of the others; whole parameters where those are fewer bytes, or it has no base."""
    bench = Bench(workers=3)
    star = bench.controller.topology
    first, late, other = bench.join("a"), bench.join("b"), bench.join("c")
    workers = bench.controller.desk.workers
    for task, session in ((4, first), (5, first), (6, late)):
        star.accept(workers[session], task, 0)
    star.stepped(e.OuterStepDone(1, 1.0, None, RELAYED))
    bench.controller.desk.out.clear()
    for session in (first, late, other):
        workers[session].version = 0
        star.send_parameters(workers[session], 1)
    star.lacks_parameters(workers[first])
    star.send_parameters(workers[first], 1)
    sends = [one for one in bench.controller.desk.out if isinstance(one, e.Send)]
    assert [send.payload for send in sends] == [
        e.ChangeOf(1, (4, 5)),
        e.ChangeOf(1, (6,)),
        e.ParametersOf(1),
        e.ParametersOf(1),
    ]
    records = [one.record for one in bench.controller.desk.out if isinstance(one, e.Append)]
    assert [(r.form, r.nbytes, r.why) for r in records if isinstance(r, ParametersSent)] == [
        ("relay", 124, "1 payloads of other workers"),
        ("relay", 224, "2 payloads of other workers"),
        ("whole", 300, "3 payloads of other workers have 324 bytes"),
        ("whole", 300, "it has no parameters"),
    ]


def test_resumed_relay_sends_whole_parameters() -> None:
    """After a resume workers of a relaying run are sent whole parameters."""
    policy = small_policy(rounds=3, workers=1)
    change = unchanged(rm.Compression(up="sign", down="relay"), policy.spec.params)
    offer = change.offer(2, 1, ())
    assert (offer.message, offer.nbytes, offer.why) == (rm.Parameters(version=2), 4 * 8, "it has version 1")
    assert unchanged(rm.Compression(up="sign"), policy.spec.params).offer(2, 1, ()).why == ""
