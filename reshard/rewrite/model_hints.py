"""A model as a user gives it, built without memory for its values, for files that lack names and shapes.

It comes from a factory, ``package.module:name``, from the ``config.json`` of a Hugging Face model, or is a live one.
Either way it is built on torch's meta device, where a parameter has a shape and nothing else.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue.model_outline import ModelOutline
from reshard.index.names import WRAPPERS, canonical_names
from reshard.rewrite.training_keys import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_SHOWN = 8


def read_model(
    model: str | nn.Module | Callable[[], nn.Module] | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] = (),
) -> ModelOutline | None:
    """The outline of the model that was given; None where none was.

    Args:
        model: ``package.module:factory``, where the factory may be a class or a function without arguments; one of
            these itself; or a model.
        hf_config: the folder with a ``config.json``.
        wrap: names of classes or modules that were wrapped.

    Raises:
        UsageError: it cannot be imported or built, or is no model.
    """
    wrapped = tuple(wrap)
    if model is not None and hf_config is not None:
        raise UsageError("two models", key="--model and --hf-config", hint="give one of them")
    if hf_config is not None:
        return outline_of(_of_hf_config(Path(hf_config)), wrapped)
    if model is not None:
        return outline_of(_built(model), wrapped)
    if wrapped:
        raise UsageError("needs the model", key=f"--wrap {wrapped[0]}", hint="give it with --model or --hf-config")
    return None


def outline_of(model: nn.Module, wrap: tuple[str, ...] = ()) -> ModelOutline:
    """What a model is made of, by names without wrappers."""
    every = dict(model.named_parameters(remove_duplicate=False))
    short = canonical_names(every)
    own = dict(model.named_parameters())
    first = {id(parameter): short[name] for name, parameter in own.items()}
    tied = [(short[name], first[id(parameter)]) for name, parameter in every.items() if name not in own]
    # What stands before all names is no part of the modules' either.
    name = next(iter(every), "")
    root = _without_wrappers(name).removesuffix(short.get(name, ""))
    modules = {}
    for name, module in model.named_modules():
        # A wrapper comes before what it wraps, whose class is the one to know.
        modules[f"{_without_wrappers(name)}.".removeprefix(root).removesuffix(".")] = type(module).__name__
    return ModelOutline(
        {short[name]: tuple(parameter.shape) for name, parameter in own.items()},
        frozenset(short[name] for name, parameter in own.items() if not parameter.requires_grad),
        tuple(tied),
        modules,
        wrap,
    )


def checked_against(checkpoint: Checkpoint, outline: ModelOutline) -> Checkpoint:
    """The checkpoint, with a note where a model is one of other names, for it may be of no use then.

    Raises:
        UsageError: parameters of the same names have other shapes.
    """
    index = checkpoint.index
    found = {key.removeprefix(MODEL): index.shapes[index.number[key]] for key in index.names if key.startswith(MODEL)}
    wrong = [
        f"{name}: {shape} in the model, {found[name]} in the checkpoint"
        for name, shape in outline.parameters.items()
        if found.get(name, shape) != shape
    ]
    if wrong:
        raise UsageError("a model of other shapes", path=checkpoint.path, key="--model", found=wrong[0],
                         details=wrong[1:])  # fmt: skip
    missing = [name for name in outline.parameters if name not in found]
    if not missing or not found:
        return checkpoint
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    note = f"the checkpoint lacks parameters of the model that was given: {', '.join(missing[:_SHOWN])}{more}"
    return replace(checkpoint, notes=(*checkpoint.notes, note))


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _built(model: str | nn.Module | Callable[[], nn.Module]) -> nn.Module:
    import torch

    key = f"--model {model}" if isinstance(model, str) else "model"
    with _current_folder():
        factory: Any = _imported(model, key) if isinstance(model, str) else model
        if isinstance(factory, torch.nn.Module):
            return factory
        if not callable(factory):
            raise UsageError("neither a model nor what makes one", key=key, found=type(factory).__name__)
        hint = "it is called without arguments, under torch.device('meta')"
        with _failures_of(key, "the factory fails", hint), torch.device("meta"):
            built = factory()
    if not isinstance(built, torch.nn.Module):
        raise UsageError("no model", key=key, expected="a torch.nn.Module", found=type(built).__name__)
    return built


@contextmanager
def _current_folder() -> Iterator[None]:
    """Imports from there as well, as ``python -m`` does; an installed command does not look there."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _imported(name: str, key: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError("not the name of a factory", key=key, expected="package.module:factory")
    with _failures_of(key, "cannot be imported", "it is looked for in the current folder and in what is installed"):
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    return found


def _of_hf_config(folder: Path) -> nn.Module:
    import torch

    key = f"--hf-config {folder}"
    if not (folder.expanduser() / "config.json").is_file():
        raise UsageError("no config.json in this folder", path=folder, key="--hf-config")
    try:
        # By its name: nobody needs it to check the types of this module.
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "needs transformers", key=key, found=str(error),
            hint="pip install 'reshard[hf]', or give the model with --model package.module:factory",
        ) from error  # fmt: skip
    with _failures_of(key, "transformers cannot build this model", "give it with --model package.module:factory"):
        config = transformers.AutoConfig.from_pretrained(folder.expanduser(), local_files_only=True)
        own = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
        with torch.device("meta"):
            if own is not None:
                return cast("nn.Module", own(config))
            with suppress(ValueError):
                # It has none of this kind.
                return cast("nn.Module", transformers.AutoModelForCausalLM.from_config(config))
            return cast("nn.Module", transformers.AutoModel.from_config(config))


@contextmanager
def _failures_of(key: str, what: str, hint: str) -> Iterator[None]:
    """Code of others runs here, and may raise anything."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UsageError(what, key=key, found=f"{type(error).__name__}: {error}", hint=hint) from error
