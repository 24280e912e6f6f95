"""Each piece of a run's state matters: without it the loader refuses by name, or the continued run is another run.

The reference is always the run that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Setup, resumed, straight, until
from ranks import run_ranks
from small import Small, fingerprint

from reshard import ReshardError, load_state, save_state

STEPS, SAVED_AT = 9, 4


@cache
def reference(streams: bool = True) -> Any:
    run = Small(streams=streams)
    return run.train(STEPS)[SAVED_AT:], fingerprint(run)


def saved(folder: Path, *, streams: bool = True, **parts: Any) -> Path:
    run = Small(parts, streams=streams)
    run.train(SAVED_AT)
    return save_state(folder, run.state)


def continued(path: Path, options: dict[str, Any], spoil: Callable[[Small], Any] | None, streams: bool = True) -> Any:
    """What a fresh run makes of the rest; ``spoil`` undoes one piece after the load."""
    run = Small(streams=streams, seed=99)
    load_state(path, run.state, **options)
    if spoil is not None:
        spoil(run)
    return run.train(STEPS), fingerprint(run)


@pytest.mark.parametrize("streams", [True, False])
def test_with_every_piece_the_run_goes_on_bit_for_bit(tmp_path: Path, streams: bool) -> None:
    path = saved(tmp_path, streams=streams)
    assert continued(path, {}, None, streams) == reference(streams)


PARTS = {
    "optimizer": {"optimizer": None, "scheduler": None},
    "scheduler": {"scheduler": None},
    "scaler": {"scaler": None},
    "data": {"data": None},
    "batch": {"plan": None},
    "extra.ema": {"extra": {}},
    "extra.streams": {"extra": {}},
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_not_saved_is_refused_by_name(tmp_path: Path, part: str) -> None:
    path = saved(tmp_path, **PARTS[part])
    run = Small(seed=99)
    before = fingerprint(run)
    with pytest.raises(ReshardError) as refusal:
        load_state(path, run.state)
    first = str(refusal.value).splitlines()[0]
    assert str(path) in first and part in first and "allow_missing" in first
    assert fingerprint(run) == before


@pytest.mark.parametrize("part", [part for part in PARTS if part != "batch"])
def test_a_part_that_may_be_missing_is_left_and_the_run_is_another(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, **PARTS[part])
    missing = ["optimizer", "scheduler"] if part == "optimizer" else ["extra.*"] if "extra" in part else [part]
    assert continued(path, {"allow_missing": missing}, None) != reference()
    assert any(part in r.getMessage() and "NOT restored" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_the_run_lacks_is_refused_by_name(tmp_path: Path, part: str) -> None:
    path = saved(tmp_path)
    run = Small(PARTS[part], seed=99)
    with pytest.raises(ReshardError) as refusal:
        load_state(path, run.state)
    assert part in str(refusal.value)
    assert "the run has none" in str(refusal.value).splitlines()[0]


def test_without_the_batch_plan_another_batch_goes_unnoticed_and_the_run_is_another(tmp_path: Path) -> None:
    """With it, test_load_refusals shows the refusal."""
    path = saved(tmp_path, plan=None)
    run = Small({"plan": None}, global_batch=4, seed=99)
    load_state(path, run.state)
    assert run.train(STEPS) != reference()[0]


def test_without_the_step_the_run_trains_too_long(tmp_path: Path) -> None:
    path = saved(tmp_path)
    rows, _ = continued(path, {}, lambda run: setattr(run.state, "step", 0))
    assert len(rows) == STEPS and len(reference()[0]) == STEPS - SAVED_AT


def test_a_checkpoint_without_the_step_is_refused(tmp_path: Path) -> None:
    run = Small()
    torch.distributed.checkpoint.save({"model": run.model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(ReshardError, match=r"no reshard.json.*lacks.*step"):
        load_state(tmp_path / "stock", run.state)


def zero_moments(run: Small) -> None:
    for entries in run.optimizer.state.values():
        entries["exp_avg"].zero_()
        entries["exp_avg_sq"].zero_()


def zero_counters(run: Small) -> None:
    for entries in run.optimizer.state.values():
        entries["step"].zero_()


def without_decay(run: Small) -> None:
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.0


SPOILS: dict[str, Callable[[Small], Any]] = {
    "model": lambda run: run.model.load_state_dict(Small(seed=99).model.state_dict()),
    "moments": zero_moments,
    "step counters": zero_counters,
    "hyperparameters": without_decay,
    "learning rate": lambda run: run.optimizer.param_groups[0].update(lr=run.lr),
    "scheduler": lambda run: run.scheduler.__dict__.update(last_epoch=0),
    "scale": lambda run: run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 65536.0}),
    "growth tracker": lambda run: run.scaler.load_state_dict(run.scaler.state_dict() | {"_growth_tracker": 0}),
    "data position": lambda run: run.sampler.__dict__.update(offset=0),
    "data seed": lambda run: setattr(run.sampler, "seed", 1),
    "data epoch": lambda run: setattr(run.sampler, "epoch", 3),
    "slot streams": lambda run: setattr(run.slots, "step", 0),
    "ema": lambda run: run.average.__dict__.update(updates=0),
    "buffer": lambda run: run.model.seen.zero_(),
}


@pytest.mark.parametrize("piece", SPOILS)
def test_each_piece_shows_in_the_continued_run(tmp_path: Path, piece: str) -> None:
    """So a loader that lost it would fail the continuity test."""
    assert continued(saved(tmp_path), {}, SPOILS[piece]) != reference()


@pytest.mark.parametrize("generator", ["torch", "python", "numpy"])
def test_each_generator_shows_where_randomness_does_not_follow_slots(tmp_path: Path, generator: str) -> None:
    import random

    import numpy as np

    seed = {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}[generator]
    path = saved(tmp_path, streams=False)
    assert continued(path, {}, lambda run: seed(12345), streams=False) != reference(False)


def test_random_states_that_were_left_out_are_refused_or_show(tmp_path: Path) -> None:
    from small import edit_manifest

    path = saved(tmp_path, streams=False)
    edit_manifest(path, parts=lambda parts: parts | {"rng": "none"})
    run = Small(streams=False, seed=99)
    with pytest.raises(ReshardError, match="lacks what the run has: rng"):
        load_state(path, run.state)
    assert continued(path, {"allow_missing": ["rng"]}, None, streams=False) != reference(False)


class TestOnRanks:
    """The same at 2 ranks with FSDP2, where each rank has random states of its own."""

    setup = Setup(streams=False, global_batch=8)

    def test_per_rank_random_states_matter_to_dropout(self, tmp_path: Path) -> None:
        rows, end = run_ranks(2, straight, self.setup, STEPS)[0]
        run_ranks(2, until, self.setup, str(tmp_path), SAVED_AT)
        good = run_ranks(2, resumed, self.setup, str(tmp_path), STEPS)[0]
        assert good[0] == rows[SAVED_AT:] and good[1] == end
        folder = tmp_path / f"step-{SAVED_AT}"
        from small import edit_manifest

        edit_manifest(folder, parts=lambda parts: parts | {"rng": "none"})
        bad = run_ranks(2, resumed, self.setup, str(tmp_path), STEPS, {"allow_missing": ["rng"]})[0]
        assert bad[2] == good[2] and bad[1] != end
