"""`[federation]`, and the keys that a hub and its sites honour."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from planetary.core.configuration.honoured import HonouredKeys
from planetary.core.configuration.ranges import Count, Index, NotNegative, Share, Text
from planetary.core.configuration.sections import KindSection
from planetary.runs.rounds.config import SECTIONS


class SiteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of a hub's sites: `{ name = "paris", data = "own", most_share = 0.5 }`."""

    name: Text  # site name, as in the site's `federation.site`
    role: Literal["trainer", "standby"] = "trainer"  # "standby": gets every version, and contributes nothing
    # "part": the site trains an exclusive part of the hub's data; "own": data the hub does not have
    data: Literal["part", "own"] = "part"
    every_rounds: Index = 0  # rounds of this site between two contributions; 0: as `federation.every_rounds`
    most_share: Share = 1.0  # largest fraction of the weights of a merge with several sites
    trust: Literal["full", "judged"] = "full"  # "judged": a contribution counts only if the others' are similar
    # of its line to the hub: a round waits for it as much longer as the parameters take both ways; 0: not known
    mbit_per_s: NotNegative = 0.0
    # number of the site's part of the hub's data, from 1; 0: the site's place among those with a part. A site that
    # replaces another one has the same number
    part: Index = 0


class FederationConfig(KindSection, frozen=True):
    """`[federation]`: a hub and its sites, each a gateway with workers."""

    section: ClassVar[str] = "federation"
    paths: ClassVar[tuple[str, ...]] = ("token_file",)

    # hub only: the sites that may join: [{ name = "paris" }, { name = "tokyo" }]; empty: this is no hub
    sites: tuple[SiteEntry, ...] = ()
    every_rounds: Count = 1  # hub only: a site's rounds between two contributions
    # hub only: parts of the data, one for each site with a part; 0: as many as `sites` has. More leave room for sites
    # that are added later
    parts: Index = 0
    hub: str = ""  # site only: "HOST:PORT" of the hub; empty: the site trains alone
    site: str = ""  # site only: name at the hub; empty: the name of the run
    run: str = ""  # site only: job to take part in, where the hub has several runs; empty: the only one
    token_file: str = ""  # site only: path of the hub's invite; empty: no TLS, for loopback only
    # site only: how long it waits between two rounds for a hub that does not answer, before it goes on alone
    patience_s: NotNegative = 60.0

    @property
    def ended_by_another(self) -> bool:
        return bool(self.run)

    @property
    def merges_other_runs(self) -> bool:
        return bool(self.hub or self.sites)

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if self.sites and self.hub:
            return (
                f"federation: sites makes this a hub and hub = {self.hub!r} a site of another one: leave one of the "
                "two out"
            )
        names = [site.name for site in self.sites]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return f"federation.sites names {twice[0]} twice"
        divided = [site for site in self.sites if site.data == "part"]
        parts = max(sum(not site.part for site in divided), *(site.part for site in divided), 0)
        if 0 < self.parts < parts:
            return (
                f"federation.parts: expected at least {parts}, one for each site that trains a part of the data, found "
                f"{self.parts}"
            )
        return ""

    def mathematics(self) -> dict[str, Any]:
        return {"every_rounds": self.every_rounds, "parts": self.parts} if self.sites else {}


_FEDERATED = {
    **dict.fromkeys(
        ("sync.compression", "sync.broadcast_compression", "sync.start_compression"),
        "a hub and its sites send whole parameters; --preset rda does so",
    ),
    "sync.overlap": "a site hands over whole rounds",
    "sync.topology": "a ring has its parameters on its workers",
    "sync.*": "a federation is synchronised in stars, without codec and overlap",
    "checkpoint.every": "a contribution has to outlive its gateway, which writes a checkpoint after every round",
    "data.max_epochs": "the hub's train.rounds end a federation",
    "train.target_minutes": "the hub's train.rounds end a federation",
    "model.smaller": "a federation trains one model, whose size no machine chooses",
    "fabric.leases": "the data of a federation is divided in advance",
}
_OF_SITES = "it is a key of the sites"

HUB = HonouredKeys(
    kind="hub",
    keys=(*SECTIONS, "federation.*", "sinks"),
    without={**_FEDERATED, **dict.fromkeys(("federation.hub", "federation.site", "federation.run"), _OF_SITES)}
    | {"federation.token_file": _OF_SITES},
    passed_on=(
        *(f"optimizer.{key}" for key in ("learning_rate", "warmup_steps", "schedule")),
        *("optimizer.final_fraction", "train.inner_state", "data.delivery"),
        *("fabric.backend", "fabric.target", "fabric.island", "fabric.threads", "federation.patience_s"),
    ),
)
SITE = HonouredKeys(
    kind="site",
    keys=(*SECTIONS, "federation.*", "sinks"),
    without=_FEDERATED
    | dict.fromkeys(("eval.patience", "eval.least_gain"), "the hub ends a federation, and has these keys, too")
    | dict.fromkeys(("federation.sites", "federation.every_rounds", "federation.parts"), "it is a key of the hub"),
)
