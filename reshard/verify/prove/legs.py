"""The legs of a proof: on how many ranks a run is started, one start after the other, and when each is killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import UsageError

PLACEHOLDER = "{ranks}"


@dataclass(frozen=True)
class Leg:
    """One start of a run.

    Attributes:
        ranks: the world size.
        kill_at: the step after which its workers are killed; None for the last leg, which goes on to the end.
    """

    ranks: int
    kill_at: int | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that starts it."""
        return [part.replace(PLACEHOLDER, str(self.ranks)) for part in command]


def plan_legs(ranks: str, kill_at: str, steps: int, command: Sequence[str]) -> list[Leg]:
    """The legs, from what the command line says.

    Args:
        ranks: world sizes, such as ``4:3:1``.
        kill_at: steps, such as ``40,70``: one fewer than world sizes, ascending, below ``steps``.
        steps: of the whole run.
        command: what starts it; ``{ranks}`` in it stands for the world size.

    Raises:
        UsageError: these do not fit together.
    """
    worlds = _counts("--ranks", ranks, ":")
    kills = _counts("--kill-at", kill_at, ",")
    if steps < 1:
        raise UsageError("not a number of steps", key="--steps", expected="1 or more", found=steps)
    if len(worlds) < 2:
        raise UsageError("nothing would be resumed", key="--ranks", expected="two world sizes or more", found=ranks)
    if len(kills) != len(worlds) - 1:
        raise UsageError(
            "every leg but the last is killed once",
            key="--kill-at",
            expected=f"{len(worlds) - 1} steps for {len(worlds)} world sizes",
            found=kill_at,
        )
    if sorted({*kills}) != kills or kills[-1] >= steps:
        raise UsageError(
            "the run would not come that far, or has been there before",
            key="--kill-at",
            expected=f"ascending steps below {steps}",
            found=kill_at,
        )
    if len({*worlds}) > 1 and not any(PLACEHOLDER in part for part in command):
        raise UsageError(
            "the command does not say where the number of ranks goes",
            key="CMD",
            expected=f"{PLACEHOLDER} in it",
            found=" ".join(command),
            hint=f"such as: torchrun --standalone --nproc-per-node {PLACEHOLDER} train.py",
        )
    return [Leg(world, kill) for world, kill in zip(worlds, [*kills, None], strict=True)]


def _counts(option: str, text: str, separator: str) -> list[int]:
    parts = [part.strip() for part in text.split(separator)]
    if not all(part.isascii() and part.isdigit() and len(part) < 16 and int(part) > 0 for part in parts):
        raise UsageError(
            "not whole numbers above 0",
            key=option,
            expected=f"such as {separator.join('421')}",
            found=text or "nothing",
        )
    return [int(part) for part in parts]
