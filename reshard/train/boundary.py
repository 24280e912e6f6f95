"""What the ranks tell each other between two steps: whether to stop, and that they are at the same place."""

from __future__ import annotations

from reshard.dcp.ranks import Ranks
from reshard.errors import UsageError

_ADVANCE = "pass sampler= to accumulate, or call sampler.advance() once a step"


def any_asks(ranks: Ranks, stop: bool, step: int, samples: int | None, samples_before: int | None) -> bool:
    """Whether any rank was asked to stop. Collective.

    One exchange a step also tells whether the ranks are at the same step, or they would wait for each other for ever,
    and whether the data moved on, or a resume would repeat all of it without a word.

    Args:
        ranks: all of the run.
        stop: whether this one was asked.
        step: how many are done.
        samples: trained on so far; None where the data does not say.
        samples_before: the same, one step ago.

    Raises:
        UsageError: on every rank, if they are not at one step and one data position, or that did not move.
    """
    position = -1 if samples is None else samples
    stands_still = samples is not None and samples == (samples_before or 0)
    mine = (stop, stands_still, step, -step, position, -position)
    any_stop, any_stands_still, *ends = ranks.maxima(mine)
    most_steps, fewest_steps, most_samples, fewest_samples = (
        int(ends[0]),
        -int(ends[1]),
        int(ends[2]),
        -int(ends[3]),
    )
    if fewest_steps != most_steps:
        raise UsageError(
            "the ranks are at different steps",
            key="step",
            found=f"{fewest_steps} to {most_steps}",
            hint="call checkpointer.step() once a step on every rank, and leave state.step to it",
        )
    if any_stands_still:
        raise UsageError(
            "the data position did not move in this step",
            key="data",
            expected=f"more than {fewest_samples} samples",
            found=fewest_samples,
            hint=f"{_ADVANCE}, before checkpointer.step()",
        )
    if fewest_samples != most_samples:
        raise UsageError(
            "the ranks are at different data positions",
            key="data",
            found=f"{fewest_samples} to {most_samples} samples",
            hint=f"{_ADVANCE}, on every rank",
        )
    return bool(any_stop)
