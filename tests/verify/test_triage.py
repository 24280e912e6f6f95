"""From the shape of a loss, the columns of its trace and the checkpoint to the piece that was lost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from small import Small, edit_manifest

import reshard
from reshard.errors import UsageError
from reshard.verify.describe.describe import describe
from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.diagnosis import Diagnosis, diagnose
from reshard.verify.triage.finding import (
    AVERAGING,
    BATCH,
    CERTAIN,
    COUNTERS,
    DATA,
    INSTABILITY,
    LIKELY,
    MOMENTS,
    POSITION,
    POSSIBLE,
    RANDOM,
    RATE,
    SCALE,
    SCHEDULE,
    WEIGHTS,
)
from reshard.verify.triage.shape import CONTINUOUS, LOW, MID_RUN, PERSISTENT, SPIKE

RESUME, LAST, BATCH_SIZE, NOISE = 200, 400, 32, 0.02


def rate(step: int) -> float:
    return 1e-3 * (1 + math.cos(math.pi * (step - 1) / 1000)) / 2


def run(offset: Callable[[int], float] = lambda past: 0.0, seed: int = 0, every: int = 1) -> list[TraceRow]:
    """A run that resumes after step 200; ``offset`` is added to the loss by the number of steps since."""
    noise = np.random.default_rng(seed).standard_normal(LAST + 1) * NOISE
    return [
        TraceRow(
            step=step,
            loss=2 + 3 * step**-0.4 + float(noise[step]) + (offset(step - RESUME) if step > RESUME else 0.0),
            lr=(rate(step),),
            grad_norm=1.0,
            scale=4096.0,
            ranks=4,
            accumulation=2,
            samples=step * BATCH_SIZE,
        )
        for step in range(every, LAST + 1, every)
    ]


def after(rows: Sequence[TraceRow], change: Callable[[TraceRow], dict[str, Any]]) -> list[TraceRow]:
    """The rows with changes to those past the resume."""
    return [replace(row, **change(row)) if row.step > RESUME else row for row in rows]


def pieces(found: Diagnosis) -> dict[str, str]:
    return {each.piece: each.confidence for each in found.findings}


def evidence(found: Diagnosis, piece: str) -> str:
    return " | ".join(text for each in found.findings if each.piece == piece for text in each.evidence)


def spike(past: int) -> float:
    """What lost moments do: nothing at once, then a hump."""
    return 0.4 * max(0, past - 1) / 5 * math.exp(1 - max(0, past - 1) / 5)


@pytest.mark.parametrize("every", [1, 10])
def test_nothing_lost_is_no_alarm(every: int) -> None:
    found = diagnose(run(every=every), RESUME)
    assert (found.shape.name, found.findings, found.is_alarming) == (CONTINUOUS, [], False)
    assert found.advice == ["go on"]
    assert len(found.in_order) == 4
    assert found.notes == ([] if every == 1 else [found.notes[0]])


def test_first_step_in_place_and_then_off_is_the_moments() -> None:
    found = diagnose(run(spike), RESUME)
    assert found.shape.name == SPIKE
    assert pieces(found) == {MOMENTS: LIKELY}
    assert "what was loaded to compute it is right" in evidence(found, MOMENTS)
    assert f"the loss is back since step {found.shape.back}: this run can go on" in found.advice


def test_first_step_far_off_is_the_weights() -> None:
    found = diagnose(after(run(lambda past: 1.5 * math.exp(-past / 10)), lambda row: {"grad_norm": 9.0}), RESUME)
    assert found.shape.name == SPIKE
    assert pieces(found) == {WEIGHTS: LIKELY}
    # exp(-1/10) of 1.5, of the 2.6 from 2 + 3 to 2 + 3 / 200^0.4.
    assert "+1.3" in evidence(found, WEIGHTS)
    assert "of all that the run had learnt, before any update" in evidence(found, WEIGHTS)
    assert "gradient norm 9 at step 201, usually 1 before" in evidence(found, WEIGHTS)


def test_first_step_a_little_off_may_be_several() -> None:
    found = diagnose(run(lambda past: 0.2 * math.exp(-past / 10)), RESUME)
    assert pieces(found) == {WEIGHTS: POSSIBLE, POSITION: POSSIBLE, RANDOM: POSSIBLE}
    assert found.is_alarming


def test_samples_counted_anew_are_a_lost_position() -> None:
    """B75: fewer samples than steps times batch, a loss that is lower for one pass and then jumps."""
    rows = run(lambda past: -0.1 if past <= 150 else 0.0)
    found = diagnose(after(rows, lambda row: {"samples": (row.step - RESUME) * BATCH_SIZE}), RESUME)
    assert found.shape.name == LOW
    assert pieces(found) == {POSITION: CERTAIN}
    assert "samples 6400 at step 200, 32 at step 201" in evidence(found, POSITION)
    assert "201 steps of 32 are 6432" in evidence(found, POSITION)
    assert found.shape.back == pytest.approx(RESUME + 151, abs=12)
    assert found.notes[0].startswith(f"the loss comes up again at step {found.shape.back}, as where samples begin")
    without = diagnose([replace(row, samples=None) for row in rows], RESUME)
    assert (pieces(without), without.silent) == ({POSITION: LIKELY}, ["samples"])


def test_samples_passed_over() -> None:
    found = diagnose(after(run(), lambda row: {"samples": (row.step + 100) * BATCH_SIZE}), RESUME)
    assert pieces(found) == {POSITION: CERTAIN}
    assert "3200 samples were passed over" in evidence(found, POSITION)


def test_another_batch() -> None:
    half = after(run(), lambda row: {"samples": RESUME * BATCH_SIZE + (row.step - RESUME) * 16, "accumulation": 1})
    found = diagnose(half, RESUME)
    assert pieces(found) == {BATCH: CERTAIN}
    assert "32 samples a step before, 16 after (accumulation 2 -> 1)" in evidence(found, BATCH)
    without = diagnose([replace(row, samples=None) for row in half], RESUME)
    assert pieces(without) == {BATCH: LIKELY}
    other_ranks = after(run(), lambda row: {"ranks": 8, "accumulation": 1})
    assert not diagnose(other_ranks, RESUME).is_alarming
    assert not diagnose([replace(row, samples=None) for row in other_ranks], RESUME).is_alarming


def test_loss_averaging_is_listed_where_the_accumulation_has_changed() -> None:
    """B66."""
    rows = after(run(lambda past: 0.3), lambda row: {"ranks": 2, "accumulation": 4})
    found = diagnose(rows, RESUME)
    assert found.shape.name == PERSISTENT
    assert pieces(found)[AVERAGING] == POSSIBLE
    assert "accumulation 2 -> 4" in evidence(found, AVERAGING)
    assert "sequences differ in length" in evidence(found, AVERAGING)
    assert AVERAGING not in pieces(diagnose(run(lambda past: 0.3), RESUME))
    assert AVERAGING not in pieces(diagnose(after(run(), lambda row: {"ranks": 2, "accumulation": 4}), RESUME))


def test_a_scale_that_begins_anew() -> None:
    found = diagnose(after(run(), lambda row: {"scale": 65536.0}), RESUME)
    assert (found.shape.name, pieces(found), found.is_alarming) == (CONTINUOUS, {SCALE: CERTAIN}, True)
    assert "loss scale 4096 at step 200, 65536 at step 201" in evidence(found, SCALE)
    assert not diagnose(after(run(), lambda row: {"scale": 8192.0}), RESUME).is_alarming


def test_a_schedule_that_begins_anew_explains_the_loss() -> None:
    rows = after(run(lambda past: 0.3 if past > 2 else 0.0), lambda row: {"lr": (rate(row.step - RESUME),)})
    found = diagnose(rows, RESUME)
    assert pieces(found) == {SCHEDULE: CERTAIN}
    assert "it has the rates again that step 1 began with" in evidence(found, SCHEDULE)


def test_a_rate_that_falls_is_a_schedule_of_its_own_unless_a_reference_says_no() -> None:
    rows = [replace(row, lr=(1e-3 if row.step <= RESUME else 1e-4,)) for row in run()]
    found = diagnose(rows, RESUME)
    assert (pieces(found), found.is_alarming) == ({RATE: POSSIBLE}, False)
    clean = [replace(row, lr=(1e-3,)) for row in run()]
    assert pieces(diagnose(rows, RESUME, reference=clean)) == {RATE: CERTAIN}
    risen = [replace(row, lr=(1e-3 if row.step <= RESUME else 1e-2,)) for row in run()]
    assert pieces(diagnose(risen, RESUME)) == {RATE: LIKELY}


def test_spikes_in_the_middle() -> None:
    at_once = diagnose(run(lambda past: 1.0 * math.exp(-(past - 80) / 5) if past >= 80 else 0.0), RESUME)
    assert (at_once.shape.name, at_once.shape.onset) == (MID_RUN, RESUME + 80)
    assert pieces(at_once) == {DATA: LIKELY, INSTABILITY: POSSIBLE}
    climbing = diagnose(run(lambda past: min(2.0, 0.15 * (past - 79)) if past >= 80 else 0.0), RESUME)
    assert climbing.shape.name == MID_RUN
    assert pieces(climbing) == {INSTABILITY: LIKELY, DATA: POSSIBLE}
    assert f"then go on from the newest checkpoint before step {climbing.shape.onset}" in climbing.advice
    rows = run(lambda past: 1.0 if past >= 80 else 0.0)
    rows = [replace(row, lr=(0.03,)) if row.step in range(RESUME + 79, RESUME + 85) else row for row in rows]
    assert pieces(diagnose(rows, RESUME)) == {RATE: CERTAIN}


def test_random_numbers_only_are_within_noise_of_the_reference() -> None:
    """B97."""
    jitter = np.random.default_rng(7).standard_normal(LAST + 1) * NOISE / 4
    found = diagnose(run(lambda past: float(jitter[past])), RESUME, reference=run())
    assert not found.is_alarming
    assert any(note.startswith("not bit-equal to the reference: from step 201 on, by 0.0") for note in found.notes)
    assert diagnose(run(), RESUME, reference=run()).notes == ["bit-equal to the reference over 200 steps"]


def test_a_reference_stands_in_for_a_history() -> None:
    rows = [row for row in run(lambda past: 0.3) if row.step > RESUME]
    found = diagnose(rows, RESUME, reference=run())
    assert found.shape.name == PERSISTENT
    with pytest.raises(UsageError, match="too few steps before the resume"):
        diagnose(rows, RESUME)
    with pytest.raises(UsageError, match="the reference has none of the steps after the resume"):
        diagnose(rows, RESUME, reference=run()[:RESUME])


def test_a_resume_step_beyond_the_trace_names_the_attempts() -> None:
    rows = [replace(row, attempt="a" if row.step <= RESUME else "b") for row in run()]
    with pytest.raises(UsageError, match="no step after the resume") as fault:
        diagnose(rows, LAST)
    assert fault.value.details == ("attempt b begins at step 201: it resumed from step 200",)


def test_few_steps_are_said_to_be_few() -> None:
    found = diagnose(run()[: RESUME + 10], RESUME)
    assert found.notes == [
        "only 10 points over 10 steps after the resume: what is small or grows slowly shows after 30 points or more"
    ]


@pytest.mark.parametrize("stretch", [2, 5])
def test_of_a_trace_that_has_not_every_step_the_first_point_is_the_first(stretch: int) -> None:
    """A line every 10 or 25 steps."""

    def told(offset: float) -> Diagnosis:
        rows = run(lambda past: offset, every=5)
        return diagnose([replace(row, step=stretch * row.step, samples=None) for row in rows], stretch * RESUME)

    high = told(1.0)
    assert (high.shape.name, high.shape.onset) == (PERSISTENT, stretch * (RESUME + 5))
    # Updates came before it, so nothing is sure.
    assert pieces(high) == {WEIGHTS: POSSIBLE, MOMENTS: POSSIBLE}
    assert "some steps after the resume" in evidence(high, WEIGHTS)
    low = told(-0.5)
    assert (low.shape.name, pieces(low)) == (LOW, {POSITION: LIKELY})
    assert any(note.startswith("only 20 points over 500 steps") for note in low.notes) == (stretch == 5)


def test_a_scale_may_fall_several_times_between_two_lines() -> None:
    rows = run(every=10)
    assert not diagnose(after(rows, lambda row: {"scale": 1024.0}), RESUME).is_alarming
    assert diagnose(after(run(), lambda row: {"scale": 1024.0}), RESUME).is_alarming


def test_samples_that_are_counted_now_and_then_are_no_alarm() -> None:
    rows = [replace(row, samples=row.step // 10 * 10 * BATCH_SIZE) for row in run()]
    assert not diagnose(rows, RESUME).is_alarming


def test_batches_of_tokens_vary() -> None:
    tokens = np.cumsum(np.random.default_rng(3).integers(3800, 4400, LAST + 1))
    rows = [replace(row, samples=int(tokens[row.step])) for row in run()]
    assert not diagnose(rows, RESUME).is_alarming
    halved = after(rows, lambda row: {"samples": int((tokens[RESUME] + tokens[row.step]) // 2)})
    assert pieces(diagnose(halved, RESUME)) == {BATCH: CERTAIN}


def test_samples_that_went_back_a_little_are_seen_again() -> None:
    found = diagnose(after(run(), lambda row: {"samples": (row.step - 10) * BATCH_SIZE}), RESUME)
    assert "samples 6400 at step 200, 6112 at step 201: 288 of them are seen again" in evidence(found, POSITION)


def test_without_a_history_the_reference_has_it() -> None:
    reference = run()
    rows = [row for row in run() if row.step > RESUME]
    assert not diagnose(rows, RESUME, reference=reference).is_alarming
    for change, piece in (
        ({"samples": 32}, POSITION),
        ({"scale": 65536.0}, SCALE),
        ({"lr": (1e-2,)}, RATE),
    ):
        spoiled = [replace(rows[0], **change), *rows[1:]]  # type: ignore[arg-type]
        assert pieces(diagnose(spoiled, RESUME, reference=reference)).get(piece) == CERTAIN, piece


@pytest.mark.parametrize("rate", [math.nan, -1e-3, 0.0])
def test_a_rate_that_is_none(rate: float) -> None:
    assert pieces(diagnose(after(run(), lambda row: {"lr": (rate,)}), RESUME)) == {RATE: CERTAIN}


def test_rows_without_a_rate_are_passed_over() -> None:
    rows = [replace(row, lr=()) if row.step in (RESUME, RESUME + 1) else row for row in run()]
    assert not diagnose(rows, RESUME).is_alarming


def test_a_low_loss_with_samples_that_go_on_may_be_an_epoch() -> None:
    found = diagnose(run(lambda past: -0.3), RESUME)
    assert (found.shape.name, pieces(found)) == (LOW, {POSITION: POSSIBLE})


def test_a_rate_that_was_off_for_a_step_needs_nothing_done(tmp_path: Path) -> None:
    rows = [replace(row, lr=(1e-3,)) if row.step == RESUME + 1 else row for row in run()]
    found = held(rows, of_step(tmp_path, RESUME, scaler={"scale": 4096.0}))
    assert (pieces(found), found.return_to) == ({RATE: CERTAIN}, None)
    assert found.advice == ["go on; learning rate has set itself right"]


def test_weights_that_were_lost_are_not_gone_on_with() -> None:
    found = diagnose(run(lambda past: 1.5 * math.exp(-past / 10)), RESUME)
    assert found.shape.back is not None
    assert not any("can go on" in line for line in found.advice)


def test_a_resume_at_another_step_is_noted() -> None:
    rows = [replace(row, attempt="a" if row.step <= RESUME else "b") for row in run()]
    assert diagnose(rows, RESUME).notes == []
    assert "attempt b begins at step 201: it resumed from step 200" in diagnose(rows, RESUME - 20).notes


@pytest.mark.parametrize("loss", [0.0, 1e-6, -3.0, 1e6])
def test_losses_of_any_size(loss: float) -> None:
    assert not diagnose([replace(row, loss=loss) for row in run()], RESUME).is_alarming
    assert not diagnose([replace(row, loss=loss * row.loss) for row in run()], RESUME).is_alarming
    if loss:
        spoiled = run(lambda past: math.copysign(1.0, loss))
        assert diagnose([replace(row, loss=loss * row.loss) for row in spoiled], RESUME).is_alarming


def test_few_points_of_a_reference_do_not_say_how_much_a_loss_varies() -> None:
    one = [row for row in run(seed=1) if row.step == RESUME + 50]
    assert not diagnose(run(), RESUME, reference=one).is_alarming
    with pytest.raises(UsageError, match="too few steps, in the reference and before the resume"):
        diagnose([row for row in run() if row.step > RESUME], RESUME, reference=one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4 of a run with everything there is."""
    folder = tmp_path_factory.mktemp("saved")
    small = Small(global_batch=8)
    for step in (2, 4):
        small.train(step)
        reshard.save_state(folder, small.state)
    return folder


