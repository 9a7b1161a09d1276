"""Words for the reasons of waiting, as the pages tell them: a few words for a badge, above the sentence that explains."""

from collections.abc import Mapping
from types import MappingProxyType

from contracts.waiting import WaitReason

_WORDS: Mapping[WaitReason, str] = MappingProxyType(
    {
        WaitReason.RUNNING: "running",
        WaitReason.SAVING: "saving",
        WaitReason.TURN: "waits its turn",
        WaitReason.EARLIER_OPERATION: "behind an earlier operation",
        WaitReason.MISSING_SEQ_ID: "an earlier request is missing",
        WaitReason.HELD: "held by the operator",
        WaitReason.RATE_LIMIT: "over its rate",
        WaitReason.BUDGET: "budget spent",
        WaitReason.OPEN_RUNS: "too many open runs",
        WaitReason.STORAGE: "storage full",
        WaitReason.OPEN_ADAPTERS: "too many open adapters",
        WaitReason.NO_TRAINER: "no trainer",
        WaitReason.NOT_PLACED: "waits for a trainer",
        WaitReason.MOVING: "changes trainers",
        WaitReason.TRAINER_LOST: "trainer lost",
        WaitReason.RESTORING: "restoring",
        WaitReason.REPLAYING: "replaying",
        WaitReason.SUSPECT_ALONE: "to run alone",
        WaitReason.GATE_PAUSED: "gate paused",
        WaitReason.NO_REPLICA: "no replica",
        WaitReason.DRAINED: "replicas drained",
        WaitReason.NO_ROOM: "samplers full",
        WaitReason.CLAIMED: "taken by a sampler",
    }
)


def waiting_words(reason: str | None) -> str:
    """Return the words for a reason's value; a dash for none."""
    return "–" if reason is None else _WORDS[WaitReason(reason)]
