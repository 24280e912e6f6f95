"""The batch settings of a file, refitted to another number of ranks with the same global batch.

Our own training idles slots, so there the micro-batch stays and any number of ranks does. All else trains on exactly
micro-batch x accumulation x ranks samples: the number of ranks has to divide the global batch, and the micro-batch may
have to shrink. It never grows, for it was chosen to fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.batch.plan import BatchPlan
from reshard.batch.scalars import Found
from reshard.batch.settings_found import OURS, Setting, Settings
from reshard.errors import BatchError, UsageError

_MOST_OTHERS = 4
# All divisors are known up to here, and soon.
_MOST_SAMPLES = 10**12


@dataclass(frozen=True)
class Figures:
    """What is known of a batch; None for what is not."""

    micro_batch: int | None
    accumulation: int | None
    ranks: int | None
    global_batch: int | None

    def completed(self) -> Figures:
        """With the number that follows from the others where one is missing.

        Raises:
            BatchError: the numbers contradict each other.
        """
        factors = {"micro-batch": self.micro_batch, "accumulation": self.accumulation, "ranks": self.ranks}
        product, shown = 1, []
        for name, factor in factors.items():
            if factor is not None:
                product *= factor
                shown.append(f"{name} {factor}")
        missing = len(factors) - len(shown)
        if self.global_batch is None:
            return self if missing else replace(self, global_batch=product)
        if self.global_batch % product or (not missing and self.global_batch != product):
            raise BatchError(
                "the numbers contradict each other",
                expected=" x ".join(shown) + f" = {product}" + (", or a multiple" if missing else ""),
                found=f"a global batch of {self.global_batch}",
                hint="mend the file, or give the --old-world-size that it was written for",
            )
        if missing != 1:
            return self
        rest = self.global_batch // product
        return Figures(self.micro_batch or rest, self.accumulation or rest, self.ranks or rest, self.global_batch)


@dataclass(frozen=True)
class Change:
    """A number to write into the file."""

    found: Found
    setting: Setting
    old: int
    new: int


@dataclass(frozen=True)
class Refit:
    """Settings and what they become.

    Attributes:
        old: what is known of the batch so far.
        new: the batch on the new number of ranks; where the file does not say how many samples a micro-batch has, its
            samples are micro-batches.
        changes: what has to be written, in the order of the file.
        obstacles: why that cannot be done by writing, where it cannot.
        notes: what to know besides.
    """

    settings: Settings
    old: Figures
    new: BatchPlan
    changes: Sequence[Change]
    obstacles: Sequence[BatchError]
    notes: Sequence[str]


def refit(settings: Settings, ranks: int, old_ranks: int | None = None, global_batch: int | None = None) -> Refit:
    """The settings for `ranks` data-parallel ranks.

    Args:
        settings: those of the file.
        ranks: the new number.
        old_ranks: the number that the file was written for, where it is known.
        global_batch: another global batch, which is another training; by default it stays.

    Raises:
        UsageError: a number that is neither in the file nor given.
        BatchError: numbers that contradict each other, or no exact batch.
    """
    _require_usual(settings.number("global"), global_batch)
    if settings.framework == OURS:
        old, new = _with_slots(settings, ranks, old_ranks, global_batch)
    else:
        old, new = _exact(settings, ranks, old_ranks, global_batch)
    changes = _changes(settings, new)
    return Refit(settings, old, new, changes, _obstacles(settings, new, changes), _notes(settings, old, new))


def _require_usual(*global_batches: int | None) -> None:
    for samples in global_batches:
        if samples is not None and samples > _MOST_SAMPLES:
            raise BatchError(
                "a global batch that nobody trains with",
                expected=f"at most {_MOST_SAMPLES:,}",
                found=f"{samples:,}",
                hint="look for a number that is mistyped",
            )


def _with_slots(
    settings: Settings, ranks: int, old_ranks: int | None, global_batch: int | None
) -> tuple[Figures, BatchPlan]:
    written, micro = settings.number("global"), settings.number("micro")
    assert written is not None, "never `auto`"

    def plan(samples: int, on: int) -> BatchPlan:
        if micro is None:
            return BatchPlan.choose(samples, on, settings.max_micro_batch)
        chosen = BatchPlan(samples, micro, on)
        # Some ranks would have no slot in any step.
        return BatchPlan.choose(samples, on, micro) if chosen.slots < on else chosen

    new = plan(global_batch or written, ranks)
    if old_ranks is None:
        return Figures(micro, None, None, written), new
    old = BatchPlan(written, micro, old_ranks) if micro else plan(written, old_ranks)
    return Figures(old.micro_batch, old.accumulation, old_ranks, written), new


def _exact(
    settings: Settings, ranks: int, old_ranks: int | None, global_batch: int | None
) -> tuple[Figures, BatchPlan]:
    old = _old_figures(settings, old_ranks)
    if global_batch and settings.counts_micro_batches:
        raise UsageError(
            "the file does not say how many samples a micro-batch has, so not what the global batch is",
            key="--global-batch",
            hint="leave it out, or change the file that has the micro-batch",
        )
    samples = global_batch or old.global_batch
    if samples is None or old.micro_batch is None:
        what = "global batch" if samples is None else "micro-batch"
        raise UsageError(
            f"the {what} is not in the file; it follows from the world size that the file was written for",
            key="--old-world-size",
            hint="give --old-world-size N",
        )
    _require_usual(samples)
    new = BatchPlan.choose(samples, ranks, old.micro_batch)
    if new.idle_slots:
        raise _no_exact(samples, old.micro_batch, ranks, settings)
    return old, new


def _old_figures(settings: Settings, old_ranks: int | None) -> Figures:
    written_ranks = settings.number("ranks")
    if old_ranks and written_ranks and old_ranks != written_ranks:
        raise BatchError(
            "another old world size than the file's",
            key="--old-world-size",
            expected=written_ranks,
            found=old_ranks,
            hint="leave it out",
        )
    return Figures(
        micro_batch=1 if settings.counts_micro_batches else settings.number("micro"),
        accumulation=1 if settings.implied_accumulation else settings.number("accumulation"),
        ranks=old_ranks or written_ranks,
        global_batch=settings.number("global"),
    ).completed()


def _no_exact(samples: int, micro_batch: int, ranks: int, settings: Settings) -> BatchError:
    unit, others = "micro-batches", ""
    if not settings.counts_micro_batches:
        unit = "samples"
        multiples = {
            multiple
            for step in (ranks, ranks * micro_batch)
            for multiple in (samples // step * step, -(-samples // step) * step)
        }
        nearest = sorted(multiples - {0}, key=lambda multiple: abs(multiple - samples))[:_MOST_OTHERS]
        plans = [BatchPlan.choose(multiple, ranks, micro_batch) for multiple in sorted(nearest)]
        listed = ", ".join(
            f"{plan.global_batch} ({plan.micro_batch} x {plan.accumulation} x {ranks})" for plan in plans
        )
        others = f"; another global batch is another training: --global-batch {listed}"
    sizes = " or ".join(map(str, BatchPlan(samples, 1, ranks).free_ranks(2)))
    return BatchError(
        f"a global batch of {samples} {unit} does not split evenly over {ranks} ranks",
        hint=f"world sizes that keep it: {sizes}{others}",
    )


def _changes(settings: Settings, new: BatchPlan) -> list[Change]:
    numbers = {
        "micro": new.micro_batch,
        "accumulation": new.accumulation,
        "global": new.global_batch,
        "ranks": new.ranks,
    }
    changes = [
        Change(setting.found, setting, setting.number, numbers[role])
        for role, setting in settings.written.items()
        if setting.number is not None and setting.number != numbers[role]
    ]
    return sorted(changes, key=lambda change: change.found.node.start)


def _obstacles(settings: Settings, new: BatchPlan, changes: Sequence[Change]) -> list[BatchError]:
    obstacles = [
        BatchError(
            f"line {change.found.line}: {change.old} has to become {change.new}, but what is at line "
            f"{change.found.shared_line} stands in other places too, by its anchor",
            key=change.found.key,
            hint="write the number itself where it is meant, or change it at the anchor by hand",
        )
        for change in changes
        if change.found.shared_line is not None
    ]
    if settings.implied_accumulation and new.accumulation != 1:
        obstacles.append(
            BatchError(
                f"not written, so it is 1, and has to become {new.accumulation}",
                key=settings.implied_accumulation,
                hint="add it to the file",
            )
        )
    return obstacles


def _notes(settings: Settings, old: Figures, new: BatchPlan) -> list[str]:
    notes = list(settings.notes)
    if old.micro_batch is not None and new.micro_batch < old.micro_batch:
        notes.append(
            f"micro-batch {old.micro_batch} -> {new.micro_batch}: the largest up to {old.micro_batch} that idles "
            f"{'the least' if new.idle_slots else 'nothing'} on {new.ranks} ranks"
        )
    if old.global_batch is not None and new.global_batch != old.global_batch:
        notes.append(
            f"global batch {old.global_batch} -> {new.global_batch}: this is another training, and its learning rate "
            "was chosen for the old one"
        )
    return notes
