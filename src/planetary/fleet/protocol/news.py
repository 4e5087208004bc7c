"""The journal's records in words, for logs and displays."""

from __future__ import annotations

from planetary.fleet.protocol import records as r
from planetary.machine.journal import Record


def news_of(record: Record) -> str:
    """Return a record as a sentence, or "" for one that is not news."""
    match record:
        case r.ArtifactPublished():
            return f"compiled for {record.backend}:{record.target} ({record.verified})"
        case r.StepReplaced():
            what = "an earlier training step" if record.back else "another training step"
            why = "; ".join(filter(None, (record.why, f"by {record.by}" if record.by else "")))
            return f"{what} from round {record.round + 1} on: {record.model[:12]}" + (f" ({why})" if why else "")
        case r.TopologyReplaced():
            return f"the run goes on in a star from round {record.round + 1} on: {record.why}"
        case r.WorkerJoined():
            how = "".join(f"; {text}" for text in (record.chosen, record.verified) if text)
            return f"worker {record.worker} joined (process {record.pid}){how}"
        case r.WorkerRefused():
            return f"worker {record.worker} refused: {record.reason}"
        case r.WorkerBanned():
            return f"worker {record.worker} is banned: {record.reason}"
        case r.WorkerForgiven():
            return f"worker {record.worker} is forgiven, and its name may belong to another machine"
        case r.WorkerLost():
            return f"worker {record.worker} lost: {record.reason}"
        case r.WorkerLeft():
            return f"worker {record.worker} was {record.kind}: {record.reason}"
        case r.WorkerSlow():
            return f"worker {record.worker} is slow: {record.reason}"
        case r.WorkerRecovered():
            return f"worker {record.worker} is not slow any more"
        case r.LeaseReturned() if record.task:
            return f"lease {record.lease} returned by {record.worker}: {record.reason}"
        case r.DeltaRejected():
            return f"result of {record.worker} rejected: {record.reason}"
        case r.DeltaWithdrawn():
            return f"result of {record.worker} does not count: {record.reason}"
        case r.ReduceRetried():
            return f"round {record.round}: reduction failed, retrying: {record.reason}"
        case r.DigestsDiffered():
            who = ", ".join(record.workers)
            return f"round {record.round}: parameters of {who} differ from the majority's; resynchronising"
        case r.RolledBack():
            return f"back to round {record.mark.round}: {record.reason}"
        case r.TaskAborted():
            return f"{record.worker} could not finish its task: {record.reason}"
        case r.RoundFinished():
            return f"round {record.round} finished: loss {record.loss:.4f}, {record.tokens} tokens"
        case r.CheckpointFailed():
            return f"checkpoint of round {record.round} failed: {record.reason}"
        case r.RunPaused():
            return f"the run pauses: {record.reason}"
        case r.VersionAdopted():
            carried = f", with {record.carried} tokens of this site on top" if record.carried else ""
            return f"version {record.version} of the hub adopted{carried}" + (f": {record.why}" if record.why else "")
        case r.ContributionOffered():
            return f"{record.tokens} tokens offered to the hub, trained from its version {record.version}"
        case r.WentAlone():
            return f"this site goes on alone: {record.why}"
        case r.Stalled():
            return record.why
        case r.RunResumed():
            return f"resumed after round {record.mark.round}"
        case r.RunFinished():
            return record.reason
    return ""


class LastingNews:
    """News that stay important when the next round makes others old: notes of the run, each once."""

    def __init__(self) -> None:
        """Start with checkpoints that are written, as far as is known."""
        self._kept = 0  # the newest round with a checkpoint
        self._failing = False

    def of(self, record: Record) -> str:
        """Return the lasting note of a record, or ""."""
        match record:
            case r.RunResumed():
                self._kept = record.mark.round
            case r.CheckpointWritten():
                again, self._failing, self._kept = self._failing, False, record.round
                return f"checkpoints are written again, beginning with that of round {record.round}" if again else ""
            case r.CheckpointFailed() if not self._failing:
                self._failing = True
                return (
                    f"the checkpoint of round {record.round} could not be written: {record.reason}. The run goes on "
                    f"and tries it again with the next ones; {self._newest()}"
                )
            case r.RunPaused():
                return (
                    f"the checkpoint of round {record.round} could not be written either: {record.reason}. The run "
                    f"pauses until there is room; {self._newest()}"
                )
            case r.RolledBack() if record.bad:
                return f"the run went back to round {record.mark.round}: {record.reason}"
            case r.RunFinished() if self._failing:
                return f"the last checkpoints could not be written: {self._newest()}"
            case _:
                pass
        return ""

    def _newest(self) -> str:
        return f"the newest is of round {self._kept}" if self._kept else "there is none yet"
