"""The keys of a checkpoint, sorted by what they mean to a run.

Read are the layouts that ``save_state`` and stock code write: ``model.<fqn>``, ``optim.state.<fqn>.<name>``,
``optim.param_groups.<group>.<name>``, the flattened-optimizer form ``optim.param_groups.<fqn>.<name>``, and
``optimizer`` for ``optim``. Names may still hold wrapper prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reshard.dcp.stored import StoredState
from reshard.index.names import EXTRA_STATE, canonical_names

MODEL_ROOTS = ("model",)
OPTIMIZER_ROOTS = ("optim", "optimizer")
RNG_ROOT = "rng"

Path = tuple[str | int, ...]


@dataclass
class Inventory:
    """Stored keys by meaning; every key of the checkpoint is in exactly one of these.

    Attributes:
        model: canonical FQN -> key.
        extra_state: canonical ``<module>._extra_state`` -> path within it -> key.
        optimizer: canonical FQN -> path of the entry below the parameter -> key.
        groups: parameter group number -> path of the hyperparameter (``params`` too) -> key.
        per_parameter: canonical FQN -> hyperparameter -> key (the flattened-optimizer form).
        rng: rank -> generator -> key.
        integers: names of optimizer state that are numbers and no parameter's; its keys are among ``others``.
        others: the rest.
    """

    model: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, dict[Path, str]] = field(default_factory=dict)
    optimizer: dict[str, dict[Path, str]] = field(default_factory=dict)
    groups: dict[int, dict[Path, str]] = field(default_factory=dict)
    per_parameter: dict[str, dict[str, str]] = field(default_factory=dict)
    rng: dict[int, dict[str, str]] = field(default_factory=dict)
    integers: list[str] = field(default_factory=list)
    others: set[str] = field(default_factory=set)

    @property
    def has_optimizer(self) -> bool:
        return bool(self.optimizer or self.groups or self.per_parameter)


def take_inventory(stored: StoredState, parameters: Iterable[str]) -> Inventory:
    """Sorts a checkpoint's keys.

    Args:
        stored: the checkpoint.
        parameters: the live model's names; they tell where a parameter's name ends within a flat key.

    Raises:
        StateMismatch: two stored names are one without wrapper prefixes.
    """
    inventory = Inventory()
    raw_model: dict[str, str] = {}
    raw_extra: dict[str, dict[Path, str]] = {}
    raw_state: dict[str, dict[Path, str]] = {}
    raw_hyper: dict[str, dict[str, str]] = {}
    model_names = {key.split(".", 1)[1] for key in stored.keys if key.split(".", 1)[0] in MODEL_ROOTS and "." in key}
    known = model_names | set(parameters)
    # In one order on every rank: what iterates over the optimizer's state afterwards may be a collective.
    for key in sorted(stored.keys):
        root, _, rest = key.partition(".")
        section, _, tail = rest.partition(".")
        path = stored.paths.get(key)
        if root in MODEL_ROOTS and EXTRA_STATE in rest.split("."):
            fqn, below = _split_extra_state(rest, path)
            raw_extra.setdefault(fqn, {})[below] = key
        elif root in MODEL_ROOTS and rest:
            raw_model[rest] = key
        elif root in OPTIMIZER_ROOTS and section == "state" and tail:
            fqn, entry = _split(tail, known, path)
            raw_state.setdefault(fqn, {})[entry] = key
        elif root in OPTIMIZER_ROOTS and section == "param_groups" and tail:
            _file_hyperparameter(inventory, raw_hyper, tail, known, key, path)
        elif root == RNG_ROOT and (place := _rank_and_name(rest)):
            inventory.rng.setdefault(place[0], {})[place[1]] = key
        else:
            inventory.others.add(key)
    names = [*raw_model, *raw_extra]
    inventory.model = _renamed(raw_model, names)
    inventory.extra_state = _renamed(raw_extra, names)
    if integers := [name for name in raw_state if name.isdecimal() and name not in known]:
        # Which parameter a number stands for depends on how the optimizer was built: nothing here can tell.
        inventory.integers = sorted(integers, key=int)
        inventory.others |= {key for entries in raw_state.values() for key in entries.values()}
        inventory.others |= {key for names in inventory.groups.values() for key in names.values()}
        inventory.groups = {}
        return inventory
    inventory.optimizer = _renamed(raw_state, names or raw_state)
    inventory.per_parameter = _renamed(raw_hyper, names or raw_hyper)
    return inventory


def _renamed(by_raw_name: Mapping[str, object], like: Iterable[str]) -> dict:  # type: ignore[type-arg]
    names = canonical_names(by_raw_name, like=like)
    return {names[raw]: value for raw, value in by_raw_name.items()}


def _split(tail: str, known: set[str], path: tuple[str | int, ...] | None) -> tuple[str, Path]:
    """Splits ``<fqn>.<entry>``; the entry may nest, and both may hold dots."""
    if path is not None and len(path) > 3:
        return str(path[2]), path[3:]
    parts = tail.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end]), tuple(parts[end:])
    return ".".join(parts[:-1]), (parts[-1],)


def _split_extra_state(rest: str, path: tuple[str | int, ...] | None) -> tuple[str, Path]:
    parts = rest.split(".")
    end = parts.index(EXTRA_STATE) + 1
    fqn = ".".join(parts[:end])
    return fqn, path[2:] if path is not None and path[1:2] == (fqn,) else tuple(parts[end:])


def _file_hyperparameter(
    inventory: Inventory,
    by_parameter: dict[str, dict[str, str]],
    tail: str,
    known: set[str],
    key: str,
    path: tuple[str | int, ...] | None,
) -> None:
    head, _, name = tail.partition(".")
    if head.isdecimal() and name and f"{head}.{name}".rpartition(".")[0] not in known:
        below = path[3:] if path is not None and len(path) > 3 else (name,)
        inventory.groups.setdefault(int(head), {})[below] = key
    else:
        fqn, entry = _split(tail, known, None)
        by_parameter.setdefault(fqn, {})[".".join(map(str, entry))] = key


def _rank_and_name(rest: str) -> tuple[int, str] | None:
    rank, _, name = rest.partition(".")
    digits = rank.removeprefix("rank_")
    return (int(digits), name) if digits.isdecimal() and digits != rank and name else None
