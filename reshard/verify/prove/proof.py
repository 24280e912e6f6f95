"""The proof: a run without a break, the same run killed and resumed, and every step of the two compared.

Where the run says that it is exact (its checkpoints' manifest does), every loss must have the same bits, and so must
the model, the optimizer and all that is recorded of the run in the last checkpoints. Else losses may differ by epsilon.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats import manifest
from reshard.formats.opening import open_checkpoint
from reshard.storage.durable import storage_errors
from reshard.storage.steps import committed_steps
from reshard.verify.diff.pairing import pair
from reshard.verify.diff.run import diff
from reshard.verify.prove.legs import Leg
from reshard.verify.prove.run import Demand, LegResult, OnStep, Place, run_leg
from reshard.verify.traces.compare import Comparison, compare_traces
from reshard.verify.traces.trace import TraceRow, read_trace

DEFAULT_EPSILON = 1e-3
"""For runs that are not exact: gradients that are added in another order drift apart by less over hundreds of steps."""

REFERENCE, RESUMED, PICTURE = "reference", "resumed", "loss.png"


@dataclass
class Proof:
    """What a proof found.

    Attributes:
        is_exact: whether the run says so.
        legs: of the run that was killed; a leg with faults is the last.
        comparison: of the two traces; None where the run did not come to its end.
        state: what differs between the last checkpoints of an exact run; None where they were not compared.
        uncompared: why not, of an exact run.
        compared_tensors: how many of these were held against each other.
        faults: what else is wrong.
    """

    is_exact: bool
    legs: list[LegResult]
    comparison: Comparison | None = None
    state: list[str] | None = None
    uncompared: str | None = None
    compared_tensors: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        faults = [*self.faults, *(fault for leg in self.legs for fault in leg.faults), *(self.state or [])]
        return not faults and self.comparison is not None and self.comparison.agrees

    def to_json(self) -> dict[str, object]:
        """As JSON holds it."""
        compared = self.comparison.to_json() if self.comparison else {}
        return {
            "holds": self.holds,
            "exact": self.is_exact,
            "epsilon": compared.get("epsilon"),
            "common_steps": compared.get("common_steps"),
            "largest_loss_difference": compared.get("largest_loss_difference"),
            "largest_lr_difference": compared.get("largest_lr_difference"),
            "first_differing_step": compared.get("first_differing_step"),
            "missing_steps": compared.get("missing_steps"),
            "legs": [asdict(leg) for leg in self.legs],
            "state": self.state,
            "uncompared": self.uncompared,
            "compared_tensors": self.compared_tensors,
            "faults": self.faults,
        }


@dataclass(frozen=True)
class Told:
    """Who is told about the proof while it goes on.

    Attributes:
        on_start: of each start, its name and its ranks; gives what is called with each step.
        on_end: of each start, its name and what became of it.
    """

    on_start: Callable[[str, Leg], OnStep] = lambda name, leg: lambda step: None
    on_end: Callable[[str, LegResult], None] = lambda name, result: None


def clear(folder: Path, *, force: bool) -> None:
    """Makes room for a proof: an earlier one goes, and whatever else is in the folder stays.

    Raises:
        UsageError: something is there, and ``force`` does not say that it may go; or it is no folder of a proof.
        StorageError: the file system refused.
    """
    with storage_errors("look into the folder", folder):
        runs = [Place(folder / name) for name in (REFERENCE, RESUMED) if (folder / name).exists()]
        is_taken = bool(runs) or (folder / PICTURE).exists()
        foreign = [path for run in runs for path in _foreign(run)]
    if foreign:
        raise UsageError("is not of a proof", path=foreign[0], hint="name another --folder")
    if is_taken and not force:
        raise UsageError("has a proof already", path=folder, hint="overwrite it with --force, or name another --folder")
    with storage_errors("clear the folder", folder):
        for run in runs:
            shutil.rmtree(run.folder)


def _foreign(run: Place) -> list[Path]:
    """What is there and was not written by a proof."""
    if not run.folder.is_dir():
        return [run.folder]
    own = {path.name for path in (run.checkpoints, run.trace, run.log)}
    return sorted(path for path in run.folder.iterdir() if path.name not in own)


def require_reference(reference: Path, folder: Path) -> None:
    """Holds the folder of a run without a break against that of the new proof, before anything is cleared.

    Raises:
        UsageError: no such run is there, or it would go with what is cleared.
    """
    if not Place(reference).trace.is_file():
        raise UsageError("no run without a break is there", path=Place(reference).trace, hint="name the folder of one")
    cleared = [(folder / name).resolve() for name in (REFERENCE, RESUMED)]
    if any(each in (reference.resolve(), *reference.resolve().parents) for each in cleared):
        raise UsageError(
            "would be cleared with the folder", path=reference, key="--reference", hint="name another --folder"
        )


def prove(
    demand: Demand,
    legs: Sequence[Leg],
    folder: Path,
    *,
    reference: Path | None = None,
    epsilon: float | None = None,
    told: Told | None = None,
) -> Proof:
    """Runs a command without a break, then in legs, and compares.

    Args:
        folder: an empty one; the two runs get a folder each in it.
        reference: the folder of a run without a break that an earlier proof made, to save that part.
        epsilon: largest loss difference that agrees, unless the run is exact; by default `DEFAULT_EPSILON`.

    Raises:
        UsageError: the command cannot be started.
        ReshardError: what the runs left cannot be read.
    """
    told = told or Told()
    straight = Place(reference or folder / REFERENCE)
    if reference is None:
        whole = _run(demand, Leg(legs[0].ranks), straight, REFERENCE, told, is_first=True)
        if whole.faults:
            return Proof(False, [], faults=[f"the run without a break {fault}" for fault in whole.faults])
    broken = Place(folder / RESUMED)
    proof = Proof(_is_exact(straight), [])
    for number, leg in enumerate(legs):
        proof.legs.append(_run(demand, leg, broken, RESUMED, told, is_first=number == 0))
        if proof.legs[-1].faults:
            break
    judge(proof, straight, broken, demand.steps, epsilon)
    return proof


def _run(demand: Demand, leg: Leg, place: Place, name: str, told: Told, *, is_first: bool) -> LegResult:
    result = run_leg(demand, leg, place, is_first=is_first, on_step=told.on_start(name, leg))
    told.on_end(name, result)
    return result


def judge(proof: Proof, straight: Place, broken: Place, steps: int, epsilon: float | None = None) -> None:
    """Compares what two runs left, and puts it into the proof.

    Raises:
        ReshardError: a trace cannot be read.
    """
    if not broken.trace.exists():
        return
    allowed = 0.0 if proof.is_exact else DEFAULT_EPSILON if epsilon is None else epsilon
    reference, resumed = (_first(read_trace(place.trace), steps) for place in (straight, broken))
    proof.comparison = compare_traces(reference, resumed, epsilon=allowed)
    if proof.is_exact and resumed and resumed[-1].step == steps:
        folders = [place.checkpoints / f"step-{steps}" for place in (straight, broken)]
        if absent := [folder for folder in folders if not folder.is_dir()]:
            proof.uncompared = f"{absent[0]} is not there"
        else:
            proof.compared_tensors, proof.state = _compare_states(*folders)


def _first(rows: list[TraceRow], steps: int) -> list[TraceRow]:
    return [row for row in rows if row.step <= steps]


def _is_exact(place: Place) -> bool:
    steps = committed_steps(place.checkpoints)
    if not steps or not manifest.exists(steps[-1].path):
        return False
    return manifest.read(steps[-1].path).exact is not None


def _compare_states(straight: Path, broken: Path) -> tuple[int, list[str]]:
    """How many tensors of two steps were compared, and what differs.

    The generators of single ranks are left out: in exact mode nothing that is trained on draws from them.
    """
    try:
        with open_checkpoint(straight) as one, open_checkpoint(broken) as other:
            found = diff(one, other, pairs=pair(one, other, leave_out="rng."))
    except CheckpointUnsound as error:
        return 0, [str(error)]
    differences = [
        *(f"only without a break: {key}" for key in found.only_a),
        *(f"only after the resume: {key}" for key in found.only_b),
        *(f"of another shape: {key}" for key, _, _ in found.shapes),
        *(f"different: {each.key}" for each in (*found.dtypes, *found.different)),
        *(f"different: {key}" for key in found.objects),
        *(f"different: {place.where}" for place in found.manifest if place.where.partition(".")[0] != "rng"),
    ]
    return found.tensors, differences
