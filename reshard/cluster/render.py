"""The batch script of a run: a text, made from its settings alone."""

from __future__ import annotations

import shlex

from reshard.cluster.run_config import ALL_GPUS, DEFAULT_MAX_FAILURES, RunConfig, gpu_count

LOG_FOLDER = "logs"

# A node's GPUs as sinfo writes them: "gpu:4", "gpu:a100:4(S:0-1),gpu:h100:2".
_COUNT_GPUS = (
    'gpus=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --partition="$SLURM_JOB_PARTITION" --format=%G |\n'
    "    tr ',(' '\\n' | awk -F: '$1 == \"gpu\" { total += $NF } END { print total + 0 }')"
)


def render(config: RunConfig, *, warn_s: int) -> str:
    """The script to submit, which only sets up and hands over: what happens when is decided by `reshard slurm wrap`.

    Args:
        config: what the job is to be.
        warn_s: how long before its time limit the job is told.
    """
    options = [*map(_quoted, sbatch_options(config, warn_s)), *config.options]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    # Not yet with -u: what modules and virtual environments bring along uses variables that are not set.
    lines += ["set -eo pipefail"]
    if config.env_file is not None:
        # Without a slash, bash would look for it on the PATH.
        path = config.env_file if "/" in config.env_file else f"./{config.env_file}"
        lines += ["# shellcheck source=/dev/null", f"source {shlex.quote(path)}"]
    lines += config.setup
    if config.launcher == "torchrun" and config.gpus_per_node == ALL_GPUS:
        lines += ["# Without a total, the step of an exclusive job would get no GPUs.", _COUNT_GPUS]
    # A warning that comes while `wrap` is being started would end the script; of the time it knows by itself.
    lines += ["set -u", "trap '' USR1", f"exec {_outer(config)} --{_CONTINUED}{_inner(config)}"]
    return "\n".join(lines) + "\n"


_CONTINUED = " \\\n    "


def sbatch_options(config: RunConfig, warn_s: int) -> list[str]:
    """The options of sbatch that the settings come to, without further ones, and not quoted."""
    nodes = str(config.min_nodes)
    if config.max_nodes > config.min_nodes:
        nodes += f"-{config.max_nodes}"
    given = {
        "job-name": config.name,
        "nodes": nodes,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "cpus-per-task": config.cpus_per_task,
        "output": f"{config.run}/{LOG_FOLDER}/%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{warn_s}",
        "dependency": "singleton",
    }
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    options.append("--requeue" if config.requeue else "--no-requeue")
    if config.gpus_per_node == ALL_GPUS:
        # The one GPU keeps it off nodes that have none; exclusive gives it the others of the node.
        options += ["--exclusive", "--gres=gpu:1"]
    elif config.gpus_per_node is not None:
        options.append(f"--gpus-per-node={config.gpus_per_node}")
    if config.launcher == "srun":
        # Or a node would come with the CPUs of one task; --ntasks-per-node would pin a range to its smallest number.
        options.append(f"--mincpus={_tasks_per_node(config) * (config.cpus_per_task or 1)}")
    return options


def _quoted(option: str) -> str:
    name, separator, value = option.partition("=")
    return name + separator + (shlex.quote(value) if separator else "")


def _outer(config: RunConfig) -> str:
    words = ["reshard", "slurm", "wrap", "--run", config.run]
    if config.max_failures != DEFAULT_MAX_FAILURES:
        words += ["--max-failures", str(config.max_failures)]
    if config.fall_back:
        words.append("--fall-back")
    return shlex.join(words)


def _inner(config: RunConfig) -> str:
    if config.launcher == "none":
        return shlex.join([*config.container, *config.command])
    ranks = ["--ranks"] if config.launcher == "srun" else []
    # Continued lines for those who read the script; to bash it is one.
    return _CONTINUED.join(
        [
            _srun(config),
            shlex.join([*config.container, "reshard", "slurm", "wrap", *ranks, "--"]),
            shlex.join(config.command),
        ]
    )


def _tasks_per_node(config: RunConfig) -> int:
    if config.launcher == "torchrun":
        return 1
    assert config.gpus_per_node is not None, "read_run_config asks for it"
    return gpu_count(config.gpus_per_node)


def _srun(config: RunConfig) -> str:
    tasks = _tasks_per_node(config)
    total = '"$SLURM_JOB_NUM_NODES"' if tasks == 1 else f"$((SLURM_JOB_NUM_NODES * {tasks}))"
    log = shlex.quote(f"{config.run}/{LOG_FOLDER}/%j.") + '"${SLURM_RESTART_COUNT:-0}".%N.log'
    words = [
        # Here and not on the job, where with a range of nodes it would pin the job to the smallest number.
        f"srun --ntasks={total} --ntasks-per-node={tasks}",
        # From 22.05 on, srun does not go by what the job was given.
        '${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}',
        # Where one task fails, the others would wait for it in a collective; where one ends well, they may still save.
        "--kill-on-bad-exit=1 --wait=0",
        f"--output={log} --open-mode=append",
    ]
    if config.launcher == "torchrun" and config.gpus_per_node == ALL_GPUS:
        words.insert(1, '--gpus="$gpus"')
    return _CONTINUED.join(words)
