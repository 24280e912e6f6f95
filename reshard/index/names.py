"""Fully qualified names without the traces of wrappers.

``torch.compile``, FSDP1 and activation checkpointing put a module between a parent and its child and so a component
into every name below. These three are ours to drop wherever they stand. ``module`` (DataParallel and its kin) may
just as well be a user's own submodule, so it is dropped only at the root, and only if every name starts with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import StateMismatch

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
ROOT_WRAPPERS = frozenset({"module", "_forward_module"})

# The last component of the name under which ``state_dict`` puts what a module's ``get_extra_state`` returned.
EXTRA_STATE = "_extra_state"


def canonical_names(names: Iterable[str], *, like: Iterable[str] | None = None) -> dict[str, str]:
    """Maps each name to the one without wrappers.

    Args:
        names: as the model, the optimizer or a file spells them.
        like: the names that decide whether there is a wrapper at the root; by default ``names`` themselves. A
            model's parameters alone cannot tell, its buffers may stand outside.

    Raises:
        StateMismatch: two names become one; the message has both.
    """
    stripped = {name: _without_wrappers(name) for name in names}
    prefix = _root_prefix(stripped.values() if like is None else map(_without_wrappers, like))
    origins: dict[str, str] = {}
    for name, short in stripped.items():
        short = stripped[name] = short.removeprefix(prefix)
        if short in origins:
            raise StateMismatch(
                "two names are one without wrapper prefixes",
                key=short,
                expected="one tensor",
                found=f"{origins[short]} and {name}",
                hint="rename one of the two submodules",
            )
        origins[short] = name
    return stripped


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _root_prefix(names: Iterable[str]) -> str:
    remaining = list(names)
    prefix = ""
    while remaining and (root := _common_root(remaining)) in ROOT_WRAPPERS:
        prefix += f"{root}."
        remaining = [name.removeprefix(f"{root}.") for name in remaining]
    return prefix


def _common_root(names: Iterable[str]) -> str | None:
    roots = {name.split(".", 1)[0] if "." in name else None for name in names}
    return roots.pop() if len(roots) == 1 else None
