"""Where a site stands towards the hub, in lasting files of the run folder.

    federation/anchor       the version that the site trains from, and the parameters that it went on with
    federation/offered      the site's parameters when it last contributed

Between them and the newest parameters lie the tokens that are in no version of the hub. A version comes with the number
of contained tokens of the site, which says where these begin: at the contribution if that was merged, else at the
anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.packed_arrays import pack_arrays, unpack_arrays
from planetary.artifacts.store import write_atomically
from planetary.core import decoding
from planetary.core.errors import PlanetaryError, TrustError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.federation.messages import SiteTerms
from planetary.sync.contributions import rebase

FOLDER = "federation"  # folder in the run folder

_VERSION, _START = "version.", "start."  # prefixes of tensors' names


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the hub a site trains from."""

    hub: str  # identity of the hub's run
    terms: SiteTerms
    version: int
    round: int  # round of the site before the start from this point
    tokens: int  # tokens of the site in the version


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """A contribution whose merge the site has not seen yet."""

    round: int  # round of the site before the contribution
    tokens: int  # last token of the site in the contribution


PointT = TypeVar("PointT", Anchor, Offered)


class SitePoints:
    """One per site. Used from one thread at a time.

    Attributes:
        anchor: None before the first version.
        offered: None where the anchor's version is newer than the last contribution.
    """

    def __init__(self, run_folder: Path, specs: Sequence[TensorSpec], files: DurableFiles = DISK) -> None:
        """Read the files; `specs`: of the model's parameters. Raises `TrustError` for a file that is damaged."""
        self._folder, self.specs, self._files = run_folder / FOLDER, tuple(specs), files
        self.anchor: Anchor | None = None
        self.offered: Offered | None = None
        self._version: Tensors = {}  # masters of the anchor's version
        self._start: Tensors = {}  # parameters of the site's newest start
        self._ends: Tensors = {}  # parameters of the last contribution
        self._read()

    def began_with(self, round_: int) -> Tensors | None:
        """Return the parameters the site went on with after `round_`, None where they are the site's own."""
        return self._start if self.anchor is not None and self.anchor.round == round_ else None

    def is_anchor(self, version: int, params: Tensors) -> bool:
        """Whether a version of the hub is the anchor's; a hub that went back may have another version of the number."""
        return (
            self.anchor is not None
            and self.anchor.version == version
            and all(np.array_equal(self._version[s.name], params[s.name]) for s in self.specs)
        )

    def forget_after(self, round_: int) -> None:
        """Drop an anchor and a contribution later than `round_`, from which the run goes on."""
        if self.anchor is not None and self.anchor.round > round_:
            self.anchor, self._version, self._start = None, {}, {}
        if self.anchor is None or (self.offered is not None and self.offered.round > round_):
            self.offered, self._ends = None, {}

    def adopt(self, anchor: Anchor, params: Tensors, newest: Tensors, base: Anchor | Offered | None) -> Tensors:
        """Let a version be the anchor; return the masters the site goes on with.

        Args:
            anchor: the new one.
            params: the version, float32 masters.
            newest: the site's own masters.
            base: where the tokens begin put on top of the version; None: nothing is.

        Raises:
            ResourceError: the disk is full.
        """
        version = {spec.name: params[spec.name] for spec in self.specs}
        start = version
        if base is not None:
            start = rebase(version, self._ends if isinstance(base, Offered) else self._version, newest)
        arrays = {_VERSION + name: values for name, values in version.items()}
        if start is not version:
            arrays |= {_START + name: values for name, values in start.items()}
        write_atomically(self._folder / "anchor", pack_arrays("anchor", anchor, arrays), self._files)
        self.anchor, self._version, self._start = anchor, version, start
        self.offered, self._ends = None, {}
        return start

    def offer(self, offered: Offered, newest: Tensors) -> None:
        """Save the contribution that is about to be sent. Raises `ResourceError`."""
        write_atomically(self._folder / "offered", pack_arrays("offered", offered, newest), self._files)
        self.offered, self._ends = offered, newest

    def _read(self) -> None:
        found = self._unpack("anchor", Anchor)
        if found is None:
            return
        self.anchor, arrays = found
        self._version = self._part(arrays, _VERSION)
        self._start = self._part(arrays, _START) or self._version
        last = self._unpack("offered", Offered)
        if last is not None and last[0].round > self.anchor.round:
            self.offered, self._ends = last

    def _unpack(self, name: str, kind: type[PointT]) -> tuple[PointT, dict[str, np.ndarray]] | None:
        path = self._folder / name
        try:
            fields, arrays = unpack_arrays(path.read_bytes(), name)
            return decoding.from_json(fields, kind), arrays
        except FileNotFoundError:
            return None
        except (PlanetaryError, msgspec.MsgspecError) as error:
            raise TrustError(
                f"{path} is damaged: {error}. Without it this site cannot tell which of its tokens its hub has; join "
                "the hub with a new run folder and under another name"
            ) from error

    def _part(self, arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