def held(rows: Sequence[TraceRow], checkpoint: Path, resume: int = RESUME) -> Diagnosis:
    found = describe(checkpoint)
    with found.checkpoint:
        return diagnose(rows, resume, checkpoint=found)


def of_step(folder: Path, step: int, **fields: Any) -> Path:
    """A copy of a run's checkpoint as that of another step."""
    small = Small(global_batch=8)
    small.train(4)
    small.state.step = step
    path = reshard.save_state(folder, small.state)
    edit_manifest(path, **{"lr": [rate(step + 1)], **fields})
    return path


def test_what_the_checkpoint_has_is_held_against_the_first_step(tmp_path: Path) -> None:
    data = {"shared": {"samples": RESUME * BATCH_SIZE}}
    path = of_step(tmp_path, RESUME, scaler={"scale": 4096.0}, data=data)
    assert not held(run(), path).is_alarming
    wrong = after(run(), lambda row: {"lr": (2 * rate(row.step),), "scale": 1024.0, "samples": row.step})
    found = held(wrong, path)
    assert pieces(found).items() >= {SCALE: CERTAIN, POSITION: CERTAIN}.items()
    assert "the checkpoint has 4096" in evidence(found, SCALE)
    assert "6400 before it by the checkpoint" in evidence(found, POSITION)
    assert "so the resume did not restore it" in evidence(found, POSITION)
    assert f"the checkpoint has {rate(RESUME + 1):.6g}" in evidence(found, RATE) + evidence(found, SCHEDULE)


