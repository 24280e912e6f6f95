"""How large a model is: its parameters, the share of the rank that has the most, and its largest block.

FSDP splits the first dim of every parameter into chunks of ceil(rows / ranks) rows, so no rank has more than the first
one: 1/ranks of the parameters, and at most one row of each parameter above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together: those of a block, or all that are in none.

    Attributes:
        copies: of this unit in the model, as layers are alike.
    """

    shapes: tuple[Shape, ...]
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Of one copy."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class ModelSize:
    """A model, as far as it is known.

    Attributes:
        parameters: tied ones once.
        blocks: those that are layers; empty where shapes are not known.
        root: parameters outside of these; None where shapes are not known.
        stacked: the same model with the experts of a layer in one tensor, of which FSDP gives a rank whole ones; None
            where it has none.
    """

    parameters: int
    blocks: tuple[Unit, ...] = ()
    root: Unit | None = None
    stacked: ModelSize | None = None

    @classmethod
    def of_units(cls, blocks: Iterable[Unit], root: Unit) -> ModelSize:
        """A model whose shapes are known."""
        blocks = tuple(blocks)
        return cls(root.parameters + sum(block.copies * block.parameters for block in blocks), blocks, root)

    @classmethod
    def of_tensors(cls, shapes: Mapping[str, Shape]) -> ModelSize:
        """A model by name of its parameters: what has a number in its name is of the block with that number."""
        blocks: dict[str, list[Shape]] = {}
        root: list[Shape] = []
        for name, shape in shapes.items():
            block = _block_of(name)
            (root if block is None else blocks.setdefault(block, [])).append(shape)
        return cls.of_units((Unit(tuple(inside)) for inside in blocks.values()), Unit(tuple(root)))

    @property
    def has_shapes(self) -> bool:
        """Whether shares are exact; otherwise they are lower bounds."""
        return self.root is not None

    def stacked_share(self, ranks: int) -> int | None:
        """Parameters of the rank that has the most with stacked experts, where these are others than without."""
        share = None if self.stacked is None else self.stacked.largest_share(ranks)
        return share if share is not None and share != self.largest_share(ranks) else None

    @property
    def block_parameters(self) -> int | None:
        """Of the largest block, or of what is in none where that is larger; None where shapes are not known."""
        if self.root is None:
            return None
        return max(unit.parameters for unit in (*self.blocks, self.root))

    def largest_share(self, ranks: int) -> int:
        """Parameters of the rank that has the most."""
        if self.root is None:
            return -(-self.parameters // ranks)
        units = (*self.blocks, self.root)
        return sum(unit.copies * sum(_first_chunk(shape, ranks) for shape in unit.shapes) for unit in units)


def _first_chunk(shape: Shape, ranks: int) -> int:
    return -(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1


def _block_of(name: str) -> str | None:
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else ".".join(parts[: at + 1])
