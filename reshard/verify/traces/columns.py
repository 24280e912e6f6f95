"""Which column of another trainer's table is which field of a `TraceRow`.

For every field, the first of these that any column meets decides:

1. the column that the user names;
2. a column with the field's own name, letter for letter;
3. the usual spellings in `SPELLINGS`. They are compared without regard to case, with blanks and hyphens as underscores,
   and without the "run name - " that an export of Weights & Biases puts before a name.

The spellings of a step stand in an order, and the first wins: many tables have a counter of log calls beside the step
of the optimizer. Those of any other field have no order. Where several columns fit, that is an error and not a guess,
except for the learning rate, which may have a column for each parameter group.

A loss of validation is never taken unless the user names it, nor are the "__MIN" and "__MAX" that Weights & Biases
adds to every column it exports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from reshard.errors import UsageError
from reshard.verify.traces.trace import TraceRow

FIELDS = tuple(field.name for field in fields(TraceRow))

# Of each field, sets of spellings that fit equally well; a later set counts where no column has one of an earlier.
SPELLINGS: Mapping[str, tuple[frozenset[str], ...]] = {
    "step": (
        frozenset({"global_step", "train/global_step", "trainer/global_step"}),
        frozenset({"train/step", "train_step"}),
        frozenset({"iteration", "iterations", "iter", "train/iteration", "train/iter"}),
        # The first axis of an export; like _step, it may count the calls that logged something.
        frozenset({"step"}),
        frozenset({"_step"}),
    ),
    "loss": (
        frozenset(
            {
                *("loss", "train_loss", "train/loss", "training_loss", "training/loss", "loss/train"),
                *("train_loss_step", "train/loss_step", "reduced_train_loss", "lm_loss", "train/lm_loss"),
                *("loss_metrics/global_avg_loss", "loss/train/total", "train/crossentropyloss", "train/ce_loss"),
            }
        ),
    ),
    "lr": (frozenset({"lr", "learning_rate", "train/lr", "train/learning_rate", "optim/lr", "optim/learning_rate"}),),
    "grad_norm": (
        frozenset(
            {
                *("grad_norm", "gradient_norm", "global_grad_norm", "total_grad_norm", "train/grad_norm"),
                *("train/gradient_norm", "train/global_grad_norm", "optim/total_grad_norm", "l2_norm/grad/global"),
            }
        ),
    ),
    "scale": (frozenset({"scale", "loss_scale", "grad_scale", "train/loss_scale", "train/grad_scale"}),),
    "ranks": (frozenset({"ranks", "world_size", "data_parallel_size", "train/world_size"}),),
    "accumulation": (
        frozenset(
            {
                *("accumulation", "accumulation_steps", "gradient_accumulation_steps", "grad_accum"),
                *("grad_accum_steps", "accumulate_grad_batches"),
            }
        ),
    ),
    "samples": (
        frozenset(
            {
                *("samples", "consumed_samples", "consumed_train_samples", "samples_seen"),
                *("train/samples", "train/consumed_samples", "train/samples_seen"),
            }
        ),
    ),
    "tokens_per_s": (
        frozenset(
            {
                *("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tokens/s", "tokens/sec"),
                *("train/tokens_per_s", "train/tokens_per_sec", "train/tokens_per_second"),
            }
        ),
    ),
    "attempt": (frozenset({"attempt", "attempt_id"}),),
}

# lr-AdamW, lr-AdamW/pg1, lr-AdamW-1, lr-AdamW/group0; lr/group_0, lr/0, train/lr_group_0. The capital is that of an
# optimizer's class, and keeps lr-decay out.
_GROUP_RATE = re.compile(
    r"(?:train/)?(?:lr-[A-Z]\w*(?:-\d+)?(?:/(?:pg|group)_?\d+)?|(?:lr|learning_rate)[/_-](?:(?:pg|group)_?)?\d+)"
)

_NOT_TRAINING = frozenset({"eval", "evaluation", "val", "valid", "validation", "dev", "test"})

# Tables of some trainers have thousands of columns.
_MOST_LISTED = 100


def choose_columns(
    names: Sequence[str], wanted: Mapping[str, str], path: str | os.PathLike[str]
) -> dict[str, tuple[str, ...]]:
    """The columns that hold each field; fields that no column holds are left out.

    Args:
        names: the table's columns.
        wanted: from field to column, the user's word; every column of it is there.
        path: the table, for the error.

    Returns:
        By field one column, and for `lr` one for each parameter group, in the order of their numbers.

    Raises:
        UsageError: several columns fit a field, or none the step or the loss.
    """
    chosen = {}
    for field in FIELDS:
        found = _named(names, wanted[field]) if field in wanted else _fitting(field, names)
        is_grouped = field == "lr" and _are_groups(found)
        if len(found) > 1 and not is_grouped:
            raise UsageError(
                f"several columns may be the {field}",
                path=path,
                found=", ".join(map(repr, found)),
                hint=f"choose with --column {field}=NAME",
                details=[list_columns(names)],
            )
        if not found and field in ("step", "loss"):
            raise UsageError(
                f"no column is known to be the {field}",
                path=path,
                hint=f"name it with --column {field}=NAME",
                details=[list_columns(names)],
            )
        if found:
            chosen[field] = tuple(sorted(found, key=_by_number) if is_grouped else found)
    return chosen


def check_fields(wanted: Mapping[str, str]) -> None:
    """Refuse a mapping from something that is not a field.

    Raises:
        UsageError: names the fields there are.
    """
    for field in wanted:
        if field not in FIELDS:
            raise UsageError("not a field of a trace", key=field, expected=f"one of {', '.join(FIELDS)}", found=field)


def list_columns(names: Sequence[str]) -> str:
    """The columns of a table, for an error."""
    listed = ", ".join(map(repr, names[:_MOST_LISTED]))
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"its columns are {listed or 'none'}{more}"


def _named(names: Sequence[str], name: str) -> list[str]:
    return [each for each in names if each == name]


def _fitting(field: str, names: Sequence[str]) -> list[str]:
    found = _named(names, field)
    if found:
        return found
    candidates = [name for name in names if not name.endswith(("__MIN", "__MAX")) and not _is_of_validation(name)]
    for spellings in SPELLINGS[field]:
        found = [name for name in candidates if re.sub("[ -]", "_", _bare(name).casefold()) in spellings]
        if found:
            return found
    return [name for name in candidates if _GROUP_RATE.fullmatch(_bare(name))] if field == "lr" else []


def _bare(name: str) -> str:
    """The name without its run. A run's name may have the separator in it, a metric's hardly."""
    return name.rpartition(" - ")[2].strip()


def _is_of_validation(name: str) -> bool:
    return name.rpartition(" - ")[0].strip().casefold() in _NOT_TRAINING


def _are_groups(names: Sequence[str]) -> bool:
    """Whether these are rates of different groups, and not those of one group in different runs."""
    bare = {_bare(name) for name in names}
    return len(bare) == len(names) and all(map(_GROUP_RATE.fullmatch, bare))


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key by which pg10 comes after pg2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", _bare(name))]
