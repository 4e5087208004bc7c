"""The tokens of a run once more on one worker, for comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from planetary.core.configuration.schema import Config, SyncConfig
from planetary.monitor.run_folder import BASELINE, load_history, read_metrics


def baseline_of(config: Config, folder: Path) -> tuple[Config, Path] | None:
    """Return configuration and folder of the baseline of the finished run in `folder`; None if it has been trained.

    The same number of tokens on one worker without DiLoCo, in `baseline/` in the run folder. One worker, outer rate 1
    and no momentum are plain training, bit for bit. A baseline of fewer tokens, of a continued or interrupted run, is
    removed: the learning rates were those of a shorter training.
    """
    place = folder / BASELINE
    leases = load_history(folder).metrics[-1].tokens_total // config.targets_per_slice
    trained = read_metrics(place)
    if trained and trained[-1].tokens_total >= leases * config.targets_per_slice:
        return None
    shutil.rmtree(place, ignore_errors=True)
    replace = msgspec.structs.replace
    plain = replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-baseline"),
        train=replace(config.train, rounds=leases),
        # A codec, a radial average, or an outer optimizer with state would make it another training.
        outer=replace(config.outer, optimizer="nesterov", learning_rate=1.0, momentum=0.0, merge="mean"),
        sync=SyncConfig(),
        fabric=replace(config.fabric, workers=1, quorum=1, port=0),
        eval=replace(config.eval, every=config.eval.every * config.fabric.workers),
        checkpoint=replace(config.checkpoint, every=max(1, leases // 4), keep=1),
    )
    return plain, place
