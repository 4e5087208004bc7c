"""Who has the state that all take, and who breaks a rule."""

from __future__ import annotations

from planetary.collectives.master.group_operations import content_digest, elect, elect_again
from planetary.collectives.protocol.messages import ArrayEntry, Sync
from planetary.collectives.protocol.options import SyncStrategy

POPULAR, SEND, RECEIVE = SyncStrategy.ENFORCE_POPULAR, SyncStrategy.SEND_ONLY, SyncStrategy.RECEIVE_ONLY


def offer(
    revision: int, *digests: str, strategy: SyncStrategy = POPULAR, shape: tuple[int, ...] = (4,), restart: bool = False
) -> Sync:
    entries = tuple(ArrayEntry(f"k{i}", "f32", shape, digest) for i, digest in enumerate(digests))
    return Sync(call=1, timeout_s=1, revision=revision, strategy=strategy, entries=entries, restart=restart)


def test_the_popular_content_wins_and_only_dirty_names_travel() -> None:
    found = elect({"a": offer(3, "x", "y"), "b": offer(3, "x", "z"), "c": offer(3, "x", "y")}, 2)
    assert (found.revision, dict(found.removed)) == (3, {})
    assert [(f.name, f.digest, f.donors) for f in found.fetch["b"]] == [("k1", "y", ("a", "c"))]
    assert found.fetch["a"] == found.fetch["c"] == ()


def test_a_newer_revision_wins_over_a_more_popular_one() -> None:
    found = elect({"a": offer(2, "old"), "b": offer(2, "old"), "c": offer(3, "new")}, 2)
    assert found.revision == 3
    assert {peer for peer, items in found.fetch.items() if items} == {"a", "b"}


def test_the_first_revision_is_free_and_then_goes_up_by_one() -> None:
    assert elect({"a": offer(100, "x"), "b": offer(0, "y")}, None).revision == 100
    found = elect({"a": offer(102, "x"), "b": offer(101, "y")}, 100)
    assert (found.revision, list(found.removed)) == (101, ["a"])
    assert "expected revision 101 at most" in found.removed["a"]
    assert found.fetch["b"] == ()


def test_a_revision_goes_back_only_when_its_holders_are_gone() -> None:
    offers = {"a": offer(1, "x"), "b": offer(5, "y", strategy=RECEIVE)}
    assert "revision 1, the group is at 5" in elect(offers, 5).failure
    assert elect({"a": offer(1, "x")}, 5).revision == 1


def test_a_tie_goes_to_the_first_in_the_ring() -> None:
    assert elect({"b": offer(1, "y"), "a": offer(1, "x")}, 0).fetch["a"][0].digest == "y"


def test_receivers_have_no_vote_and_senders_may_not_receive() -> None:
    offers = {
        "a": offer(1, "x", strategy=SEND),
        "b": offer(1, "y", strategy=RECEIVE),
        "c": offer(9, "y", strategy=RECEIVE),
    }
    found = elect(offers, 0)
    assert (found.revision, dict(found.removed)) == (1, {})
    assert found.fetch["b"][0].donors == ("a",)
    assert found.fetch["c"][0].donors == ("a",)
    rivals = {"a": offer(1, "x", strategy=SEND), "b": offer(1, "y", strategy=SEND)}
    assert "SEND_ONLY" in elect(rivals, 0).removed["b"]


def test_nobody_to_send_is_a_failure_for_all() -> None:
    assert "RECEIVE_ONLY" in elect({"a": offer(1, "x", strategy=RECEIVE)}, 0).failure


def test_another_shape_is_removed_and_told_both() -> None:
    found = elect({"a": offer(1, "x"), "b": offer(1, "x"), "c": offer(1, "z", shape=(5,))}, 0)
    assert "expected f32[4], found f32[5]" in found.removed["c"]
    turned = elect({"a": offer(1, "x"), "b": offer(1, "x"), "c": offer(1, "x", shape=(2, 2))}, 0)
    assert "expected f32[4], found f32[2, 2]" in turned.removed["c"]
    missing = elect({"a": offer(1, "x", "y"), "b": offer(1, "x", "y"), "c": offer(1, "x")}, 0)
    assert "'k1': expected f32[4], found no such entry" in missing.removed["c"]


def test_contents_allowed_to_differ_are_not_compared() -> None:
    found = elect({"a": offer(1, "x", ""), "b": offer(1, "y", ""), "c": offer(1, "y", "")}, 0)
    assert [f.name for f in found.fetch["a"]] == ["k0"]


def test_a_group_that_emptied_goes_on_from_its_last_state_only() -> None:
    agreed = content_digest(offer(7, "x", "y").entries, "xxh3")

    def again(*offers: Sync, algorithm: str = "xxh3") -> str:
        found = elect_again({str(i): o for i, o in enumerate(offers)}, 7, agreed, algorithm)
        return found.failure or f"revision {found.revision}"

    assert again(offer(7, "x", "y"), offer(0, "new", "new")) == "revision 7"
    assert again(offer(8, "x2", "y2")) == "revision 8"  # trained from it, and saved, before the group was lost
    assert "revision 7, all peers that did have left, and revision 0 is on offer" in again(offer(0, "x", "y"))
    assert "revision 7, all peers that did have left, and another content" in again(offer(7, "x", "z"))
    assert again(offer(7, "other", "digests"), algorithm="blake2b") == "revision 7"  # cannot be compared
    assert again(offer(0, "a", restart=True), offer(0, "a", restart=True)) == "revision 0"
    assert "restart=True" in again(offer(0, "a", restart=True), offer(0, "a"))  # one peer alone does not decide it
    receiver = offer(0, "x", "y", strategy=RECEIVE)
    assert again(offer(3, "x", "y", restart=True), receiver) == "revision 3"


def test_twenty_thousand_names_are_elected_beside_other_work() -> None:
    """It was a comparison of every entry with every other one: 900 names of four peers took eight seconds."""
    names = [f"layer {number}" for number in range(20_000)]
    same = Sync(
        call=1,
        timeout_s=1,
        revision=1,
        strategy=POPULAR,
        entries=tuple(ArrayEntry(name, "f32", (4,), "x") for name in names),
    )
    other = Sync(
        call=1,
        timeout_s=1,
        revision=1,
        strategy=POPULAR,
        entries=tuple(ArrayEntry(name, "f32", (4,), "y") for name in names),
    )
    found = elect({**{f"p{number}": same for number in range(7)}, "late": other}, None)
    assert [item.name for item in found.fetch["late"]] == names
    assert {item.donors for item in found.fetch["late"]} == {tuple(f"p{number}" for number in range(7))}
    assert all(not found.fetch[f"p{number}"] for number in range(7))
