"""The two sides of a resume: the checkpoint that is there, and the run that wants it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.dcp.filling import Filling, plan_filling
from reshard.dcp.ranks import Ranks
from reshard.dcp.stored import StoredState
from reshard.errors import CheckpointNotFound, CheckpointUnsound
from reshard.formats import dcp_metadata
from reshard.formats import manifest as manifests
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import NAME as DCP
from reshard.formats.file_lengths import file_faults
from reshard.formats.manifest import Manifest
from reshard.storage.steps import committed_steps
from reshard.train import optimizer_state
from reshard.train.model_state import aliases, model_tensors
from reshard.train.optimizer_state import OptimizerState
from reshard.train.resume.inventory import Inventory, take_inventory
from reshard.train.resume.rescue import is_rescued
from reshard.train.state import MODEL, OPTIMIZER, RNG, STEP, TrainState
from reshard.verify.structure import structure_faults


@dataclass(frozen=True)
class Run:
    """The live side.

    Attributes:
        state: what the caller has.
        ranks: the job's.
        model: FQN -> tensor, in the model's own memory.
        aliases: tied names -> the first name.
        optimizer: by name, before anything is loaded.
    """

    state: TrainState
    ranks: Ranks
    model: dict[str, Any]
    aliases: dict[str, str]
    optimizer: OptimizerState

    @classmethod
    def of(cls, state: TrainState, ranks: Ranks) -> Run:
        """Reads the live state; collective for FSDP1."""
        return cls(
            state,
            ranks,
            model_tensors(state.model),
            aliases(state.model),
            optimizer_state.capture(state.model, state.optimizers),
        )


@dataclass(frozen=True)
class Source:
    """The stored side: an opened checkpoint, its manifest (None if stock wrote it) and its keys."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    stored: StoredState
    inventory: Inventory

    @classmethod
    def of(cls, checkpoint: Checkpoint, run: Run) -> Source:
        """Sorts what a checkpoint holds, and on rank 0 looks whether its files are whole. Reads no tensor.

        Raises:
            CheckpointUnsound: they are not, or the manifest is damaged.
        """
        manifest = checkpoint.require_manifest()
        stored = StoredState.of(checkpoint)
        if run.ranks.rank == 0 and (faults := _faults(checkpoint)):
            raise CheckpointUnsound(
                faults[0], hint="copy the folder again, or resume from another step", details=faults[1:]
            )
        return cls(checkpoint, manifest, stored, take_inventory(stored, {*run.model, *run.optimizer.parameters}))

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.checkpoint.path

    def has(self, part: str) -> bool:
        """Whether the checkpoint holds a part of a run's state."""
        if (
            self.manifest is not None
            and part in self.manifest.parts
            and not (part == OPTIMIZER and self.inventory.integers)
        ):
            return self.manifest.parts[part] == "saved"
        evidence = {MODEL: self.inventory.model, OPTIMIZER: self.inventory.has_optimizer, RNG: self.inventory.rng}
        return bool(evidence.get(part, self.manifest is not None and part == STEP))

    @property
    def parts(self) -> list[str]:
        """The parts of a run's state that it holds."""
        if self.manifest is None:
            return [part for part in (MODEL, OPTIMIZER) if self.has(part)]
        return [part for part, kept in self.manifest.parts.items() if kept == "saved"]

    @property
    def contents(self) -> str:
        """What it holds, and what the run that saved it did not have, as a line for the log."""
        absent = [part for part, kept in self.manifest.parts.items() if kept == "none"] if self.manifest else []
        had_none = f"; the run had no {', '.join(absent)}" if absent else ""
        return f"{self.folder} holds {', '.join(self.parts) or 'nothing that is known'}{had_none}"

    def read_objects(self, keys: set[str], ranks: Ranks) -> dict[str, Any]:
        """Small stored objects and tensors, whole, on every rank. Collective."""
        template = {key: self.room(key) for key in sorted(keys)}
        if template:
            self.plan_filling(template, ranks).run()
        return template

    def plan_filling(self, room: dict[str, Any], ranks: Ranks) -> Filling:
        """To read what is stored under the keys of ``room`` into its values. Collective."""
        # What may be rounded was decided before, part by part.
        return plan_filling(room, self.checkpoint, ranks, allow_cast=True)

    def room(self, key: str) -> Any:
        """An uninitialised CPU tensor for a whole stored tensor, or None for an object."""
        entry = self.stored.tensors.get(key)
        return None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)


def _faults(checkpoint: Checkpoint) -> list[str]:
    if checkpoint.format == DCP:
        return structure_faults(checkpoint.path, checkpoint.index)
    index, files = checkpoint.index, checkpoint.files
    return [
        *map(str, file_faults(index, files.paths, files.in_memory)),
        *(f"{checkpoint.path}: {key}: {fault}" for key, fault in index.tiling_faults()),
    ]


def holds_dcp(folder: Path) -> bool:
    """Whether a folder is one of DCP, whole or not."""
    return (folder / dcp_metadata.FILE_NAME).exists() or manifests.exists(folder)


def find_step(path: Path) -> Path:
    """The checkpoint folder that a path means: itself, the newest committed step below it, or another tool's folder.

    Raises:
        CheckpointNotFound: there is none.
    """
    path = path.expanduser()
    if not path.is_dir():
        fault = "not a folder" if path.exists() else "no such folder"
        raise CheckpointNotFound(fault, path=path, hint="name a step-<n> folder, or the run's folder")
    if holds_dcp(path):
        return path
    steps = committed_steps(path)
    if not steps and is_rescued(path):
        return path
    if not steps:
        raise CheckpointNotFound(
            "no committed checkpoint in it", path=path, hint="name a step-<n> folder, or start from scratch"
        )
    return steps[-1].path
