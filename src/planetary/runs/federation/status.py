"""Status of a federation at one moment, as seen by the hub or by a site."""

from __future__ import annotations

from functools import partial
from typing import Protocol, runtime_checkable

import msgspec

from planetary.runs.federation.config import SiteEntry
from planetary.runs.federation.messages import SiteTerms
from planetary.runs.federation.records import SiteRoundsRecord, SiteState
from planetary.runs.rounds.records import RoundsRecord
from planetary.runs.rounds.state import ControllerState
from planetary.runs.rounds.training_status import TrainingReader, TrainingStatus, status_of_files

HUB_READER = TrainingReader(
    name="hub",
    records=RoundsRecord,
    fold=ControllerState,
    status=TrainingStatus,
    status_of_files=partial(status_of_files, kind="hub"),
)
SITE_READER = TrainingReader(
    name="site",
    records=SiteRoundsRecord,
    fold=SiteState,
    status=TrainingStatus,
    status_of_files=partial(status_of_files, kind="site"),
)


class FederatedSite(msgspec.Struct, frozen=True, kw_only=True):
    """One site, as the hub sees it."""

    terms: SiteEntry
    part: int  # part of the hub's data, from 0
    parts: int  # 1: the site has its own data, or is the only one
    connected: bool
    joined: bool  # ready for contributions
    tokens: int  # tokens of this site in the newest version
    task_rounds: int | None  # rounds done of those it was asked for; None: it was asked for none
    lost: int  # how often it was
    banned: str  # why it is not used any more; "": it is


class FederationStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands that is a hub, or belongs to one."""

    role: str  # "hub" or "site"
    hub: str  # identity of the hub's run; "": not known to the site yet
    version: int | None  # newest of the hub, or the one the site trains from; None: it has none yet
    tokens_total: int  # tokens in the hub's version; of a site: trained tokens
    uncounted: int  # site only: tokens missing in the version it trains from
    waits: str  # site only: reason of a wait between two rounds, "" without a wait
    sites: tuple[FederatedSite, ...]  # hub only: sites in the order of the configuration


def terms_in_words(terms: SiteTerms) -> str:
    """Describe a site's terms in a federation."""
    entry = terms.entry
    texts = [f"part {terms.part + 1} of {terms.parts}" if entry.data == "part" else "data of its own"]
    texts += ["standby"] if entry.role == "standby" else []
    texts += [f"every {entry.every_rounds} rounds"] if entry.every_rounds else []
    texts += [f"at most {entry.most_share:.0%} of the weight"] if entry.most_share < 1 else []
    texts += ["judged"] if entry.trust == "judged" else []
    texts += [f"{entry.mbit_per_s:g} Mbit/s"] if entry.mbit_per_s else []
    return ", ".join(texts)


@runtime_checkable
class InFederation(Protocol):
    """The run of a hub, or of a site, at its gateway."""

    def federation(self) -> FederationStanding:
        """Return how the run stands."""
        ...
