"""Each fault that a resume is known to have (B97), put into a real run: `reshard prove` names the first wrong step."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from reshard.cli.main import main
from reshard.cli.prove import _verdict
from reshard.verify.prove.legs import Leg
from reshard.verify.prove.proof import Proof, judge
from reshard.verify.prove.run import Demand, LegResult, Place, run_leg

RUN = str(Path(__file__).parent.parent / "data" / "faulty_run.py")
STEPS, KILL_AT, RESUMED_AT = 20, 12, 10

# What the first step after the resume shows. Its loss is that of the weights it resumed with, so a fault of the
# optimizer shows one step later.
FAULTS = {
    "moments": (RESUMED_AT + 2, "loss differs"),
    "step counters": (RESUMED_AT + 2, "loss differs"),
    "learning rate": (RESUMED_AT + 1, "learning rate differs"),
    "warm-up again": (RESUMED_AT + 1, "learning rate differs"),
    "schedule twice as fast": (RESUMED_AT + 1, "learning rate differs"),
    "data position": (RESUMED_AT + 1, "loss differs"),
    "half the batch": (RESUMED_AT + 1, "trained on another number of samples"),
    "rows permuted": (RESUMED_AT + 1, "loss differs"),
    "weights swapped": (RESUMED_AT + 1, "loss differs"),
    "head overwritten": (RESUMED_AT + 1, "loss differs"),
    "bf16 rounding": (RESUMED_AT + 1, "loss differs"),
    "random streams": (RESUMED_AT + 1, "loss differs"),
    "scaler": (RESUMED_AT + 1, "another loss scale"),
}
IN_CI = ("moments", "half the batch", "scaler")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LegResult]:
    """A proof's folder with the run without a break, and the one that was killed, not resumed yet."""
    folder = tmp_path_factory.mktemp("killed")
    demand = Demand([sys.executable, RUN], STEPS)
    whole = run_leg(demand, Leg(1), Place(folder / "reference"), is_first=True)
    assert whole.faults == [], (folder / "reference" / "log.txt").read_text()
    first = run_leg(demand, Leg(1, KILL_AT), Place(folder / "resumed"), is_first=True)
    assert first.faults == [] and first.killed_at is not None and KILL_AT <= first.killed_at < STEPS
    return folder, first


class Proofs(dict[str, Proof]):
    """The end of the proof with each fault, made when it is asked for."""

    def __init__(self, killed: tuple[Path, LegResult], factory: pytest.TempPathFactory) -> None:
        self._killed, self._factory = killed, factory

    def __missing__(self, fault: str) -> Proof:
        self[fault] = proof_with(fault, self._killed, self._factory.mktemp("fault"))
        return self[fault]


@pytest.fixture(scope="module")
def proofs(killed: tuple[Path, LegResult], tmp_path_factory: pytest.TempPathFactory) -> Proofs:
    return Proofs(killed, tmp_path_factory)


def proof_with(fault: str, killed: tuple[Path, LegResult], folder: Path) -> Proof:
    shutil.copytree(killed[0] / "resumed", folder / "resumed")
    place = Place(folder / "resumed")
    # Whatever step the kill came after: the resumed leg goes on from the same one.
    for step in place.checkpoints.glob("step-*"):
        if step.name != f"step-{RESUMED_AT}":
            shutil.rmtree(step)
    last = run_leg(Demand([sys.executable, RUN, fault], STEPS), Leg(1), place, is_first=False)
    proof = Proof(True, [killed[1], last])
    judge(proof, Place(killed[0] / "reference"), place, STEPS)
    return proof


@pytest.mark.parametrize(
    "fault", [fault if fault in IN_CI else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_a_fault_fails_the_proof_at_its_step(fault: str, proofs: Proofs) -> None:
    proof = proofs[fault]
    assert proof.legs[-1].faults == []
    assert proof.comparison is not None and not proof.holds
    step, told = FAULTS[fault]
    assert proof.comparison.first_differing_step == step
    row = proof.comparison.first_differing_row
    assert row is not None and told in "; ".join(row.faults(0.0))
    assert proof.state, "the states at the end should differ, too"


def test_without_a_fault_it_holds(proofs: Proofs) -> None:
    proof = proofs[""]
    assert proof.holds and proof.state == [] and proof.compared_tensors > 18
    assert proof.legs[-1].resumed_at == RESUMED_AT
    assert proof.legs[-1].restored is not None and "full state restored" in proof.legs[-1].restored


def test_states_that_were_not_compared_are_no_proof_of_equal_bits(
    killed: tuple[Path, LegResult], proofs: Proofs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(killed[0] / "reference", folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    proof = Proof(True, proofs[""].legs)
    resumed = tmp_path / "resumed"
    shutil.copytree(killed[0] / "reference", resumed)
    judge(proof, Place(folder), Place(resumed), STEPS)
    assert (proof.state, proof.uncompared) == (None, f"{folder / 'checkpoints' / f'step-{STEPS}'} is not there")
    assert "the states at the end were NOT compared" in _verdict(proof, None)
    assert "bit for bit" not in _verdict(proof, None)


def test_the_verb_ends_with_1_and_names_the_step(
    killed: tuple[Path, LegResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ranks", "1:1", "--kill-at", "7", "--steps", str(STEPS), "--folder", str(tmp_path / "proof"), "--json"]
    reference = ["--reference", str(killed[0] / "reference")]
    assert main(["prove", *options, *reference, "--", sys.executable, RUN, "random streams"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    resumed_at = found["legs"][1]["resumed_at"]
    assert (found["exact"], found["epsilon"], found["holds"]) == (True, 0.0, False)
    assert found["first_differing_step"] == resumed_at + 1
    assert found["largest_loss_difference"] > 0
    assert found["state"]
