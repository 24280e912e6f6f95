"""What a job is asked to be: a YAML file, read into checked values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from reshard.cluster.job import duration_s
from reshard.errors import UsageError

LAUNCHERS = ("torchrun", "srun", "none")
ALL_GPUS = "all"
DEFAULT_MAX_FAILURES = 3
DEFAULT_ENV_FILE = "slurm/site.env"

_MAX_WARN_S = 65535  # As sbatch has it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NODES = re.compile(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?")
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?([1-9][0-9]*)")
# What a shell would do something with, beyond splitting at blanks and taking quotes off.
_SHELL = re.compile(r"[$`|&;<>()*?\[\]{}~#!\n]")
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_ABSENT = ("", "~", "null")

# Options of sbatch that a key decides, by that key.
_KEYED_OPTIONS = {
    "name": ("--job-name", "-J"),
    "nodes": ("--nodes", "-N"),
    "time": ("--time", "-t"),
    "warn_s": ("--signal",),
    "requeue": ("--requeue", "--no-requeue"),
    "partition": ("--partition", "-p"),
    "account": ("--account", "-A"),
    "qos": ("--qos", "-q"),
    "constraint": ("--constraint", "-C"),
    "cpus_per_task": ("--cpus-per-task", "-c"),
    "gpus_per_node": ("--gpus-per-node",),
}
# And those with which the script would not do what it is for.
_REFUSED_OPTIONS = (
    *("--output", "-o", "--open-mode", "--dependency", "-d", "--array", "-a", "--wrap", "--chdir", "-D"),
    *("--ntasks", "-n", "--ntasks-per-node"),
)


@dataclass(frozen=True)
class RunConfig:
    """A job, as its author wants it.

    Attributes:
        name: of the job; of the jobs of one name, one runs at a time.
        run: the run's folder, on a file system that all nodes share.
        command: what each task runs, in words.
        time: the time limit, as SLURM spells it.
        time_s: the same, in seconds.
        launcher: `torchrun`, one task a node; `srun`, one task a GPU; `none`, the command as it is.
        min_nodes, max_nodes: how many nodes will do.
        gpus_per_node: a count, a kind and a count (`a100:4`), or `all` for whole nodes with whatever they have;
            None where the site's settings or `options` say it.
        warn_s: how long before the time limit the job is told; None to go by what the run has measured.
        requeue: whether the job goes back into the queue.
        max_failures: crashes in a row without a newer step, after which it does not.
        fall_back: whether a step that keeps failing is given up for the one before it.
        partition, account, qos, constraint, cpus_per_task: as sbatch has them; None for the site's settings.
        options: further options of sbatch.
        setup: shell lines that run before the command.
        container: words in front of the command.
        env_file: a shell file that is sourced first.
    """

    name: str
    run: str
    command: tuple[str, ...]
    time: str
    time_s: float
    launcher: str = "torchrun"
    min_nodes: int = 1
    max_nodes: int = 1
    gpus_per_node: str | None = None
    warn_s: int | None = None
    requeue: bool = True
    max_failures: int = DEFAULT_MAX_FAILURES
    fall_back: bool = False
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    env_file: str | None = None


def read_run_config(path: Path) -> RunConfig:
    """From a YAML file. A relative path in it counts from the folder in which this is called, as sbatch has it.

    Raises:
        UsageError: the file cannot be read, or a key in it is missing, unknown or has a value that will not do.
    """
    given = _read(path)
    unknown = sorted(given.keys() - _READERS.keys())
    if unknown:
        raise UsageError(
            "no such key",
            path=path,
            key=unknown[0],
            expected=f"one of {', '.join(_READERS)}",
            found=", ".join(unknown),
            hint="options of sbatch that have no key go under options",
        )
    values: dict[str, Any] = {}
    for key, value in given.items():
        if value in _ABSENT:
            continue
        try:
            values.update(_READERS[key](key, value))
        except UsageError as error:
            error.path, error.key = str(path), key
            raise
    for key, example in (("name", "name: small"), ("command", "command: bash train.sh"), ("time", 'time: "12:00:00"')):
        if key not in values:
            raise UsageError("missing", path=path, key=key, hint=f"add a line such as `{example}`")
    config = RunConfig(**{"run": f"runs/{values['name']}", "env_file": _default_env_file(), **values})
    if config.launcher == "srun" and config.gpus_per_node in (None, ALL_GPUS):
        raise UsageError(
            "needed with launcher: srun, as it starts one task a GPU",
            path=path,
            key="gpus_per_node",
            expected="a count",
            found=config.gpus_per_node or "none",
            hint="say how many, or use launcher: torchrun, which finds out on each node",
        )
    return config


def gpu_count(gpus_per_node: str) -> int:
    """Of a count, or a kind and a count."""
    return int(gpus_per_node.rpartition(":")[2])


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        # As text throughout: YAML's own types would make 5400 of 1:30:00, and false of a partition named `no`.
        given = yaml.load(path.read_text(), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UsageError(
            f"cannot be read: {reason}", path=path, hint="name a YAML file, like slurm/run.yaml"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else f"line {mark.line + 1}"
        said = getattr(error, "problem", None) or str(error)
        raise UsageError("not YAML", path=path, key=line, found=said, hint="compare with slurm/run.yaml") from error
    if not isinstance(given, Mapping) or not given:
        found = "nothing" if not given else "a list" if isinstance(given, list) else "a text"
        raise UsageError("not a run's settings", path=path, expected="`key: value` lines", found=found)
    return {str(key): value for key, value in given.items()}


def _refuse(what: str, value: object, expected: str, hint: str | None = None) -> NoReturn:
    raise UsageError(what, expected=expected, found=repr(value), hint=hint)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or any(not character.isprintable() for character in value):
        _refuse("not a text", value, "one line of text")
    return value


def _word(key: str, value: object) -> dict[str, Any]:
    text = _text(key, value)
    if text.startswith("-") or any(character.isspace() for character in text):
        _refuse("not a name", text, "a word, without blanks")
    return {key: text}


def _job_name(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        _refuse("not a name", value, "letters, digits and . _ -", "it names a folder, too")
    return {key: value}


def _path(key: str, value: object) -> dict[str, Any]:
    text = _text(key, value)
    if set("$%\\") & set(text):
        _refuse("not a path that sbatch leaves as it is", text, r"no $ % or \ in it", "write the path out")
    return {key: str(Path(text).expanduser())}


def _env_file(key: str, value: object) -> dict[str, Any]:
    path = _path(key, value)[key]
    if not Path(path).is_file():
        _refuse(
            "no such file", path, "a shell file", "copy slurm/site.example.env and fill it in, or leave the key out"
        )
    return {key: path}


def _default_env_file() -> str | None:
    return DEFAULT_ENV_FILE if Path(DEFAULT_ENV_FILE).is_file() else None


def _command(key: str, value: object) -> dict[str, Any]:
    """A list is words; a text is what a shell makes of it, and needs one where it is more than words."""
    if isinstance(value, list):
        return _words(key, value)
    if not isinstance(value, str):
        _refuse("not a command", value, "a text or a list of words")
    text = value.strip()
    if _SHELL.search(text):
        return {key: ("bash", "-euo", "pipefail", "-c", text)}
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        _refuse("not a command", text, "every quote closed")
    return {key: words}


def _words(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        _refuse("not words", value, "a list of words, such as [apptainer, exec, image.sif]")
    if any("\0" in word for word in value):
        _refuse("not words", value, "no NUL in it")
    return {key: tuple(value)}


def _lines(key: str, value: object) -> dict[str, Any]:
    lines = value.splitlines() if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        _refuse("not lines", value, "lines of shell, or a list of them")
    return {key: tuple(lines)}


def _options(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(option, str) for option in value):
        _refuse("not options", value, "a list, such as [--mem=0, --reservation=spring]")
    for option in value:
        if not option.startswith("-") or "\n" in option:
            _refuse("not an option", option, "one of sbatch's, such as --mem=0")
        name = option.split("=")[0].split()[0]
        name = name if name.startswith("--") else name[:2]
        for own, names in _KEYED_OPTIONS.items():
            if name in names:
                _refuse("an option that has a key", option, "others", f"use {own}")
        if name in _REFUSED_OPTIONS:
            _refuse("set by the script", option, "others", "leave it out")
    return {key: tuple(value)}


def _launcher(key: str, value: object) -> dict[str, Any]:
    if value not in LAUNCHERS:
        _refuse("no such launcher", value, f"one of {', '.join(LAUNCHERS)}")
    return {key: value}


def _nodes(key: str, value: object) -> dict[str, Any]:
    match = _NODES.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2] or match[1]) < int(match[1]):
        _refuse("not a number of nodes", value, "a count, or two: 4, or 1-4")
    return {"min_nodes": int(match[1]), "max_nodes": int(match[2] or match[1])}


def _gpus_per_node(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, str) or not (value == ALL_GPUS or _GPUS.fullmatch(value)):
        _refuse("not a number of GPUs", value, f"a count, a kind and a count (a100:4), or {ALL_GPUS}")
    return {key: value}


def _time(key: str, value: object) -> dict[str, Any]:
    text = _text(key, value)
    time_s = duration_s(text)
    if not time_s:
        _refuse("not a time limit", text, "a time above 0", "such as 12:00:00")
    return {key: text, "time_s": time_s}


def _warn_s(key: str, value: object) -> dict[str, Any]:
    return {key: None} if value == "auto" else _count(1, _MAX_WARN_S, "auto, or seconds")(key, value)


def _switch(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, str) or value.lower() not in _SWITCH:
        _refuse("not a switch", value, "true or false")
    return {key: _SWITCH[value.lower()]}


def _count(least: int, most: int, expected: str) -> Callable[[str, object], dict[str, Any]]:
    def read(key: str, value: object) -> dict[str, Any]:
        is_number = isinstance(value, str) and value.isascii() and value.isdigit()
        if not is_number or not least <= int(str(value)) <= most:
            _refuse("not a count", value, f"{expected}, {least} to {most}")
        return {key: int(str(value))}

    return read


# From a key and its value to fields of RunConfig; each raises a UsageError without a place.
_READERS: dict[str, Callable[[str, object], dict[str, Any]]] = {
    "name": _job_name,
    "run": _path,
    "command": _command,
    "launcher": _launcher,
    "nodes": _nodes,
    "gpus_per_node": _gpus_per_node,
    "time": _time,
    "warn_s": _warn_s,
    "requeue": _switch,
    "max_failures": _count(1, 10**6, "a whole number"),
    "fall_back": _switch,
    "partition": _word,
    "account": _word,
    "qos": _word,
    "constraint": _word,
    "cpus_per_task": _count(1, 10**6, "a whole number"),
    "options": _options,
    "setup": _lines,
    "container": _words,
    "env_file": _env_file,
}
