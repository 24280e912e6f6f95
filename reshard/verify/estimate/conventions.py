"""What a training state takes for each parameter, by the conventions that are in use.

Where the figures come from:

- Adam keeps two moments. torch's Adam and AdamW make them ``zeros_like`` the parameter: in its dtype, 2 x 4 bytes for
  fp32 and 2 x 2 for bf16. A ``step`` for each tensor is next to nothing and left out.
- A gradient has the dtype of its parameter (autograd; FSDP2 casts reduced gradients back to it). Whoever adds bf16
  gradients up in fp32, as Megatron's ``main_grad`` does, needs 2 bytes more.
- FSDP mixed precision (``MixedPrecisionPolicy``): shards and gradient shards stay fp32; a block that runs is gathered
  in the compute dtype, and its whole gradients are of that dtype until they are reduced. Neither is ever saved.
- fp16 takes what bf16 does, in every row.
- A master is an fp32 copy of a 16-bit weight that the optimizer updates: Micikevicius et al., arXiv 1710.03740. With
  moments in bf16: DeepSeek-V3, arXiv 2412.19437, section 3.3.3.
- 8-bit moments: a byte for each and an fp32 scale for every 256 of them, as torchao and bitsandbytes (which had 2048
  before, as Dettmers et al., arXiv 2110.02861, do). Both leave tensors below 4096 elements in 32 bits.
- ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3.1): 2 + 2 for 16-bit weights and gradients, 12 for what Adam
  needs. Stage 1 splits these 12, stage 2 the gradients too, stage 3 the weights too. DeepSpeed's files of stages 1
  and 2 hold the weights, written by rank 0, and every rank's part of the 12; those of stage 3 hold that part alone:
  the weights in ``model_states`` are placeholders, shape (0,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.index.kinds import MASTERS, MOMENTS, WEIGHTS

GRADIENTS = "gradients"
PARTS = (WEIGHTS, MASTERS, MOMENTS, GRADIENTS)

_EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)


@dataclass(frozen=True)
class Split:
    """Bytes for each parameter, by part of the state.

    Attributes:
        whole: parts that are not sharded: in memory every rank has all of them, in files rank 0 writes them.
    """

    weights: float = 0
    masters: float = 0
    moments: float = 0
    gradients: float = 0
    whole: frozenset[str] = frozenset()

    @property
    def parts(self) -> Mapping[str, float]:
        """Part -> bytes for each parameter."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def per_parameter(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def total_bytes(self, parameters: int) -> int:
        """Of a model, each part once."""
        return round(self.per_parameter * parameters)

    def rank_bytes(self, parameters: int, share: int) -> int:
        """Of the rank that has the most: what is whole, and its share of what is sharded.

        Args:
            parameters: of the model.
            share: parameters of that rank.
        """
        whole = sum(count for part, count in self.parts.items() if part in self.whole)
        return round(whole * parameters + (self.per_parameter - whole) * share)


@dataclass(frozen=True)
class Convention:
    """One way to keep a training state.

    Attributes:
        name: for programs.
        title: for people.
        checkpoint: in the files.
        memory: resident between two blocks, gradients as after a backward pass.
        transient: of each parameter of a block that runs: its whole weights and gradients, in the compute dtype.
        is_zero: its files are DeepSpeed's.
    """

    name: str
    title: str
    checkpoint: Split
    memory: Split
    transient: float
    is_zero: bool = False


_WHOLE_WEIGHTS = frozenset([WEIGHTS])
_WHOLE_WEIGHTS_AND_GRADIENTS = frozenset([WEIGHTS, GRADIENTS])

CONVENTIONS = (
    Convention(
        "fp32-adam", "fp32 Adam",
        Split(weights=4, moments=8), Split(weights=4, moments=8, gradients=4), transient=8,
    ),
    Convention(
        "fsdp-mixed", "FSDP mixed precision, fp32 shards",
        Split(weights=4, moments=8), Split(weights=4, moments=8, gradients=4), transient=4,
    ),
    Convention(
        "bf16-master", "bf16 weights, fp32 master and moments",
        Split(weights=2, masters=4, moments=8), Split(weights=2, masters=4, moments=8, gradients=2), transient=4,
    ),
    Convention(
        "bf16-master-bf16-moments", "bf16 weights, fp32 master, bf16 moments",
        Split(weights=2, masters=4, moments=4), Split(weights=2, masters=4, moments=4, gradients=2), transient=4,
    ),
    Convention(
        "fp32-bf16-moments", "fp32 weights, bf16 moments",
        Split(weights=4, moments=4), Split(weights=4, moments=4, gradients=4), transient=4,
    ),
    Convention(
        "bf16-adam", "bf16 weights and moments",
        Split(weights=2, moments=4), Split(weights=2, moments=4, gradients=2), transient=4,
    ),
    Convention(
        "fp32-8bit-moments", "fp32 weights, 8-bit moments",
        Split(weights=4, moments=_EIGHT_BIT_MOMENTS), Split(weights=4, moments=_EIGHT_BIT_MOMENTS, gradients=4),
        transient=4,
    ),
    Convention(
        "bf16-8bit-moments", "bf16 weights, 8-bit moments",
        Split(weights=2, moments=_EIGHT_BIT_MOMENTS), Split(weights=2, moments=_EIGHT_BIT_MOMENTS, gradients=2),
        transient=4,
    ),
    Convention(
        "zero-1", "ZeRO stage 1",
        Split(weights=2, masters=4, moments=8, whole=_WHOLE_WEIGHTS),
        Split(weights=2, masters=4, moments=8, gradients=2, whole=_WHOLE_WEIGHTS_AND_GRADIENTS),
        transient=0, is_zero=True,
    ),
    Convention(
        "zero-2", "ZeRO stage 2",
        Split(weights=2, masters=4, moments=8, whole=_WHOLE_WEIGHTS),
        Split(weights=2, masters=4, moments=8, gradients=2, whole=_WHOLE_WEIGHTS),
        transient=0, is_zero=True,
    ),
    Convention(
        "zero-3", "ZeRO stage 3",
        Split(masters=4, moments=8), Split(weights=2, masters=4, moments=8, gradients=2), transient=4, is_zero=True,
    ),
)  # fmt: skip
