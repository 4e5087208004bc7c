"""What a mixture says about itself: times, ages, steps and bytes, in its metrics and its status."""

from __future__ import annotations

from pathlib import Path

from mixture_checks import of_kind
from mixture_cluster import MixtureCluster, make_plan

from planetary.moe.records import FragmentAdvanced
from planetary.moe.tiers import Tier
from planetary.wire import messages as m


def test_the_time_that_a_merge_takes_does_not_begin_with_a_publication_that_was_refused(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=24), seed=6)
    a, _ = cluster.start("a"), cluster.start("b")
    held = cluster.controller.state.fragments
    cluster.until(lambda: held[Tier.ROUTER, 0].version == 1)
    published = [s for s in cluster.sent if isinstance(s, m.PublishFragment) and s.tier == "router"]
    old = next(s for s in published if (s.shard, s.base) == (a.driver.machine.shard, 0))
    stale = cluster.controller.rounds.refused.get("stale", 0)
    cluster._arrive(a.session, old, cluster.store.get(old.payload))
    cluster._gateway()
    assert cluster.controller.rounds.refused["stale"] == stale + 1
    cluster.now += 500
    cluster.until(lambda: held[Tier.ROUTER, 0].version == 2)
    assert all(record.seconds < 100 for record in of_kind(cluster, FragmentAdvanced) if record.tier is Tier.ROUTER)
    assert cluster.finish().ok
