"""The newest state the composers of a run have saved, read from the run folder: from journal and payload store."""

from __future__ import annotations

from pathlib import Path

from planetary.artifacts.payload_store import PayloadStore
from planetary.core.config import load_config
from planetary.core.configuration.schema import Config
from planetary.core.errors import PlanetaryError, UserError
from planetary.data.slices import SliceOrder
from planetary.data.token_file import TokenFile
from planetary.fleet.gateway.run_files import CONFIG, EVENTS, PAYLOADS
from planetary.fleet.protocol.kind_reader import read_journal
from planetary.machine.journal import replay
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.payloads.saved_composers import saved_composer
from planetary.runs.mixture.payloads.surrogates import empty_bank, install, surrogates_from
from planetary.runs.mixture.preparation import plan_over
from planetary.runs.mixture.records import MixtureState
from planetary.runs.mixture.status import READER
from planetary.runs.mixture.training.participant_states import SyncerState, TrainingState
from planetary.runs.mixture.training.saved import REST, SavedTraining, read_training

PATIENCE_S = 5.0  # a user waits for the answer

_NO_TOKENS = SliceOrder(TokenFile(url="", dtype="ui8", count=1, digest=""), 1, 1, 0)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, and not a saved training."""
    return not (folder / REST).is_file()


def read_mixture(folder: Path) -> SavedTraining:
    """Return the newest state of a run, or a saved training. Raises as `read_run` and `read_training`."""
    if not is_run(folder):
        return read_training(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is no run folder and no saved training: expected {CONFIG} in it, as `planetary train` writes "
            f"it, or {REST}"
        )
    return read_run(folder, load_config(folder / CONFIG))


def read_run(folder: Path, config: Config) -> SavedTraining:
    """Return the states a run's composers have saved last: of a finished run their ends, else those of the last
    refresh, which composers reach at different times. `state.steps` are those of the run.

    Args:
        folder: of the run, which may be under way.
        config: of the run, which is one of a mixture.

    Raises:
        UserError: it has not begun, or a payload is gone.
        TrustError: a payload is damaged.
        ResourceError: the payload store does not answer.
    """
    journal = _journal_of(folder, config)
    plan = plan_over(config, _NO_TOKENS, (), journal.owners)
    store = PayloadStore(config.of(MoeConfig).store or folder / PAYLOADS, {}, patience_s=PATIENCE_S)
    bank = empty_bank(plan) if plan.has_surrogates else None
    composers, steps = [], []
    for number, shard in enumerate(journal.shards):
        try:
            state = saved_composer(store, shard.payload, journal.experts_of(number), plan)
            if bank is not None:
                bank = install(bank, surrogates_from(store.get(shard.surrogates)), plan)
        except PlanetaryError as error:
            raise type(error)(
                f"cannot read the saved state of composer {number} of the run in {folder}: {error}. The run's "
                "checkpoints, if it has any, are whole models with real experts"
            ) from error
        composers.append(state)
        steps.append(shard.progress)
    state = TrainingState(min(steps), tuple(composers), bank, SyncerState({}, {}))
    return SavedTraining(plan.model, plan.training, plan.owner_map, state)


def _journal_of(folder: Path, config: Config) -> MixtureState:
    state = replay(read_journal(folder / EVENTS, READER), MixtureState(), folder / EVENTS)
    if not state.shards:
        raise UserError(f"the run in {folder} has not begun: expected {EVENTS} with the start of its composers")
    return state
