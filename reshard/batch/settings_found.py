"""Which framework's batch settings a configuration has, and where.

    reshard's training script         batch.micro_batch, batch.global_batch; accumulation follows
    Hugging Face TrainingArguments    per_device_train_batch_size, gradient_accumulation_steps
    Accelerate                        gradient_accumulation_steps, num_processes; the micro-batch is in the script
    DeepSpeed                         train_micro_batch_size_per_gpu, gradient_accumulation_steps, train_batch_size
    any other                         what the caller names

They are told by keys that only they have, wherever in the file those stand: `train_batch_size` alone is no sign of
DeepSpeed, for other tools call the micro-batch so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.batch.config_tree import MappingNode, Scalar
from reshard.batch.scalars import ConfigText, Found, KeyPath, dotted, is_auto, split_path
from reshard.errors import BatchError, UsageError

OURS, TRAINER, ACCELERATE, DEEPSPEED, NAMED = (
    "reshard's training script",
    "Hugging Face TrainingArguments",
    "Accelerate",
    "DeepSpeed",
    "the keys named",
)
ROLES = {"micro": "micro-batch", "accumulation": "accumulation", "global": "global batch", "ranks": "ranks"}

_ACCUMULATION = "gradient_accumulation_steps"
_DEFAULT_MAX_MICRO_BATCH = 64  # Of our training script.
# Under Accelerate, GPUs of one data-parallel rank: by section, then key.
_MODEL_PARALLEL = {
    "parallelism_config": ("tp_size", "cp_size", "sp_size"),
    "megatron_lm_config": ("tp_degree", "pp_degree"),
}
# And these multiply to num_processes.
_DATA_PARALLEL = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")


@dataclass(frozen=True)
class Setting:
    """A batch setting that stands in the file; its number is None for `auto`."""

    found: Found
    number: int | None

    @property
    def scalar(self) -> Scalar:
        assert isinstance(self.found.node, Scalar), "a number or `auto`"
        return self.found.node


@dataclass(frozen=True)
class Settings:
    """The batch settings of a file.

    Attributes:
        framework: whose they are.
        written: those that stand in the file, by role.
        implied_accumulation: the key that is not written, so that accumulation is 1; None where it is, or follows.
        max_micro_batch: the limit for a micro-batch of `auto`, under our own script.
        notes: what else in the file has to do with the batch.
    """

    framework: str
    written: Mapping[str, Setting]
    implied_accumulation: str | None = None
    max_micro_batch: int = _DEFAULT_MAX_MICRO_BATCH
    notes: Sequence[str] = field(default_factory=tuple)

    def number(self, role: str) -> int | None:
        """The number written for a role, if there is one."""
        setting = self.written.get(role)
        return None if setting is None else setting.number

    @property
    def counts_micro_batches(self) -> bool:
        """Whether the file does not say how many samples a micro-batch has: then the batch is counted in those."""
        return not {"micro", "global"} & self.written.keys()


def find_settings(config: ConfigText, keys: Mapping[str, str] | None = None) -> Settings:
    """The batch settings of a configuration; `keys` names their dotted paths by role where they are no framework's.

    Raises:
        UsageError: there are none, or several, or they are no numbers.
    """
    if keys:
        return _named(config, keys)
    found = list(_candidates(config))
    # What is an anchor for others to merge is a template, if one of those others is there too.
    found = [candidate for candidate in found if candidate.mapping.uses == 1] or found
    # A DeepSpeed section of `auto` within TrainingArguments follows these.
    found = [candidate for candidate in found if not candidate.is_all_auto(config)] or found
    if not found:
        raise UsageError(
            "no batch settings of a known framework",
            expected="those of reshard, TrainingArguments, Accelerate or DeepSpeed",
            found="none",
            hint="name their keys: --keys micro=PATH,accumulation=PATH,global=PATH",
        )
    if len(found) > 1:
        places = " and ".join(f"line {config.line(one.mapping)} ({one.framework})" for one in found)
        raise UsageError(
            f"batch settings in several places: {places}",
            hint="say which are meant: --keys micro=PATH,accumulation=PATH,global=PATH",
        )
    return _READERS[found[0].framework](config, found[0])


@dataclass(frozen=True)
class _Candidate:
    framework: str
    document: int
    path: KeyPath
    mapping: MappingNode

    def get(self, config: ConfigText, *path: str) -> Found | None:
        return config.find(self.document, (*self.path, *path))

    def setting(self, config: ConfigText, *path: str) -> Setting | None:
        found = self.get(config, *path)
        if found is None:
            return None
        return Setting(found, None if is_auto(found) else config.number(found))

    def settings(self, config: ConfigText, paths: Mapping[str, KeyPath]) -> dict[str, Setting]:
        settings = {role: self.setting(config, *path) for role, path in paths.items()}
        return {role: setting for role, setting in settings.items() if setting is not None}

    def is_all_auto(self, config: ConfigText) -> bool:
        if self.framework != DEEPSPEED:
            return False
        found = [self.get(config, *path) for path in _DEEPSPEED_PATHS.values()]
        return all(one is None or is_auto(one) for one in found)


def _candidates(config: ConfigText) -> Iterator[_Candidate]:
    for document, path, mapping in config.mappings():

        def has(*below: str, document: int = document, path: KeyPath = path) -> bool:
            return config.find(document, (*path, *below)) is not None

        signs = {
            OURS: not path and has("batch", "global_batch") and has("batch", "micro_batch"),
            TRAINER: has("per_device_train_batch_size"),
            ACCELERATE: has("num_processes")
            and any(map(has, ("distributed_type", "compute_environment", "num_machines"))),
            DEEPSPEED: has("train_micro_batch_size_per_gpu") or (has("train_batch_size") and has("zero_optimization")),
        }
        yield from (_Candidate(framework, document, path, mapping) for framework, shown in signs.items() if shown)


def _ours(config: ConfigText, candidate: _Candidate) -> Settings:
    paths = {"micro": ("batch", "micro_batch"), "global": ("batch", "global_batch")}
    written = candidate.settings(config, paths)
    if written["global"].number is None:
        raise BatchError("cannot be auto", key=written["global"].found.key, hint="write the number itself there")
    limit = candidate.setting(config, "batch", "max_micro_batch")
    most = limit.number if limit else None
    return Settings(OURS, written, max_micro_batch=most or _DEFAULT_MAX_MICRO_BATCH)


def _trainer(config: ConfigText, candidate: _Candidate) -> Settings:
    paths = {"micro": ("per_device_train_batch_size",), "accumulation": (_ACCUMULATION,)}
    written = candidate.settings(config, paths)
    _require_numbers(written, "write the number itself there")
    notes = []
    if "accumulation" not in written:
        notes.append(f"{_ACCUMULATION} is not written, so it is 1")
    if deepspeed := candidate.get(config, "deepspeed"):
        notes.append(f"line {deepspeed.line}: the batch settings of that DeepSpeed configuration have to be `auto`")
    automatic = candidate.get(config, "auto_find_batch_size")
    if automatic and isinstance(automatic.node, Scalar) and automatic.node.text.lower() in ("true", "yes", "on"):
        notes.append(f"line {automatic.line}: auto_find_batch_size may halve the micro-batch, and the global batch too")
    implied = None if "accumulation" in written else dotted((*candidate.path, _ACCUMULATION))
    return Settings(TRAINER, written, implied, notes=notes)


def _accelerate(config: ConfigText, candidate: _Candidate) -> Settings:
    for section, sizes in _MODEL_PARALLEL.items():
        prefix = section if section == "parallelism_config" else "megatron_lm"
        for size in sizes:
            found = candidate.get(config, section, f"{prefix}_{size}")
            if found and isinstance(found.node, Scalar) and found.node.text not in ("1", ""):
                raise BatchError(
                    "num_processes counts the GPUs of model parallelism too, and is no number of data-parallel ranks",
                    key=f"line {found.line}",
                    hint="name the keys and give both world sizes: --keys accumulation=PATH --old-world-size N",
                )
    places = [(_ACCUMULATION,), ("deepspeed_config", _ACCUMULATION)]
    there = [place for place in places if candidate.get(config, *place)]
    if len(there) > 1:
        lines = " and ".join(str(found.line) for place in there if (found := candidate.get(config, *place)))
        raise BatchError(f"{_ACCUMULATION} in lines {lines}", hint="delete the one that is not meant")
    if not there:
        file = candidate.get(config, "deepspeed_config", "deepspeed_config_file")
        named = f"line {file.line} names" if file else "has it, such as that of the TrainingArguments"
        raise UsageError(
            f"an Accelerate configuration without {_ACCUMULATION} says nothing of the batch",
            hint=f"run this on the file that {named}",
        )
    written = candidate.settings(config, {"accumulation": there[0], "ranks": ("num_processes",)})
    _require_numbers(written, "run this on the file it comes from, such as that of the TrainingArguments")
    ranks = written["ranks"]
    notes = [
        f"line {ranks.found.line}: num_processes {ranks.number} is the old world size",
        "the micro-batch is not in this file: leave it as it is",
        f"under the Trainer, {_ACCUMULATION} of its TrainingArguments counts instead",
        "Accelerate steps a learning rate schedule num_processes times a step: one resumed from a checkpoint is off",
    ]
    if machines := candidate.get(config, "num_machines"):
        notes.append(f"line {machines.line}: num_machines stays as it is")
    for size in _DATA_PARALLEL:
        found = candidate.get(config, "parallelism_config", size)
        if found and isinstance(found.node, Scalar) and found.node.text not in ("1", ""):
            notes.append(f"line {found.line}: {size} stays as it is, and num_processes has to be a multiple of it")
    return Settings(ACCELERATE, written, notes=notes)


_DEEPSPEED_PATHS: dict[str, KeyPath] = {
    "micro": ("train_micro_batch_size_per_gpu",),
    "accumulation": (_ACCUMULATION,),
    "global": ("train_batch_size",),
}


def _deepspeed(config: ConfigText, candidate: _Candidate) -> Settings:
    written = candidate.settings(config, _DEEPSPEED_PATHS)
    if written.keys() >= {"micro", "global"} and written["global"].number is None:
        del written["global"]  # Filled in from the other two.
    _require_numbers(written, "run this on the file it comes from, such as that of the TrainingArguments")
    implied = None
    notes = []
    if "accumulation" not in written and not written.keys() >= {"micro", "global"}:
        implied = dotted((*candidate.path, _ACCUMULATION))
        notes.append(f"{_ACCUMULATION} is not written, so it is 1")
    return Settings(DEEPSPEED, written, implied, notes=notes)


def _named(config: ConfigText, keys: Mapping[str, str]) -> Settings:
    paths = {role: split_path(text) for role, text in keys.items()}
    if len(set(paths.values())) < len(paths):
        raise UsageError("names one key twice", key="--keys", hint="each role has a key of its own")
    by_document = {}
    for document in range(len(config.documents)):
        found = {role: config.find(document, path) for role, path in paths.items()}
        if any(found.values()):
            by_document[document] = found
    if len(by_document) > 1:
        lines = " and ".join(str(min(one.line for one in found.values() if one)) for found in by_document.values())
        raise UsageError(f"in several documents, lines {lines}", key="--keys", hint="split the file")
    there = next(iter(by_document.values()), dict.fromkeys(paths))
    for role, path in paths.items():
        if there[role] is None:
            raise UsageError("no such key in the file", key=dotted(path), hint=f"correct --keys {role}=PATH")
    written = {role: Setting(found, config.number(found)) for role, found in there.items() if found is not None}
    if written.keys() == {"micro"}:
        raise UsageError(
            "the micro-batch alone does not say what to accumulate",
            key="--keys",
            hint="name accumulation=PATH or global=PATH too",
        )
    return Settings(NAMED, written)


def _require_numbers(written: Mapping[str, Setting], hint: str) -> None:
    for setting in written.values():
        if setting.number is None:
            raise BatchError(
                f"line {setting.found.line}",
                key=setting.found.key,
                expected="a number",
                found="auto, to be filled in from elsewhere",
                hint=hint,
            )


_READERS: dict[str, Callable[[ConfigText, _Candidate], Settings]] = {
    OURS: _ours,
    TRAINER: _trainer,
    ACCELERATE: _accelerate,
    DEEPSPEED: _deepspeed,
}
