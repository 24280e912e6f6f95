"""A run that is killed again and again, and goes on at other world sizes, against one that never stopped."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lab import Run, Setup, build, digest
from ranks import run_ranks

import reshard

STEPS = 16
# 7 slots of 2 samples, so that every world size but 1 idles some places; dropout and clipping are on, and active.
SETUP = {"exact": True, "global_batch": 14, "micro_batch": 2, "dropout": 0.1, "clip_norm": 0.05}


def leg(setup: Setup, folder: str, die_after: int | None) -> Any:
    """One start, killed with SIGKILL on all ranks after a step: (where it resumed, the SHA-256 at the end)."""
    run = build(setup)
    checkpointer = reshard.Checkpointer(folder, run.state, interval=3)
    report = checkpointer.resume()

    def on_step(run: Run, loss: float) -> None:
        if run.state.step == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    run.train(STEPS, on_step, checkpointer.step)
    return None if report is None else report.step, whole_state(run)


def whole_state(run: Run) -> str:
    """Over parameters, moments, scheduler, data position, streams and step."""
    beside = [part.state_dict() for part in (run.state.scheduler, run.sampler, run.streams)]
    text = json.dumps([digest(run), beside, run.state.step], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def chain(folder: Path, worlds: list[tuple[int, int | None]], **options: Any) -> tuple[list[int | None], str]:
    """Where each leg that came to its end was resumed from, and the state at the end."""
    setup = Setup(**{**SETUP, **options})
    for world, die_after in worlds:
        outcomes = run_ranks(world, leg, setup, str(folder), die_after)
        if die_after is not None:
            assert outcomes == [None] * world, "it should have been killed"
    assert len({state for _, state in outcomes}) == 1
    return outcomes[0]


@pytest.mark.parametrize("options", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)], ids=str)
def test_killed_on_4_3_and_6_ranks_and_ended_on_1(tmp_path: Path, options: dict[str, Any]) -> None:
    _, straight = chain(tmp_path / "straight", [(4, None)], **options)
    resumed_at, state = chain(tmp_path / "broken", [(4, 5), (3, 8), (6, 13), (1, None)], **options)
    assert resumed_at == 12
    assert state == straight


@pytest.mark.slow
def test_replicas_take_part_in_the_chain(tmp_path: Path) -> None:
    _, straight = chain(tmp_path / "straight", [(3, None)])
    setup = Setup(**{**SETUP, "wrap": "hsdp"})
    assert run_ranks(4, leg, setup, str(tmp_path / "broken"), 7) == [None] * 4
    resumed_at, state = chain(tmp_path / "broken", [(1, None)])
    assert (resumed_at, state) == (6, straight)


@pytest.mark.slow
def test_the_chain_without_exact_mode_ends_elsewhere(tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    _, straight = chain(tmp_path / "straight", [(4, None)], exact=False)
    _, state = chain(tmp_path / "broken", [(4, 5), (3, None)], exact=False)
    assert state != straight


def told_on_resume(setup: Setup, folder: str, threads: int) -> Any:
    run = build(setup)
    if setup.exact:
        reshard.exact(run.model, threads=threads)
    report = reshard.load_state(folder, run.state)
    return report.warnings, report.notes


def saved(setup: Setup, folder: str) -> None:
    run = build(setup)
    run.train(2)
    reshard.save_state(folder, run.state)


def test_a_resume_says_where_exact_mode_is_not_as_before(tmp_path: Path) -> None:
    for name, is_exact in (("exact", True), ("stock", False)):
        run_ranks(1, saved, Setup(**{**SETUP, "exact": is_exact}), str(tmp_path / name))
    manifests = {
        name: json.loads(next((tmp_path / name).glob("*/reshard.json")).read_text()) for name in ("exact", "stock")
    }
    assert manifests["exact"]["exact"]["threads"] == 1 and manifests["exact"]["exact"]["machine"]
    assert "exact" not in manifests["stock"]

    def told(exact: bool, name: str, threads: int = 1) -> tuple[list[str], list[str]]:
        return run_ranks(1, told_on_resume, Setup(**{**SETUP, "exact": exact}), str(tmp_path / name), threads)[0]

    assert told(True, "exact")[0] == told(False, "stock")[0]
    assert told(True, "exact", threads=2)[0][-1] == (
        "exact mode, but not as before: threads 1 -> 2; the bits need not be those of a run without a break"
    )
    assert "the run was in exact mode and is not now: from here on its bits follow the ranks" in told(False, "exact")[0]
    assert "exact mode from here on; up to this step the bits followed the ranks" in told(True, "stock")[1]