def test_a_schedule_with_a_step_at_the_resume_is_cleared_by_the_checkpoint(tmp_path: Path) -> None:
    rows = [replace(row, lr=(1e-3 if row.step <= RESUME else 1e-2,)) for row in run()]
    assert diagnose(rows, RESUME).is_alarming
    assert not held(rows, of_step(tmp_path, RESUME, lr=[1e-2], scaler={"scale": 4096.0})).is_alarming


def test_a_scheduler_that_moves_once_a_process(tmp_path: Path) -> None:
    """B65: 8 steps for each of 100 updates on 8 ranks."""
    world = {"ranks": 8, "nodes": 1, "gpus_per_node": 8, "mesh": {"dp_shard": 8}}
    path = of_step(tmp_path, 100, schedulers={"scheduler": {"last_epoch": 800}}, world=world)
    found = held(run(lambda past: 0.0), path, resume=100)
    assert pieces(found)[SCHEDULE] == LIKELY
    assert "scheduler is at 800 after 100 steps, 8 a step: as often as there were ranks" in evidence(found, SCHEDULE)
    same = held([replace(row, ranks=8) for row in run()], path, resume=100)
    assert pieces(same).get(SCHEDULE) in (POSSIBLE, None)


def test_random_states_of_another_number_of_ranks_may_explain_a_spike(tmp_path: Path) -> None:
    """B61."""
    path = of_step(tmp_path, RESUME, rng={"ranks": 8}, scaler={"scale": 4096.0})
    found = held(run(lambda past: 0.2 * math.exp(-past / 10)), path)
    assert pieces(found)[RANDOM] == POSSIBLE
    assert "random states of 8 ranks, 4 go on" in evidence(found, RANDOM)


