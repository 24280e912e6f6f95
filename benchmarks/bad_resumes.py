"""Real runs of the training script that resume with one piece of their state lost, as material for triage.

    python benchmarks/bad_resumes.py FOLDER --seed 0 [--only CASE ...]

Trains a base of `RESUME_STEP` steps once, then resumes a copy of it for every case and trains on. What
is lost is lost right after the resume, as a loader that forgets it would. A case's folder has the run's checkpoints and
its whole trace.

Most tokens of the data follow a Markov chain, and every window has a fact of its own, a pair of tokens that is learnt
at one sight. Where the chain is too random to be learnt, little else varies, and a lost position shows in the loss of
runs even as small as these.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import reshard
from reshard.verify.triage.finding import BATCH as BATCH_PIECE
from reshard.verify.triage.finding import DATA, MOMENTS, POSITION, RATE, SCALE, SCHEDULE, WEIGHTS
from reshard.verify.triage.shape import CONTINUOUS, LOW, MID_RUN, PERSISTENT, SPIKE

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

import train_fsdp  # noqa: E402

RESUME_STEP, LAST_STEP, MID_RUN_STEP = 160, 300, 230
LENGTH, BATCH, CHAIN, WINDOWS, LR = 32, 8, 256, 3000, 1e-2
SETTINGS = f"""
model: {{vocabulary: {CHAIN + WINDOWS}, layers: 2, width: 64, heads: 2, kv_heads: 1, hidden: 128,
         max_length: {LENGTH}, dropout: 0.1, tied_head: false}}
