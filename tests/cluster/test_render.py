"""The batch script: what it asks of sbatch, and that its last line hands every word on as it was written."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reshard.cluster.render import render
from reshard.cluster.run_config import RunConfig

ROOT = Path(__file__).parents[2]
PLAIN = RunConfig("small", "runs/small", ("bash", "train.sh", "--lr", "1e-3"), "4:00:00", 14400.0)
ODD = ("a b", "it's", '"q"', "$HOME", "`id`", "$(id)", "\\", "*", "", "-x", "%j", "#", "é", "two\nlines", ";", "!")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "range": {"min_nodes": 1, "max_nodes": 4, "gpus_per_node": "a100:8"},
    "whole-nodes": {"max_nodes": 4, "gpus_per_node": "all", "cpus_per_task": 8},
    "task-a-gpu": {"launcher": "srun", "max_nodes": 3, "gpus_per_node": "a100:2", "cpus_per_task": 3},
    "none": {"launcher": "none", "container": ("env", "A=1")},
    "container": {"container": ("apptainer", "exec", "--nv", "an image.sif")},
    "settings": {"requeue": False, "max_failures": 7, "fall_back": True, "env_file": "site.env", "setup": ("true",)},
    "site": {"partition": "gpu", "account": "lab", "qos": "low", "constraint": "a|b", "options": ("--mem=0",)},
    "odd": {"run": "/tmp/a b/it's #1", "command": ODD},
}  # fmt: skip


def script(name: str) -> str:
    return render(dataclasses.replace(PLAIN, **CASES[name]), warn_s=90)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("name", CASES)
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=script(name), text=True, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    scripts = [tmp_path / f"{name}.sbatch" for name in CASES if name != "odd"]
    for path in scripts:
        path.write_text(script(path.stem))
    scripts += [*(ROOT / "slurm").glob("*.sbatch"), ROOT / "slurm" / "site.example.env"]
    done = subprocess.run(["shellcheck", "--shell=bash", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_whole_of_a_plain_one() -> None:
    assert script("plain") == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=small\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH --time=4:00:00\n"
        "#SBATCH --output=runs/small/logs/%j.log\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --signal=B:USR1@90\n"
        "#SBATCH --dependency=singleton\n"
        "#SBATCH --requeue\n"
        "set -eo pipefail\n"
        "set -u\n"
        "trap '' USR1\n"
        "exec reshard slurm wrap --run runs/small -- \\\n"
        '    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\\n'
        '    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \\\n'
        "    --kill-on-bad-exit=1 --wait=0 \\\n"
        '    --output=runs/small/logs/%j."${SLURM_RESTART_COUNT:-0}".%N.log --open-mode=append \\\n'
        "    reshard slurm wrap -- \\\n"
        "    bash train.sh --lr 1e-3\n"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("range", ["--nodes=1-4", "--gpus-per-node=a100:8"]),
        ("whole-nodes", ["--nodes=1-4", "--exclusive", "--gres=gpu:1", "--cpus-per-task=8"]),
        # With the CPUs of one task a node, the step of two could not start.
        ("task-a-gpu", ["--nodes=1-3", "--gpus-per-node=a100:2", "--cpus-per-task=3", "--mincpus=6"]),
        ("settings", ["--no-requeue"]),
        ("site", ["--partition=gpu", "--account=lab", "--qos=low", "--constraint='a|b'", "--mem=0"]),
        ("odd", ["--output='/tmp/a b/it'\"'\"'s #1/logs/%j.log'"]),
    ],
)
def test_what_is_asked_of_sbatch(name: str, expected: list[str]) -> None:
    found = options(script(name))
    assert set(expected) <= set(found)
    assert not any(option.startswith("--ntasks") for option in found), "it pins a range of nodes to its smallest"
    assert len(found) == len(set(found))


def test_what_needs_unset_variables_comes_before_they_are_errors() -> None:
    lines = script("settings").splitlines()
    assert lines.index("source ./site.env") < lines.index("true") < lines.index("set -u")


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """In place of srun, reshard, sinfo: what they were called with goes to calls/, and they call what comes after."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "calls").mkdir()
    note = f"printf '%s\\0' \"$@\" > {tmp_path}/calls/$(ls {tmp_path}/calls | wc -l)-${{0##*/}}\n"
    after_options = 'while [[ $1 == --* ]]; do shift; done; exec "$@"\n'
    texts = {
        "reshard": note + 'while [[ $1 != -- ]]; do shift; done; shift; exec "$@"\n',
        "srun": note + after_options,
        "apptainer": note + 'shift 2; exec "$@"\n',
        "train": note,
        "sinfo": "printf 'gpu:4\\ngpu:a100:4(S:0-1),shard:9\\ngpu:a100:2,gpu:h100:1(S:0,2)\\n'\n",
    }
    for name, text in texts.items():
        (folder / name).write_text("#!/bin/bash\n" + text)
        (folder / name).chmod(0o755)
    return folder


