"""The manifest of a rewritten checkpoint: the same training state, for other ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from reshard.batch.plan import BatchPlan
from reshard.errors import BatchError, CheckpointUnsound
from reshard.formats import tagged
from reshard.formats.manifest import Manifest, World
from reshard.geometry.mesh import Mesh
from reshard.index.kinds import MODEL_ROOTS, optimizer_place


def manifest_for(found: Manifest, mesh: Mesh, keys: Collection[str], only: str | None) -> Manifest:
    """Rewrites a manifest: the same batch, in as many micro-steps as it now takes, and no promise of what is left out.

    Args:
        found: of the source.
        mesh: the ranks to write for.
        keys: of all that is carried over.
        only: the only part that is, if not all are.

    Raises:
        CheckpointUnsound: its batch plan is none.
    """
    kept = set(keys)
    rewritten = replace(found, world=_world(found.world, mesh), batch=_batch(found, mesh), files=None)
    if only is not None:
        parts = {part: state for part, state in found.parts.items() if part == only}
        return replace(
            rewritten, parts=parts, lr=[], batch=None, data=None, schedulers={}, scaler=None, rng=None, extra={},
            optimizers={},
        )  # fmt: skip
    return _without_lost_parts(rewritten, kept)


def _world(found: World, mesh: Mesh) -> World:
    per_node = -(-found.ranks // max(1, found.nodes))
    nodes = -(-mesh.ranks // max(1, per_node))
    return World(mesh.ranks, nodes, min(found.gpus_per_node, mesh.ranks), mesh.axes)


def _batch(found: Manifest, mesh: Mesh) -> dict[str, object] | None:
    if found.batch is None:
        return None
    try:
        return dict(BatchPlan(found.batch["global_batch"], found.batch["micro_batch"], mesh.ranks).state_dict())
    except (BatchError, KeyError, TypeError) as error:
        raise CheckpointUnsound(
            "not a batch plan", key="batch", found=found.batch, hint="the manifest is damaged: use another step"
        ) from error


def _without_lost_parts(found: Manifest, kept: set[str]) -> Manifest:
    is_there = {
        "model": any(key.partition(".")[0] in MODEL_ROOTS for key in kept),
        "optimizer": any(optimizer_place(key) is not None for key in kept),
        "rng": any(key.startswith("rng.") for key in kept),
    }
    lost = {part for part, there in is_there.items() if not there and found.parts.get(part) == "saved"}
    # What the manifest says of these refers to tensors by key.
    states = {f"extra.{name}": state for name, state in found.extra.items()}
    states |= {f"scheduler.{name}": state for name, state in found.schedulers.items()}
    states |= {"scaler": found.scaler, "data": found.data}
    lost |= {part for part, state in states.items() if not kept.issuperset(tagged.stored_keys(state))}
    if found.schedulers and all(f"scheduler.{name}" in lost for name in found.schedulers):
        lost.add("scheduler")
    return replace(
        found,
        parts={part: state for part, state in found.parts.items() if part not in lost},
        rng=None if "rng" in lost else found.rng,
        optimizers={} if "optimizer" in lost else found.optimizers,
        extra={name: state for name, state in found.extra.items() if f"extra.{name}" not in lost},
        schedulers={name: state for name, state in found.schedulers.items() if f"scheduler.{name}" not in lost},
        scaler=None if "scaler" in lost else found.scaler,
        data=None if "data" in lost else found.data,
    )
