"""The training script's settings: a YAML file, changed by ``key=value`` arguments, checked before anything is built."""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Batch:
    global_batch: int
    micro_batch: int | str
    """Windows in a micro-batch, or ``auto``: the largest up to ``max_micro_batch`` that idles least."""
    max_micro_batch: int = 64

    def __post_init__(self) -> None:
        if self.micro_batch != "auto" and not isinstance(self.micro_batch, int):
            raise SystemExit(f"batch.micro_batch: expected a number or auto, found {self.micro_batch!r}")


@dataclass
class Train:
    steps: int
    seed: int = 0
    precision: str = "fp32"
    exact: bool = False
    clip_norm: float = 1.0
    checkpoint_activations: bool = False
    compile: bool = False
    replicate: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.clip_norm < math.inf or self.replicate < 1:
            raise SystemExit("train: steps, clip_norm and replicate must be above 0")
        if not 0 <= self.seed < 2**63:
            raise SystemExit(f"train.seed: expected 0 to 2^63 - 1, found {self.seed}")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise SystemExit(f"train.precision: expected fp32, bf16 or fp16, found {self.precision!r}")


@dataclass
class Optimizer:
    lr: float
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise SystemExit(f"optimizer.betas: expected two numbers, found {self.betas}")
        if not 0 <= self.lr < math.inf:
            raise SystemExit(f"optimizer.lr: expected a number of at least 0, found {self.lr}")


@dataclass
class Schedule:
    warmup_steps: int
    total_steps: int
    final_lr_share: float = 0.1


@dataclass
class Checkpoint:
    folder: str
    interval: int
    keep_latest_k: int = 3
    keep_every: int | None = None
    async_save: bool = False
    resume: str | int = "auto"
    """``auto``: the newest sound step in ``folder``, or from scratch. Else a step's number or path."""


@dataclass
class Settings:
    model: dict[str, Any]
    data: dict[str, Any]
    batch: Batch
    train: Train
    optimizer: Optimizer
    schedule: Schedule
    checkpoint: Checkpoint
    trace: str


def read_settings(path: str, changes: list[str]) -> Settings:
    """Reads a YAML file and applies changes such as ``train.steps=40``, or ``steps=40`` where only one section has it.

    ``RESHARD_STEPS`` wins over both: ``reshard prove`` says with it how far to train.

    Raises SystemExit, with what is wrong and where, on anything unknown or missing.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise SystemExit(f"{path}: cannot be read: {fault}") from None
    if not isinstance(values, dict):
        raise SystemExit(f"{path}: expected keys and values, found {values!r}")
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator:
            raise SystemExit(f"{change}: expected key=value")
        section, name = _place(key, values)
        section[name] = yaml.safe_load(text)
    settings: Settings = _checked(Settings, values, path)
    if steps := os.environ.get("RESHARD_STEPS"):
        settings.train.steps = int(steps)
    return settings


def _place(key: str, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    parts = key.split(".")
    if len(parts) == 1 and key not in values:
        sections = [name for name, fields in _known_fields().items() if key in fields | set(values.get(name, {}))]
        if len(sections) != 1:
            found = f"it is in {', '.join(sections)}" if sections else "no section has it"
            raise SystemExit(f"{key}: expected section.key, or a key of one section only; {found}")
        parts = [sections[0], key]
    section = values
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise SystemExit(f"{key}: {part} is {section!r}, and holds no keys")
    return section, parts[-1]


def _known_fields() -> dict[str, set[str]]:
    return {
        section.name: {f.name for f in dataclasses.fields(section.type)}
        if dataclasses.is_dataclass(section.type)
        else set()
        for section in dataclasses.fields(Settings)
    }


def _checked(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise SystemExit(f"{where}: expected keys and values, found {values!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields.keys()):
        raise SystemExit(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(fields)}")
    required = {name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise SystemExit(f"{where}: {', '.join(missing)} missing")
    return kind(
        **{
            name: _checked(fields[name].type, value, f"{where}: {name}")
            if dataclasses.is_dataclass(fields[name].type)
            else _converted(fields[name].type, value, f"{where}: {name}")
            for name, value in values.items()
        }
    )


def _converted(kind: Any, value: Any, where: str) -> Any:
    # YAML reads 1e-3 as text and 1 as an int.
    if kind in (int, float):
        try:
            if isinstance(value, bool) or (kind is int and float(value) != int(float(value))):
                raise ValueError
            return kind(value)
        except (TypeError, ValueError):
            raise SystemExit(f"{where}: expected {kind.__name__}, found {value!r}") from None
    if kind in (bool, str) and not isinstance(value, kind):
        raise SystemExit(f"{where}: expected {kind.__name__}, found {value!r}")
    if kind == dict[str, Any] and not isinstance(value, dict):
        raise SystemExit(f"{where}: expected keys and values, found {value!r}")
    if kind == list[float]:
        if not isinstance(value, list):
            raise SystemExit(f"{where}: expected a list of numbers, found {value!r}")
        return [_converted(float, item, where) for item in value]
    return value