def calls(stubs: Path, text: str, **variables: str) -> list[tuple[str, list[str]]]:
    """Which stubs a script called, in turn, with what."""
    given = {
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_PARTITION": "gpu",
        "PATH": f"{stubs}:{os.environ['PATH']}",
        **variables,
    }
    subprocess.run(["/bin/bash", "-s"], input=text, text=True, check=True, env=given, cwd=stubs.parent)
    paths = sorted((stubs.parent / "calls").iterdir(), key=lambda path: int(path.name.split("-")[0]))
    return [(path.name.partition("-")[2], path.read_text().split("\0")[:-1]) for path in paths]


def test_every_word_arrives_as_it_was_written(stubs: Path) -> None:
    config = dataclasses.replace(
        PLAIN,
        run="/tmp/a b/it's #1",
        command=("train", *ODD),
        container=("apptainer", "exec", "an image.sif"),
        max_failures=7,
        fall_back=True,
    )
    found = calls(stubs, render(config, warn_s=90))
    assert [name for name, _ in found] == ["reshard", "srun", "apptainer", "reshard", "train"]
    (_, outer), (_, srun), (_, container), (_, inner), (_, command) = found
    assert outer[:8] == ["slurm", "wrap", "--run", "/tmp/a b/it's #1", "--max-failures", "7", "--fall-back", "--"]
    assert srun[:6] == [
        "--ntasks=3",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--output=/tmp/a b/it's #1/logs/%j.0.%N.log",
        "--open-mode=append",
    ]
    assert container[:2] == ["exec", "an image.sif"]
    assert inner[:4] == ["slurm", "wrap", "--", "train"]
    assert command == list(ODD)


def test_one_task_a_gpu(stubs: Path) -> None:
    config = dataclasses.replace(PLAIN, launcher="srun", gpus_per_node="a100:2", command=("train",))
    found = dict(calls(stubs, render(config, warn_s=90), SLURM_CPUS_PER_TASK="8", SLURM_RESTART_COUNT="5"))
    assert found["srun"][:3] == ["--ntasks=6", "--ntasks-per-node=2", "--cpus-per-task=8"]
    assert "--output=runs/small/logs/%j.5.%N.log" in found["srun"]
    assert found["reshard"] == ["slurm", "wrap", "--ranks", "--", "train"]


def test_whole_nodes_with_different_numbers_of_gpus(stubs: Path) -> None:
    config = dataclasses.replace(PLAIN, gpus_per_node="all", command=("train",))
    assert "--gpus=11" in dict(calls(stubs, render(config, warn_s=90)))["srun"]


def test_a_command_with_its_own_srun(stubs: Path) -> None:
    config = dataclasses.replace(PLAIN, launcher="none", command=("bash", "-c", 'srun train "$0"', "a b"))
    found = calls(stubs, render(config, warn_s=90))
    assert [name for name, _ in found] == ["reshard", "srun", "train"]
    assert found[0][1] == ["slurm", "wrap", "--run", "runs/small", "--", *config.command]
    assert found[2][1] == ["a b"]


@pytest.mark.parametrize("given", [(), ("--config", "my run.yaml")])
def test_the_script_of_the_checkout_passes_its_arguments_on(stubs: Path, given: tuple[str, ...]) -> None:
    text = (ROOT / "slurm" / "train.sbatch").read_text()
    (stubs / "bash").symlink_to(stubs / "train")
    found = calls(stubs, f"set -- {' '.join(map(repr, given))}\n{text}", SLURM_JOB_NAME="mine")
    assert [name for name, _ in found] == ["reshard", "srun", "reshard", "bash"]
    assert found[0][1][:5] == ["slurm", "wrap", "--run", "runs/mine", "--"]
    arguments = list(given) or ["--config", "scripts/configs/small.yaml"]
    assert found[3][1] == ["scripts/launch.sh", "scripts/train_fsdp.py", *arguments]
    assert (stubs.parent / "runs" / "mine" / "logs").is_dir()
