"""Drop-in ``load``, ``save`` and ``async_save``, and storage plug-ins for the stock functions of those names.

from reshard import dcp    # was: import torch.distributed.checkpoint as dcp
"""

from reshard.dcp.api import async_save, load, save
from reshard.dcp.range_reader import RangeReader
from reshard.dcp.range_writer import RangeWriter

__all__ = ["RangeReader", "RangeWriter", "async_save", "load", "save"]
