"""Converts a checkpoint of any format into one that loads anywhere: its keys those of a run of ours, its files any."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.engine.run import Budget
from reshard.engine.spans import Job
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.object_archive import object_value
from reshard.formats.opening import open_checkpoint
from reshard.formats.rescue.hints import Hints
from reshard.formats.safetensors_output import SafetensorsFiles, lay_out_safetensors
from reshard.formats.torch_output import TorchFile, lay_out_torch
from reshard.geometry.mesh import Mesh
from reshard.index.dtypes import ITEM_BYTES
from reshard.plan import make_plan
from reshard.rewrite.manifest_found import with_manifest
from reshard.rewrite.model_hints import checked_against, read_model
from reshard.rewrite.prepare import DEFAULT_MEMORY_BYTES, Prepared, plan_dcp, require_files
from reshard.rewrite.run import FILE_SUFFIXES, Summary, run
from reshard.rewrite.selection import Selection, select
from reshard.rewrite.tied import aliases_of, without
from reshard.rewrite.training_keys import MODEL, Renaming, with_renamings, with_training_keys
from reshard.rewrite.unstack import unstacked
from reshard.storage.durable import storage_errors

if TYPE_CHECKING:
    from torch import nn

FORMATS = ("dcp", "safetensors", "torch")
FILE_BYTES = 5_000_000_000
# What a model needs beside its weights to be loaded by name.
_BESIDE = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|vocab\..*|merges\.txt|"
    r"added_tokens\.json|preprocessor_config\.json|processor_config\.json|chat_template\..*|spiece\.model|"
    r"adapter_config\.json"
)
_BESIDE_FOLDERS = ("huggingface", "hf")


@dataclass(frozen=True)
class Conversion:
    """What is asked for.

    Attributes:
        source_format: the only one that is meant, or ``auto``.
        to: one of `FORMATS`.
        mesh: the ranks to write DCP for; by default as many as files of `FILE_BYTES` take.
        only: ``model``, to leave out all else.
        dtype: of the weights.
        drop: beginnings of keys to leave out.
        renamings: of parameters.
        unstack: modules whose layers are stacked.
        tied: ``copy`` writes each name of a tied weight, ``alias`` one of them.
        is_file: whether the destination is to be one file.
    """

    source_format: str = "auto"
    to: str = "dcp"
    mesh: Mesh | None = None
    only: str | None = None
    dtype: str | None = None
    drop: tuple[str, ...] = ()
    renamings: tuple[Renaming, ...] = ()
    unstack: tuple[str, ...] = ()
    tied: str = "copy"
    is_file: bool = False


def parse_renaming(text: str) -> Renaming:
    """Of ``REGEX=>REPL``.

    Raises:
        UsageError: it is not one.
    """
    pattern, arrow, replacement = text.partition("=>")
    try:
        if not arrow:
            raise re.error("no => in it")
        return re.compile(pattern), replacement
    except re.error as error:
        raise UsageError("not a renaming", key=f"--rename {text}", expected="REGEX=>REPL", found=str(error)) from error


def prepare_conversion(
    sources: Sequence[str | os.PathLike[str]],
    wanted: Conversion,
    hints: Hints | None = None,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    processes: int = 1,
) -> Prepared:
    """Opens and plans; writes nothing. Close ``checkpoint`` of the result, if it is not given to `run`.

    Args:
        sources: the checkpoint, and further folders with files of it.

    Raises:
        ReshardError: the source is not there, unsound or does not hold enough; or the options do not fit it.
    """
    if wanted.to not in FORMATS:
        raise UsageError("not a format to write", key="--to", expected=" ".join(FORMATS), found=wanted.to)
    if wanted.tied not in ("copy", "alias"):
        raise UsageError("no such choice", key="--tied", expected="copy or alias", found=wanted.tied)
    started_s = time.monotonic()
    optimizer = "left out" if wanted.only == "model" else "named"
    opened = open_checkpoint(sources[0], sources[1:], replace(hints or Hints(), optimizer=optimizer))
    try:
        if wanted.source_format not in ("auto", opened.format):
            raise UsageError(
                "another format than was asked for", path=opened.path, key="--from", expected=wanted.source_format,
                found=opened.format, hint="leave --from out, or name the checkpoint that is meant",
            )  # fmt: skip
        checkpoint = with_manifest(with_training_keys(opened))
        if wanted.unstack:
            checkpoint = unstacked(checkpoint, wanted.unstack)
        if hints is not None and hints.model is not None:
            checkpoint = checked_against(checkpoint, hints.model)
        checkpoint = with_renamings(checkpoint, wanted.renamings)
        selection = select(checkpoint, wanted.only, wanted.dtype, wanted.drop)
        aliases = aliases_of(checkpoint, selection) if wanted.tied == "alias" else {}
        checkpoint, selection = _told(checkpoint, aliases), without(selection, aliases)
        budget = Budget.of(memory_bytes, processes)
        beside = _beside(checkpoint, wanted)
        if wanted.to == "dcp":
            mesh = wanted.mesh or Mesh(max(1, math.ceil(_bytes(checkpoint, selection) / FILE_BYTES)))
            return plan_dcp(checkpoint, selection, mesh, wanted.only, beside, [], budget, started_s)
        return _plan_whole(checkpoint, selection, aliases, wanted, beside, budget, started_s)
    except BaseException:
        opened.close()
        raise


def convert(
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    source_format: str = "auto",
    to: str = "dcp",
    world_size: int | None = None,
    only: str | None = None,
    dtype: str | None = None,
    drop: Iterable[str] = (),
    rename: Iterable[str] = (),
    unstack: Iterable[str] = (),
    weights: str = "masters",
    tied: str = "copy",
    layout: str | os.PathLike[str] | None = None,
    param_order: str | os.PathLike[str] | None = None,
    model: str | nn.Module | Callable[[], nn.Module] | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] = (),
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Converts a checkpoint of any format. As the command line's ``convert``; see there for the options.

    Args:
        src: a path, or several with parts of one checkpoint.
        dst: the folder to make; for ``safetensors`` and ``torch`` it may name a file.
        source_format: refuse any other, as `Checkpoint.format` calls them.
        to: ``dcp``, ``safetensors`` or ``torch``.
        world_size: ranks to shard DCP for.
        weights: ``masters`` or ``stored``.
        tied: ``copy`` or ``alias``.
        layout, param_order: JSON files, where the source lacks names.
        model: likewise; ``package.module:factory``, a factory, or a model.
        hf_config: a folder with the ``config.json`` of the model.
        wrap: classes of the modules that FSDP1 wrapped, where the source does not tell.
        force: replace ``dst``.

    Raises:
        ReshardError: the source is unsound or does not hold enough, or the destination cannot be written.
    """
    sources = [src] if isinstance(src, (str, os.PathLike)) else list(src)
    wanted = Conversion(
        source_format=source_format,
        to=to,
        mesh=None if world_size is None else Mesh(world_size),
        only=only,
        dtype=dtype,
        drop=tuple(drop),
        renamings=tuple(map(parse_renaming, rename)),
        unstack=tuple(unstack),
        tied=tied,
        is_file=to != "dcp" and Path(dst).suffix in FILE_SUFFIXES,
    )
    hints = Hints.read(layout, param_order, weights, read_model(model, hf_config, wrap))
    prepared = prepare_conversion(sources, wanted, hints, memory_bytes=memory_bytes)
    return run(prepared, Path(dst).expanduser(), force=force, progress=progress)


