"""Make an FSDP run survive any change of machines.

Everything public is here. Nothing heavy is imported before it is used: the command line describes a checkpoint without
paying for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard import dcp
    from reshard.batch.plan import BatchPlan
    from reshard.cluster.signals import StopSignal
    from reshard.formats.checkpoint import Checkpoint
    from reshard.formats.opening import open_checkpoint
    from reshard.rewrite.convert import convert
    from reshard.train.accumulate import StepResult, accumulate
    from reshard.train.checkpointer import Checkpointer
    from reshard.train.describe_flat import describe_flat
    from reshard.train.exact import exact
    from reshard.train.export import export_weights
    from reshard.train.norm import clip_grad_norm_
    from reshard.train.recovery import RecoveryMonitor
    from reshard.train.resume.load import load_state
    from reshard.train.resume.report import LoadReport
    from reshard.train.rewarmup import Rewarmup
    from reshard.train.sampler import ElasticSampler
    from reshard.train.save import save_state
    from reshard.train.state import TrainState
    from reshard.train.streams import SeededDataset, SlotStreams
    from reshard.train.trace import TraceWriter
    from reshard.verify.traces.trace import TraceRow

__version__ = "0.1.0"

_HOMES = {
    "BatchPlan": "reshard.batch.plan",
    "Checkpoint": "reshard.formats.checkpoint",
    "Checkpointer": "reshard.train.checkpointer",
    "ElasticSampler": "reshard.train.sampler",
    "LoadReport": "reshard.train.resume.report",
    "RecoveryMonitor": "reshard.train.recovery",
    "Rewarmup": "reshard.train.rewarmup",
    "SeededDataset": "reshard.train.streams",
    "SlotStreams": "reshard.train.streams",
    "StepResult": "reshard.train.accumulate",
    "StopSignal": "reshard.cluster.signals",
    "TraceRow": "reshard.verify.traces.trace",
    "TraceWriter": "reshard.train.trace",
    "TrainState": "reshard.train.state",
    "accumulate": "reshard.train.accumulate",
    "clip_grad_norm_": "reshard.train.norm",
    "convert": "reshard.rewrite.convert",
    "describe_flat": "reshard.train.describe_flat",
    "exact": "reshard.train.exact",
    "export_weights": "reshard.train.export",
    "load_state": "reshard.train.resume.load",
    "open_checkpoint": "reshard.formats.opening",
    "save_state": "reshard.train.save",
}

__all__ = [
    "BatchPlan",
    "Checkpoint",
    "Checkpointer",
    "ElasticSampler",
    "LoadReport",
    "RecoveryMonitor",
    "ReshardError",
    "Rewarmup",
    "SeededDataset",
    "SlotStreams",
    "StepResult",
    "StopSignal",
    "TraceRow",
    "TraceWriter",
    "TrainState",
    "accumulate",
    "clip_grad_norm_",
    "convert",
    "dcp",
    "describe_flat",
    "exact",
    "export_weights",
    "load_state",
    "open_checkpoint",
    "save_state",
]


def __getattr__(name: str) -> Any:
    if name == "dcp":
        return importlib.import_module("reshard.dcp")
    if name not in _HOMES:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
