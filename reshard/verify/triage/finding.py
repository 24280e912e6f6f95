"""What triage can find: a piece of the training state, how sure it is that it was lost, and what shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
CONFIDENCES = (CERTAIN, LIKELY, POSSIBLE)

WEIGHTS = "weights"
MOMENTS = "optimizer moments"
COUNTERS = "step counters"
SCHEDULE = "schedule"
RATE = "learning rate"
SCALE = "loss scale"
RANDOM = "random states"
POSITION = "data position"
BATCH = "global batch"
AVERAGING = "loss averaging"
DATA = "data"
INSTABILITY = "instability"

REMEDIES = {
    WEIGHTS: "check --deep the checkpoint, and diff it with one saved right after the resume: equal shapes in another "
    "order, a tied head or a wrong mapping of names show there",
    MOMENTS: "resume with the optimizer's state; where no checkpoint has it, let the learning rate climb back: "
    "Checkpointer.resume(lost_optimizer='rewarm')",
    COUNTERS: "restore the optimizer's step counters with its moments: Adam's bias correction goes by them",
    SCHEDULE: "restore the scheduler's state; its last_epoch has to be the step (times the steps it takes for each)",
    RATE: "set the learning rate back to the schedule's: the optimizer's groups and the scheduler's base_lrs",
    SCALE: "restore the loss scaler's state: a scale that starts anew skips steps until it has come down",
    RANDOM: "restore the random states where as many ranks go on; on another number, seed each rank differently",
    POSITION: "restore the sampler's position: without it, samples are seen twice and others never",
    BATCH: "set the micro-batch and the accumulation to the same global batch: reshard batch, or batch-config",
    AVERAGING: "weigh each micro-batch by its valid tokens: a mean of means is another loss where sequences differ in "
    "length and the accumulation has changed",
    DATA: "look at the samples of these steps, and skip them",
    INSTABILITY: "go on from before it with a lower learning rate or tighter clipping, and past its samples",
}


@dataclass(frozen=True)
class Finding:
    """One piece of the state that may have been lost.

    Args:
        piece: which.
        confidence: ``CERTAIN`` where a column or the checkpoint shows it, ``LIKELY`` where the shape of the loss fits
            it best, ``POSSIBLE`` where it fits as well as others.
        evidence: what shows it, in numbers.
        is_over: whether it has set itself right since.
    """

    piece: str
    confidence: str
    evidence: tuple[str, ...]
    is_over: bool = False

    @property
    def remedy(self) -> str:
        """What to do."""
        return REMEDIES[self.piece]


@dataclass
class Evidence:
    """What one source of evidence says.

    Args:
        findings: of pieces that it shows to be lost.
        in_order: by piece, what it shows to be as it was.
        silent: what it does not say, and could.
    """

    findings: list[Finding] = field(default_factory=list)
    in_order: dict[str, str] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)

    def found(self, piece: str, confidence: str, text: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(piece, confidence, (text,)))


def merge(findings: Sequence[Finding]) -> list[Finding]:
    """One finding a piece, with the evidence of all and the highest confidence; the surest first."""
    pieces: dict[str, list[Finding]] = {}
    for finding in findings:
        pieces.setdefault(finding.piece, []).append(finding)
    merged = []
    for piece, same in pieces.items():
        ranked = sorted(same, key=_rank)
        texts = dict.fromkeys(text for each in ranked for text in each.evidence)
        merged.append(Finding(piece, ranked[0].confidence, tuple(texts), any(each.is_over for each in same)))
    return sorted(merged, key=_rank)


def _rank(finding: Finding) -> int:
    return CONFIDENCES.index(finding.confidence)