def stock(folder: Path, **content: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_of_weights_alone_has_lost_the_moments_for_certain(tmp_path: Path) -> None:
    path = stock(tmp_path / "weights", model={"a.weight": torch.ones(3, 3)})
    found = held(run(spike), path)
    assert pieces(found)[MOMENTS] == CERTAIN
    assert "the checkpoint has no optimizer" in evidence(found, MOMENTS)
    assert f"{path} holds weights alone: no run can resume from it" in found.notes
    assert held(run(), path).is_alarming


def test_an_adapter_is_called_that(tmp_path: Path) -> None:
    save_file(
        {f"base_model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.ones(2, 4) for side in "AB"},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    found = held(run(), tmp_path)
    assert any(note.endswith("holds a PEFT adapter alone: no run can resume from it") for note in found.notes)


def test_a_stock_checkpoint_with_an_optimizer_is_no_alarm(tmp_path: Path) -> None:
    weight = torch.ones(3, 3)
    state = {"step": torch.tensor(3.0), "exp_avg": weight, "exp_avg_sq": weight}
    groups = [{"lr": 0.1, "params": ["a.weight"]}]
    path = stock(
        tmp_path / "stock", model={"a.weight": weight}, optim={"state": {"a.weight": state}, "param_groups": groups}
    )
    found = held(run(), path)
    assert not found.is_alarming
    # The samples column shows that the position was kept elsewhere.
    assert POSITION not in pieces(found)
    del state["step"]
    path = stock(
        tmp_path / "no steps", model={"a.weight": weight}, optim={"state": {"a.weight": state}, "param_groups": groups}
    )
    assert pieces(held(run(), path))[COUNTERS] == CERTAIN


def test_a_state_by_number_is_a_state(tmp_path: Path) -> None:
    """As torch.save has it."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    assert pieces(held(run(spike), tmp_path / "all.pt"))[MOMENTS] == LIKELY


def test_a_checkpoint_of_another_step_is_held_against_nothing(saved: Path) -> None:
    found = held(run(), saved / "step-4")
    assert not found.is_alarming
    assert found.notes == [f"{saved / 'step-4'} is of step 4, not 200: nothing is held against it"]


def test_the_step_to_go_on_from_is_sound_and_lacks_nothing(saved: Path) -> None:
    rows = [replace(row, step=row.step - RESUME + 4) for row in run(lambda past: 0.5) if row.step > RESUME - 4]
    reference = [replace(row, step=row.step - RESUME + 4) for row in run() if row.step > RESUME - 4]
    found = describe(saved / "step-4")
    with found.checkpoint:
        assert diagnose(rows, 4, reference=reference, checkpoint=found).return_to == 4
        next((saved / "step-4").glob("*.distcp")).unlink()
        broken = describe(saved / "step-4")
        again = diagnose(rows, 4, reference=reference, checkpoint=broken)
    assert again.return_to == 2
    assert "the checkpoint is unsound" in evidence(again, WEIGHTS)
    assert again.advice[-1].startswith("then go on from step 2: Checkpointer.roll_back(2)")