def _told(checkpoint: Checkpoint, aliases: dict[int, int]) -> Checkpoint:
    names = checkpoint.index.names
    notes = [f"stored once: {names[number]} is another name of {names[first]}" for number, first in aliases.items()]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes))


def _plan_whole(
    checkpoint: Checkpoint,
    selection: Selection,
    aliases: dict[int, int],
    wanted: Conversion,
    beside: list[Path],
    budget: Budget,
    started_s: float,
) -> Prepared:
    """Plans files of whole tensors."""
    index, tensors = checkpoint.index, selection.tensors
    names = {number: index.names[number] for number in [*tensors.tolist(), *aliases]}
    if wanted.only == "model":
        # What loads a model by name knows nothing of a training state.
        names = {number: name.removeprefix(MODEL) for number, name in names.items()}
    tied = {names[number]: first for number, first in aliases.items()}
    files: SafetensorsFiles | TorchFile
    if wanted.to == "safetensors":
        files = lay_out_safetensors(
            index, tensors, names, selection.dtypes, None if wanted.is_file else FILE_BYTES, tied
        )
    else:
        files = lay_out_torch(index, tensors, names, selection.dtypes, _values(checkpoint, selection), tied)
    plan = make_plan(index, files.layout)
    require_files(checkpoint)
    return Prepared(
        checkpoint=checkpoint,
        mesh=Mesh(1),
        selection=replace(selection, objects={}),
        job=Job(checkpoint, files.layout, plan, files.output),
        files=files,
        manifest=None,
        described=files.described,
        beside=beside,
        left_behind=[],
        budget=budget,
        started_s=started_s,
        only_file=files.output.names[0] if wanted.is_file else None,
    )


def _values(checkpoint: Checkpoint, selection: Selection) -> dict[str, Any]:
    """What is not a tensor, for a format that takes it."""
    return {key: object_value(checkpoint.object_bytes(key), checkpoint.path, key) for key in selection.objects}


def _bytes(checkpoint: Checkpoint, selection: Selection) -> int:
    index = checkpoint.index
    widths = np.array([ITEM_BYTES[selection.dtypes[number]] for number in selection.tensors.tolist()], dtype=np.int64)
    return int((index.padded_shapes[selection.tensors].prod(axis=1) * widths).sum())


def _beside(checkpoint: Checkpoint, wanted: Conversion) -> list[Path]:
    """Configuration and tokenizer of a model, where the source has them."""
    if wanted.to == "torch" or wanted.is_file:
        return []
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for place in (folder, *(folder / name for name in _BESIDE_FOLDERS)):
        with storage_errors("list the folder", place):
            if place.is_dir() and (found := [path for path in sorted(place.iterdir()) if _BESIDE.fullmatch(path.name)]):
                return [path for path in found if path.is_file()]
    return []