data: {{kind: tokens, path: DATA, length: {LENGTH}}}
batch: {{global_batch: {BATCH}, micro_batch: {BATCH}}}
train: {{steps: {RESUME_STEP}, seed: SEED, precision: fp16}}
optimizer: {{lr: {LR}, betas: [0.9, 0.999]}}
schedule: {{warmup_steps: 20, total_steps: 450}}
checkpoint: {{folder: unused, interval: {RESUME_STEP // 2}, keep_latest_k: 10}}
trace: unused
"""
INITIAL_SCALE = 2.0**20
"""Far above what these runs bear, so that a scale which starts anew shows."""

SUCCESSORS = {"chain": [0.7, 0.15, 0.1, 0.05], "noise": [0.25] * 4}
"""How likely each token that may follow another one does."""

Spoil = Callable[[reshard.TrainState], None]


@dataclass(frozen=True)
class Case:
    """One run after the resume.

    Args:
        name: the fault.
        shapes: the class that its loss has, judged by hand from the difference to the clean run; two where that
            difference is, by the end, as large as what clean runs of other rounding differ by.
        piece: what a column or the checkpoint shows to be lost; None where neither can.
        spoil: what the resume loses.
        changes: settings that differ from the base's.
        ranks: world size after the resume.
        around: patches that hold while the run goes on.
        data: which of `SUCCESSORS` the run is trained on.
    """

    name: str
    shapes: tuple[str, ...]
    piece: str | None = None
    spoil: Spoil = lambda state: None
    changes: tuple[str, ...] = ()
    ranks: int = 1
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    data: str = "chain"

    @property
    def last_step(self) -> int:
        """Where a position was lost, the run has to come to samples that are new to it."""
        return LAST_STEP if self.data == "chain" else 2 * RESUME_STEP + 40


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _weight(state: reshard.TrainState, name: str) -> Tensor:
    return _local(dict(state.model.named_parameters())[name])


def _entries(state: reshard.TrainState) -> list[dict[str, Any]]:
    return [entry for optimizer in state.optimizers.values() for entry in optimizer.state.values()]


def _set_rate(state: reshard.TrainState, rate: float) -> None:
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate


def _moments(state: reshard.TrainState) -> None:
    for entry in _entries(state):
        _local(entry["exp_avg"]).zero_(), _local(entry["exp_avg_sq"]).zero_()


def _step_counters(state: reshard.TrainState) -> None:
    for entry in _entries(state):
        entry["step"].zero_()


def _schedule_at(state: reshard.TrainState, epoch: int, peak: float = LR) -> None:
    (scheduler,) = state.schedulers.values()
    scheduler.last_epoch = epoch
    _set_rate(state, peak * scheduler.lr_lambdas[0](epoch))


def _thirty_times_the_rate(state: reshard.TrainState) -> None:
    (scheduler,) = state.schedulers.values()
    scheduler.base_lrs = [30 * rate for rate in scheduler.base_lrs]
    _schedule_at(state, scheduler.last_epoch, 30 * LR)


def _data_position(state: reshard.TrainState) -> None:
    state.data.load_state_dict({**state.data.state_dict(), "samples": 0, "epoch": 0, "offset": 0})


def _rows_permuted(state: reshard.TrainState) -> None:
    rows = _weight(state, "blocks.0.mlp.gate.weight")
    rows.copy_(rows.roll(1, 0))


def _weights_swapped(state: reshard.TrainState) -> None:
    one, other = (_weight(state, f"blocks.{block}.mlp.down.weight") for block in (0, 1))
    kept = one.clone()
    one.copy_(other), other.copy_(kept)


def _head_overwritten(state: reshard.TrainState) -> None:
    _weight(state, "head.weight").copy_(_weight(state, "embedding.weight"))


def _bf16_rounding(state: reshard.TrainState) -> None:
    for parameter in state.model.parameters():
        _local(parameter).copy_(_local(parameter).bfloat16())


def _random_streams(state: reshard.TrainState) -> None:
    state.extra["streams"].seed += 1


def _scaler(state: reshard.TrainState) -> None:
    state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": INITIAL_SCALE, "_growth_tracker": 0})


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _half_batch() -> contextlib.AbstractContextManager[None]:
    resume = functools.partialmethod(reshard.Checkpointer.resume, allow_global_batch_change=True)
    return _patched(reshard.Checkpointer, "resume", resume)


def _bad_batch() -> contextlib.AbstractContextManager[None]:
    """Three batches of noise, as a corrupt shard of the data would give."""
    first = (MID_RUN_STEP - RESUME_STEP) * BATCH
    noise = torch.Generator().manual_seed(1)
    read, reads = train_fsdp.TokenWindows.__getitem__, iter(range(1 << 60))

    def spoiled(self: Any, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = read(self, index)
        if first <= next(reads) < first + 3 * BATCH:
            return torch.randint_like(inputs, CHAIN, generator=noise), torch.randint_like(
                targets, CHAIN, generator=noise
            )
        return inputs, targets

    return _patched(train_fsdp.TokenWindows, "__getitem__", spoiled)


def _large_rate() -> contextlib.AbstractContextManager[None]:
    """Ten steps at thirty times the rate, as an edit of the schedule would give."""
    share = train_fsdp.WarmupCosine.__call__

    def spoiled(self: Any, step: int) -> float:
        return share(self, step) * (30 if MID_RUN_STEP <= step < MID_RUN_STEP + 10 else 1)

    return _patched(train_fsdp.WarmupCosine, "__call__", spoiled)


CASES = (
    Case("none, chain", (CONTINUOUS,)),
    Case("none, noise", (CONTINUOUS,), data="noise"),
    Case("none, 2 ranks", (CONTINUOUS,), changes=(f"batch.micro_batch={BATCH // 2}",), ranks=2),
    Case("none, 3 ranks", (CONTINUOUS,), changes=(f"batch.micro_batch={BATCH // 2}",), ranks=3),
    Case("moments", (SPIKE,), MOMENTS, _moments),
    Case("step counters", (CONTINUOUS,), None, _step_counters),
    Case("learning rate", (CONTINUOUS,), RATE, lambda state: _set_rate(state, LR)),
    Case("thirty times the rate", (PERSISTENT,), RATE, _thirty_times_the_rate),
    Case("warm-up again", (CONTINUOUS,), SCHEDULE, lambda state: _schedule_at(state, 0)),
    Case("schedule twice as fast", (CONTINUOUS,), SCHEDULE, lambda state: _schedule_at(state, 2 * RESUME_STEP)),
    Case("data position", (LOW,), POSITION, _data_position, data="noise"),
    Case(
        "half the batch", (CONTINUOUS, PERSISTENT), BATCH_PIECE,
        changes=(f"batch.global_batch={BATCH // 2}", f"batch.micro_batch={BATCH // 2}"), around=_half_batch,
    ),
    Case("rows permuted", (SPIKE,), WEIGHTS, _rows_permuted),
    Case("weights swapped", (SPIKE,), WEIGHTS, _weights_swapped),
    Case("head overwritten", (SPIKE,), WEIGHTS, _head_overwritten),
    Case("bf16 rounding", (CONTINUOUS,), None, _bf16_rounding),
    Case("random streams", (CONTINUOUS,), None, _random_streams),
    Case("scaler", (CONTINUOUS,), SCALE, _scaler),
    Case("bad batch", (MID_RUN,), DATA, around=_bad_batch),
    Case("large learning rate", (MID_RUN,), RATE, around=_large_rate),
)  # fmt: skip


def train_cases(folder: Path, seed: int, cases: Sequence[Case] = CASES) -> None:
    """Trains the bases and all cases of a seed below a folder, each in a folder of its name."""
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    device = train_fsdp.start_distributed()
    scaler = functools.partial(torch.amp.GradScaler, init_scale=INITIAL_SCALE)
    with _patched(torch.amp, "GradScaler", scaler):
        for data in dict.fromkeys(case.data for case in cases):
            base = folder / f"base-{data}"
            base.mkdir(parents=True)
            tokens = base / "tokens.bin"
            _tokens(seed, SUCCESSORS[data]).tofile(tokens)
            config = base / "settings.yaml"
            config.write_text(SETTINGS.replace("DATA", str(tokens)).replace("SEED", str(seed)))
            train_fsdp.train(train_fsdp.prepare(str(config), _places(base)), device)
            for case in cases:
                if case.data == data:
                    _train_case(case, base, folder / case.name, device)
    dist.barrier()
    dist.destroy_process_group()


def _train_case(case: Case, base: Path, place: Path, device: torch.device) -> None:
    shutil.copytree(base, place)
    config = str(place / "settings.yaml")
    changes = [*_places(place), f"train.steps={case.last_step}", *case.changes]
    if case.ranks > 1:
        _train_elsewhere(config, changes, case.ranks)
    else:
        with case.around(), _spoiled(case.spoil):
            train_fsdp.train(train_fsdp.prepare(config, changes), device)


def _places(folder: Path) -> list[str]:
    return [f"checkpoint.folder={folder / 'checkpoints'}", f"trace={folder / 'trace.jsonl'}"]


@contextlib.contextmanager
def _spoiled(spoil: Spoil) -> Iterator[None]:
    resume = reshard.Checkpointer.resume

    @torch.no_grad()
    def resumed(self: Any, *args: Any, **options: Any) -> Any:
        report = resume(self, *args, **options)
        spoil(self.state)
        return report

    with _patched(reshard.Checkpointer, "resume", resumed):
        yield


def _train_elsewhere(config: str, changes: list[str], ranks: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, str(SCRIPTS / "train_fsdp.py"), "--config", config, *changes]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ended = subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {ended.returncode}\n{ended.stderr[-4000:]}")


def _tokens(seed: int, likely: Sequence[float]) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    successors = generator.integers(0, CHAIN, (CHAIN, 4))
    tokens = generator.choice(4, (WINDOWS, LENGTH), p=likely)
    state = 0
    for window, row in enumerate(tokens):
        fact = CHAIN + window, generator.integers(0, CHAIN)
        for at, choice in enumerate(row):
            if at % 8 in (5, 6):
                row[at] = fact[at % 8 - 5]
            else:
                state = row[at] = successors[state, choice]
    return np.append(tokens.reshape(-1), 0).astype("<u2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs go; a folder for each case")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the data and their order")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="this case (repeatable)")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only]
    train_cases(arguments.folder.absolute(), arguments.seed, chosen)


if __name__ == "__main__":
    main()
