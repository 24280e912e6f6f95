"""What the surroundings say: the one place where environment variables are read."""

from __future__ import annotations

import os
import uuid


def attempt_token() -> str:
    """A name for this attempt at the run, the same for all its ranks once rank 0 has handed it on.

    ``RESHARD_ATTEMPT`` if set; under SLURM the job and its restart count; else a random name.
    """
    if token := os.environ.get("RESHARD_ATTEMPT"):
        return token
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return uuid.uuid4().hex[:12]


def ranks_per_node(world_size: int) -> int:
    """Ranks on this node, as torchrun says; all of them where nothing says otherwise."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() and int(value) > 0 else world_size


def local_rank() -> int:
    """This process's place on its node: the number of the GPU it should take."""
    value = os.environ.get("LOCAL_RANK", "0")
    return int(value) if value.isdigit() else 0


def under_launcher() -> bool:
    """Whether torchrun (or anything that speaks its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def want_deterministic_cublas() -> None:
    """Asks cuBLAS for repeatable results; it reads the variable when it is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
