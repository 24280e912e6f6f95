"""The keys of a checkpoint, sorted by what they mean to a run.

Read are the layouts that ``save_state`` and stock code write: ``model.<fqn>``, ``optim.state.<fqn>.<name>``,
``optim.param_groups.<group>.<name>``, the flattened-optimizer form ``optim.param_groups.<fqn>.<name>``, and
``optimizer`` for ``optim``. Names may still hold wrapper prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reshard.dcp import StoredState
from reshard.errors import StateMismatch
from reshard.train.names import canonical_names

MODEL_ROOTS = ("model",)
OPTIMIZER_ROOTS = ("optim", "optimizer")
RNG_ROOT = "rng"

Path = tuple[str, ...]


@dataclass
class Inventory:
    """Stored keys by meaning; every key of the checkpoint is in exactly one of these.

    Attributes:
        model: canonical FQN -> key.
        optimizer: canonical FQN -> path of the entry below the parameter -> key.
        groups: parameter group number -> hyperparameter (and ``params``) -> key.
        per_parameter: canonical FQN -> hyperparameter -> key (the flattened-optimizer form).
        rng: rank -> generator -> key.
        others: the rest.
    """

    model: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, dict[Path, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    per_parameter: dict[str, dict[str, str]] = field(default_factory=dict)
    rng: dict[int, dict[str, str]] = field(default_factory=dict)
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
        StateMismatch: two stored names are one without wrapper prefixes, or optimizer entries are named by integers.
    """
    inventory = Inventory()
    raw_model: dict[str, str] = {}
    raw_state: dict[str, dict[Path, str]] = {}
    raw_hyper: dict[str, dict[str, str]] = {}
    model_names = {key.split(".", 1)[1] for key in stored.keys if key.split(".", 1)[0] in MODEL_ROOTS and "." in key}
    known = model_names | set(parameters)
    for key in stored.keys:
        root, _, rest = key.partition(".")
        section, _, tail = rest.partition(".")
        if root in MODEL_ROOTS and rest:
            raw_model[rest] = key
        elif root in OPTIMIZER_ROOTS and section == "state" and tail:
            fqn, entry = _split(tail, known, stored.paths.get(key))
            raw_state.setdefault(fqn, {})[entry] = key
        elif root in OPTIMIZER_ROOTS and section == "param_groups" and tail:
            _file_hyperparameter(inventory, raw_hyper, tail, known, key)
        elif root == RNG_ROOT and (place := _rank_and_name(rest)):
            inventory.rng.setdefault(place[0], {})[place[1]] = key
        else:
            inventory.others.add(key)
    _refuse_integers(raw_state, stored)
    inventory.model = _renamed(raw_model, raw_model)
    inventory.optimizer = _renamed(raw_state, raw_model or raw_state)
    inventory.per_parameter = _renamed(raw_hyper, raw_model or raw_hyper)
    return inventory


def _renamed(by_raw_name: Mapping[str, object], like: Iterable[str]) -> dict:  # type: ignore[type-arg]
    names = canonical_names(by_raw_name, like=like)
    return {names[raw]: value for raw, value in by_raw_name.items()}


def _split(tail: str, known: set[str], path: tuple[str | int, ...] | None) -> tuple[str, Path]:
    """Splits ``<fqn>.<entry>``; the entry may nest, and both may hold dots."""
    if path is not None and len(path) > 3:
        return str(path[2]), tuple(map(str, path[3:]))
    parts = tail.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end]), tuple(parts[end:])
    return ".".join(parts[:-1]), (parts[-1],)


def _file_hyperparameter(
    inventory: Inventory, by_parameter: dict[str, dict[str, str]], tail: str, known: set[str], key: str
) -> None:
    head, _, name = tail.partition(".")
    if head.isdigit() and name and f"{head}.{name}".rpartition(".")[0] not in known:
        inventory.groups.setdefault(int(head), {})[name] = key
    else:
        fqn, entry = _split(tail, known, None)
        by_parameter.setdefault(fqn, {})[".".join(entry)] = key


def _rank_and_name(rest: str) -> tuple[int, str] | None:
    rank, _, name = rest.partition(".")
    digits = rank.removeprefix("rank_")
    return (int(digits), name) if digits.isdigit() and digits != rank and name else None


def _refuse_integers(state: Mapping[str, object], stored: StoredState) -> None:
    if state and all(name.isdigit() for name in state):
        raise StateMismatch(
            "optimizer state is keyed by integers, which do not say whose it is",
            path=stored.folder,
            key="optim.state",
            expected="parameter names",
            found=", ".join(sorted(state, key=int)[:5]),
            hint="save get_optimizer_state_dict(model, optimizer) instead of optimizer.state_dict(), "
            "or take the weights alone with allow_missing=['optimizer']",
        )
