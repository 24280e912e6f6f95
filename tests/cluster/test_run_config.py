"""A run's settings: what is read from them, and what is said of each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.cluster.run_config import RunConfig, read_run_config
from reshard.errors import UsageError

ROOT = Path(__file__).parents[2]
LEAST = {"name": "small", "command": "bash train.sh", "time": "4:00:00"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one to be in, as relative paths count from there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(lines: str) -> RunConfig:
    Path("run.yaml").write_text(lines)
    return read_run_config(Path("run.yaml"))


def read_with(**lines: str) -> RunConfig:
    return read("\n".join(f"{key}: {value}" for key, value in {**LEAST, **lines}.items()))


def test_the_least_that_will_do() -> None:
    assert read_with() == RunConfig("small", "runs/small", ("bash", "train.sh"), "4:00:00", 14400.0)


def test_all_keys() -> None:
    config = read("""
name: big
run: /scratch/big
command: [python, train.py, --lr, 1e-3, "a b", $x]
launcher: srun
nodes: 2-8
gpus_per_node: a100:8
time: 2-12:00:00
warn_s: 300
requeue: no
max_failures: 5
fall_back: true
partition: no
account: "0123"
qos: high
constraint: a100&nvlink
cpus_per_task: 12
options: [--mem=0, --comment='a b']
setup: |
  module load cuda
  source .venv/bin/activate
