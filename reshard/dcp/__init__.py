"""Moving a state dict to and from a checkpoint folder, through ``torch.distributed.checkpoint``."""

from reshard.dcp.stock import load, save
from reshard.dcp.stored import StoredState, StoredTensor, nested

__all__ = ["StoredState", "StoredTensor", "load", "nested", "save"]
