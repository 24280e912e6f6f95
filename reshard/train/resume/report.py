"""What a resume restored, as a value and as the line that goes into the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.batch.plan import BatchPlan


@dataclass
class LoadReport:
    """The outcome of ``load_state``, the same on every rank.

    Attributes:
        path: the step folder.
        step: optimizer steps done at the save.
        restored: the parts that were restored.
        missing: what the run has and what was left as it is, by permission: parts, and tensors of the model.
        fresh: parameters without optimizer state in the checkpoint.
        saved_ranks, ranks: world size at the save (None if not recorded) and now.
        saved_batch: global batch, micro-batch, ranks and accumulation at the save.
        plan: the run's plan now.
        warnings: whatever else the user should know.
        notes: what is as it should be and still worth a line.
        elapsed_s: from call to return.
    """

    path: Path
    step: int
    ranks: int
    saved_ranks: int | None = None
    plan: BatchPlan | None = None
    saved_batch: dict[str, int] | None = None
    restored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def line(self) -> str:
        """``resumed at step 4000 (full state restored; 8 -> 6 ranks, ...) in 12.4 s``."""
        facts = [_change(self.saved_ranks, self.ranks, "{} ranks" if self.ranks != 1 else "{} rank")]
        if self.plan is not None:
            before = (self.saved_batch or {}).get("accumulation")
            facts.append(_change(before, self.plan.accumulation, "accumulation {}"))
            facts.append(
                _change((self.saved_batch or {}).get("global_batch"), self.plan.global_batch, "global batch {}")
            )
        restored = "full state restored"
        if self.missing:
            restored = f"NOT restored: {named(self.missing, 8)}; restored: {', '.join(self.restored) or 'nothing'}"
        return f"resumed at step {self.step} ({restored}; {', '.join(facts)}) in {self.elapsed_s:.1f} s"


def _change(before: int | None, now: int, text: str) -> str:
    return text.format(now if before in (None, now) else f"{before} -> {now}")


def named(names: Sequence[str], most: int = 5) -> str:
    """A list for a message: the first few, and how many more."""
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
