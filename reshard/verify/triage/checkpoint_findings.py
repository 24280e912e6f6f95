"""What the checkpoint of a resume says: what it lacks, and whether the first step after it used what it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reshard.formats.manifest import Manifest
from reshard.verify.describe.checklist import MISSING, PRESENT, Part, title
from reshard.verify.describe.describe import Description
from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.finding import (
    BATCH,
    CERTAIN,
    COUNTERS,
    LIKELY,
    MOMENTS,
    POSITION,
    POSSIBLE,
    RANDOM,
    RATE,
    SCALE,
    SCHEDULE,
    WEIGHTS,
    Evidence,
)

PIECES = {
    "model": WEIGHTS,
    "optimizer": MOMENTS,
    "step counters": COUNTERS,
    "scheduler": SCHEDULE,
    "scaler": SCALE,
    "rng": RANDOM,
    "data": POSITION,
    "batch": BATCH,
}
"""Part of the checklist -> piece of the state."""

# Without these a run cannot go on as it was, whatever its loader does; the others it may keep elsewhere.
_MUST = ("model", "optimizer", "step counters")

_EQUAL = 1e-6


def examine_checkpoint(found: Description, after: Sequence[TraceRow]) -> Evidence:
    """What it lacks, and where the row after the resume is not what it has.

    Args:
        found: the checkpoint.
        after: rows past the resume, one at least.
    """
    said = Evidence()
    for part in found.parts:
        _part(said, part)
    if found.faults:
        more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        said.found(WEIGHTS, LIKELY, f"the checkpoint is unsound: {found.faults[0]}{more}")
    manifest = found.checkpoint.manifest
    if manifest is not None and manifest.step == after[0].step - 1:
        _rates(said, manifest, after[0])
        _scale(said, manifest, after[0])
        _samples(said, manifest, after[0])
    if manifest is not None:
        _schedulers(said, manifest, after[0].ranks)
        _random_states(said, manifest, after[0].ranks)
    return said


def holdings(found: Description) -> dict[str, str]:
    """By piece, what the checkpoint says of it in the checklist's words, where it has it."""
    return {
        PIECES[part.name]: f"the checkpoint has it ({title(part)}: {part.detail}), so the resume did not restore it"
        for part in found.parts
        # A batch plan is the run's own, and never restored.
        if part.name in PIECES and part.name != "batch" and part.status == PRESENT and part.is_restored
    }


def _part(said: Evidence, part: Part) -> None:
    if part.name not in PIECES or part.name == "batch":
        return
    if part.status == MISSING:
        confidence = CERTAIN if part.name in _MUST else POSSIBLE
        text = f"the checkpoint has no {title(part)}" + (f": {part.detail}" if part.detail else "")
        said.found(PIECES[part.name], confidence, text)
    elif not part.is_restored:
        said.found(PIECES[part.name], POSSIBLE, f"the checkpoint has {title(part)} {part.detail}")


def _rates(said: Evidence, manifest: Manifest, row: TraceRow) -> None:
    pairs = [(saved, found) for saved, found in zip(manifest.lr, row.lr, strict=False) if saved is not None]
    off = [(saved, found) for saved, found in pairs if not math.isclose(saved, found, rel_tol=_EQUAL, abs_tol=1e-15)]
    if off:
        saved, rate = off[0]
        said.found(RATE, CERTAIN, f"step {row.step} had the learning rate {rate:.6g}, the checkpoint has {saved:.6g}")
    elif pairs:
        said.in_order[SCHEDULE] = f"learning rate {row.lr[0]:.4g} at step {row.step}, as the checkpoint has it"


def _scale(said: Evidence, manifest: Manifest, row: TraceRow) -> None:
    saved = manifest.scaler.get("scale") if isinstance(manifest.scaler, dict) else None
    if not isinstance(saved, int | float) or row.scale is None:
        return
    if saved == row.scale:
        said.in_order[SCALE] = f"loss scale {row.scale:.9g} at step {row.step}, as the checkpoint has it"
    else:
        said.found(
            SCALE, CERTAIN, f"step {row.step} had the loss scale {row.scale:.9g}, the checkpoint has {saved:.9g}"
        )


def _samples(said: Evidence, manifest: Manifest, row: TraceRow) -> None:
    shared = manifest.data.get("shared") if isinstance(manifest.data, dict) else None
    saved = shared.get("samples") if isinstance(shared, dict) else None
    if not isinstance(saved, int) or row.samples is None:
        return
    if row.samples <= saved:
        text = f"{row.samples} samples were trained on after step {row.step}, {saved} before it by the checkpoint"
        said.found(POSITION, CERTAIN, text)


def _schedulers(said: Evidence, manifest: Manifest, ranks: int | None) -> None:
    """A scheduler that its wrapper steps once for every process moves at another pace on another number of them."""
    for name, state in manifest.schedulers.items():
        epoch = _last_epoch(state)
        if not epoch or manifest.step < 2 or epoch % manifest.step or epoch == manifest.step:
            continue
        pace = epoch // manifest.step
        has_changed = pace == manifest.world.ranks and ranks is not None and ranks != pace
        text = f"{name} is at {epoch} after {manifest.step} steps, {pace} a step"
        if has_changed:
            text += f": as often as there were ranks; {ranks} ranks move it {ranks} a step"
        said.found(SCHEDULE, LIKELY if has_changed else POSSIBLE, text)


def _last_epoch(state: Any) -> int | None:
    while isinstance(state, dict) and "last_epoch" not in state and isinstance(state.get("scheduler"), dict):
        state = state["scheduler"]
    epoch = state.get("last_epoch") if isinstance(state, dict) else None
    return epoch if type(epoch) is int else None


def _random_states(said: Evidence, manifest: Manifest, ranks: int | None) -> None:
    saved = manifest.rng.get("ranks") if isinstance(manifest.rng, dict) else None
    if isinstance(saved, int) and ranks is not None and ranks != saved:
        text = f"random states of {saved} ranks, {ranks} go on: they draw other numbers unless these come from slots"
        said.found(RANDOM, POSSIBLE, text)