container: [apptainer, exec, image.sif]
""")
    assert config == RunConfig(
        name="big",
        run="/scratch/big",
        command=("python", "train.py", "--lr", "1e-3", "a b", "$x"),
        time="2-12:00:00",
        time_s=216000.0,
        launcher="srun",
        min_nodes=2,
        max_nodes=8,
        gpus_per_node="a100:8",
        warn_s=300,
        requeue=False,
        max_failures=5,
        fall_back=True,
        partition="no",
        account="0123",
        qos="high",
        constraint="a100&nvlink",
        cpus_per_task=12,
        options=("--mem=0", "--comment='a b'"),
        setup=("module load cuda", "source .venv/bin/activate"),
        container=("apptainer", "exec", "image.sif"),
    )


def test_what_comes_with_the_checkout_is_read() -> None:
    config = read_run_config(ROOT / "slurm" / "run.yaml")
    assert (config.name, config.min_nodes, config.max_nodes, config.warn_s) == ("small", 1, 4, None)


def test_every_key_of_the_example_that_is_commented_out_is_one(folder: Path) -> None:
    (folder / "slurm").mkdir()
    (folder / "slurm" / "site.env").touch()
    text = (ROOT / "slurm" / "run.yaml").read_text().replace("#   module", "  module")
    lines = [
        line.removeprefix("# ") if line.partition(":")[0][2:].replace("_", "").isalpha() else line
        for line in text.splitlines()
    ]
    config = read("\n".join(lines))
    assert (config.cpus_per_task, config.container[0], config.setup) == (16, "apptainer", ("module load cuda",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bash train.sh  --lr 1e-3", ("bash", "train.sh", "--lr", "1e-3")),
        ("python train.py 'a b'", ("python", "train.py", "a b")),
        ("python train.py $SLURM_NODEID", ("bash", "-euo", "pipefail", "-c", "python train.py $SLURM_NODEID")),
        ("python train.py | tee log", ("bash", "-euo", "pipefail", "-c", "python train.py | tee log")),
        ("|\n  cd code\n  python train.py", ("bash", "-euo", "pipefail", "-c", "cd code\npython train.py")),
    ],
)
def test_a_command_as_text_gets_a_shell_where_it_needs_one(text: str, words: tuple[str, ...]) -> None:
    assert read_with(command=text).command == words


@pytest.mark.parametrize(
    ("text", "time_s"), [("90", 5400), ("30:00", 1800), ("1:30:00", 5400), ('"1:30:00"', 5400), ("1-0", 86400)]
)
def test_a_time_means_what_it_means_to_slurm_quoted_or_not(text: str, time_s: float) -> None:
    """YAML would make a number of 1:30:00."""
    assert read_with(time=text).time_s == time_s


@pytest.mark.parametrize(("text", "nodes"), [("4", (4, 4)), ("1-4", (1, 4)), ("3-3", (3, 3))])
def test_nodes(text: str, nodes: tuple[int, int]) -> None:
    config = read_with(nodes=text)
    assert (config.min_nodes, config.max_nodes) == nodes


def test_an_empty_value_is_as_if_left_out() -> None:
    assert read_with(partition="", cpus_per_task="~", warn_s="auto") == read_with()


def test_the_site_file_is_found_by_itself(folder: Path) -> None:
    (folder / "slurm").mkdir()
    (folder / "slurm" / "site.env").touch()
    assert read_with().env_file == "slurm/site.env"
    (folder / "other.env").touch()
    assert read_with(env_file="other.env").env_file == "other.env"


FAULTS: list[tuple[str, str, str]] = [
    ("name", "a b", "letters, digits"),
    ("name", "-x", "letters, digits"),
    ("name", "[a]", "letters, digits"),
    ("run", "$SCRATCH/x", "write the path out"),
    ("run", "a%j", "no $ %"),
    ("run", "[a, b]", "one line of text"),
    ("command", "bash 'train.sh", "every quote closed"),
    ("command", "{a: b}", "a text or a list of words"),
    ("command", "[a, [b]]", "a list of words"),
    ("command", "[]", "a list of words"),
    ("launcher", "mpirun", "torchrun, srun, none"),
    ("nodes", "0", "4, or 1-4"),
    ("nodes", "4-1", "4, or 1-4"),
    ("nodes", "2-", "4, or 1-4"),
    ("nodes", "[1, 4]", "4, or 1-4"),
    ("gpus_per_node", "0", "a100:4"),
    ("gpus_per_node", "a100", "a100:4"),
    ("gpus_per_node", "some", "a100:4"),
    ("time", "an hour", "not a time"),
    ("time", "0", "above 0"),
    ("time", "infinite", "above 0"),
    ("warn_s", "0", "auto, or seconds, 1 to 65535"),
    ("warn_s", "70000", "auto, or seconds, 1 to 65535"),
    ("warn_s", "2m", "auto, or seconds, 1 to 65535"),
    ("requeue", "maybe", "true or false"),
    ("max_failures", "0", "a whole number, 1 to"),
    ("max_failures", "-1", "a whole number, 1 to"),
    ("fall_back", "2", "true or false"),
    ("partition", "a b", "without blanks"),
    ("account", "--evil", "without blanks"),
    ("qos", "[a]", "one line of text"),
    ("constraint", "a | b", "without blanks"),
    ("cpus_per_task", "1.5", "a whole number, 1 to"),
    ("options", "--mem=0", "a list"),
    ("options", "[mem=0]", "one of sbatch's"),
    ("options", "[--nodes=4]", "use nodes"),
    ("options", "[-N4]", "use nodes"),
    ("options", "[--partition gpu]", "use partition"),
    ("options", "[--array=1-3]", "leave it out"),
    ("options", "[--ntasks-per-node=4]", "leave it out"),
    ("options", "[-o x]", "leave it out"),
    ("setup", "[[a]]", "lines of shell"),
    ("container", "apptainer exec x.sif", "a list of words"),
    ("env_file", "missing.env", "site.example.env"),
]


@pytest.mark.parametrize(("key", "value", "said"), FAULTS, ids=[f"{key}={value}" for key, value, _ in FAULTS])
def test_a_fault_names_file_key_and_way_out(key: str, value: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_with(**{key: value})
    text = str(caught.value)
    assert text.startswith(f"run.yaml: {key}: ") and "expected" in text and "found" in text and said in text


def test_every_key_has_a_fault() -> None:
    from reshard.cluster.run_config import _READERS

    assert {key for key, _, _ in FAULTS} == _READERS.keys()


@pytest.mark.parametrize("key", ["name", "command", "time"])
def test_what_is_needed_and_missing(key: str) -> None:
    with pytest.raises(UsageError, match=f"run.yaml: {key}: missing; add a line such as"):
        read("\n".join(f"{name}: {value}" for name, value in LEAST.items() if name != key))


def test_an_unknown_key() -> None:
    with pytest.raises(
        UsageError, match=r"run.yaml: gpus: no such key: expected one of name, run, .*, found gpus, mem"
    ):
        read_with(mem="3", gpus="4")


@pytest.mark.parametrize("gpus", [None, "all"])
def test_one_task_a_gpu_needs_their_number(gpus: str | None) -> None:
    lines: dict[str, Any] = {"launcher": "srun", **({} if gpus is None else {"gpus_per_node": gpus})}
    with pytest.raises(UsageError, match="gpus_per_node: needed with launcher: srun"):
        read_with(**lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected `key: value` lines, found nothing"),
        ("- a\n- b", "found a list"),
        ("train.sh", "found a text"),
        ("name: [a", "not YAML"),
        ("name: &a [*a]", "line 1: not YAML: found"),
        ("name: x\na: b: c", "line 2: not YAML: found mapping values are not allowed here"),
    ],
)
def test_a_file_that_is_something_else(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert "run.yaml" in str(caught.value) and said in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(UsageError, match=r"absent.yaml: cannot be read: No such file"):
        read_run_config(Path("absent.yaml"))
    Path("binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="binary: cannot be read: not a text"):
        read_run_config(Path("binary"))
