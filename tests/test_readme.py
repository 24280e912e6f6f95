"""Every command and every file that the README shows, run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"^    ((?:bash|reshard) .+)$", re.MULTILINE)

# The commands that tests below run; CI itself is the run of test.sh, and a GPU is needed for gpu_check.sh.
QUICKSTART = "bash scripts/quickstart.sh"
TEST = "bash scripts/test.sh"
BATCH = "reshard batch --global-batch 256 --micro-batch 8 --world-size 6"
LAUNCH = "bash scripts/launch.sh --ranks 2 scripts/train_fsdp.py --config scripts/configs/tiny.yaml steps=20"
INSPECT = "reshard inspect runs/quickstart/resumed/checkpoints"
OFFLINE = "reshard offline runs/quickstart/resumed/checkpoints runs/quickstart/for-8/step-60 --world-size 8"
CHECK = "reshard check --deep runs/quickstart/for-8"
DIFF = "reshard diff runs/quickstart/resumed/checkpoints runs/quickstart/for-8"
CONVERT = [line for line in COMMAND.findall(README) if line.startswith("reshard convert ")]
PROVE = next(line for line in COMMAND.findall(README) if line.startswith("reshard prove "))
BATCH_CONFIG = "reshard batch-config args.yaml --old-world-size 8 --world-size 32"
ESTIMATE = "reshard estimate --params 70B --world-size 64 --bandwidth 5GB/s"
RENDER = "reshard slurm render --config slurm/run.yaml"
# By tests/cluster/test_slurm.py, on a SLURM.
SUBMIT = "reshard slurm submit --config slurm/run.yaml"
COMPARE = (
    "reshard compare-traces runs/quickstart/reference/trace.jsonl runs/quickstart/resumed/trace.jsonl --plot loss.png"
)
TRIAGE = (
    "reshard triage runs/quickstart/resumed/trace.jsonl --resume-step 40"
    " --checkpoint runs/quickstart/resumed/checkpoints"
)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(command: str, cwd: Path = ROOT, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


def block_after(marker: str) -> str:
    """The text of the fenced block that follows an HTML comment."""
    match = re.search(re.escape(f"<!-- {marker}") + r"[^\n]*-->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert match, f"no block after {marker}"
    return match.group(1)


def settled(text: str) -> str:
    """An output without times, speeds, versions and the bytes of random states, which vary from run to run."""
    text = re.sub(r"(?m)^  (written by|saved) .*$", r"  \1", text)
    text = re.sub(r"exact mode on [^,]+,", "exact mode on #,", text)
    text = re.sub(r"\d[\d.]* ([kMG]B|GB/s|[kM]\b|s\b)", r"# \1", text)
    return re.sub(r" +", " ", re.sub(r"\b\d+\.\d+\b", "#", text))


def test_no_command_goes_untested() -> None:
    assert set(COMMAND.findall(README)) == {
        QUICKSTART,
        TEST,
        BATCH,
        LAUNCH,
        INSPECT,
        OFFLINE,
        CHECK,
        DIFF,
        COMPARE,
        TRIAGE,
        PROVE,
        BATCH_CONFIG,
        ESTIMATE,
        RENDER,
        SUBMIT,
        *CONVERT,
    }
    assert len(CONVERT) == 3
    assert TEST in (ROOT / ".ci" / "run").read_text()


def test_the_quickstart_and_the_comparison(tmp_path: Path) -> None:
    result = run(f"{QUICKSTART} --folder {tmp_path / 'quickstart'}", timeout_s=900)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = block_after("output of: bash scripts/quickstart.sh").splitlines()
    assert_same_proof(shown, result.stdout.splitlines())
    assert (tmp_path / "quickstart" / "loss.png").stat().st_size > 10_000

    for command in (INSPECT, OFFLINE, CHECK, DIFF):
        result = run(command.replace("runs/quickstart", str(tmp_path / "quickstart")))
        assert result.returncode == 0, result.stdout + result.stderr
        printed = result.stdout.replace(str(tmp_path / "quickstart"), "runs/quickstart")
        assert settled(printed) == settled(block_after(f"output of: {command}")), printed
    code = re.search(r"```python\n(with reshard\.open_checkpoint.*?)```", README, re.DOTALL)
    assert code
    names: dict[str, Any] = {"reshard": reshard}
    exec(code.group(1).replace("runs/quickstart", str(tmp_path / "quickstart")), names)
    assert names["rows"].shape[0] == 8

    compare = COMPARE.replace("runs/quickstart", str(tmp_path / "quickstart"))
    result = run(compare, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "the traces agree (epsilon 0)" in result.stdout and "the traces agree (epsilon 0)" in shown
    assert (tmp_path / "loss.png").exists()

    result = run(TRIAGE.replace("runs/quickstart", str(tmp_path / "quickstart")))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("continuous: up to step 60 the loss goes on as expected")
    assert "12 samples a step before, 12 after (ranks 2 -> 3, accumulation 6 -> 4)" in result.stdout


def test_the_proof_prints_what_the_readme_shows(tmp_path: Path) -> None:
    # An option that is given twice counts as it is given last.
    result = run(PROVE.replace(" -- ", f" --folder {tmp_path / 'proof'} -- "), timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_proof(block_after("output of: reshard prove").splitlines(), result.stdout.splitlines())


def assert_same_proof(shown: list[str], printed: list[str]) -> None:
    """But for times, steps of kills, the picture's place, and losses, which other processors round otherwise."""

    def told(lines: list[str]) -> list[str]:
        kept = [line for line in lines if not line.startswith("both curves: ")]
        return [settled(re.sub(r"after step \d+", "after step #", line)) for line in kept]

    assert told(printed) == told(shown)


@pytest.mark.parametrize("command", CONVERT, ids=["verl", "deepspeed", "fsdp1"])
def test_rescues_print_what_the_readme_shows(tmp_path: Path, command: str) -> None:
    result = run(command.replace("runs/", f"{tmp_path}/"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    printed = result.stdout.replace(f"{tmp_path}/", "runs/")
    assert settled(printed) == settled(block_after(f"output of: {command}")), printed
    (made,) = tmp_path.iterdir()
    assert main(["check", "--deep", str(made)]) == 0


def test_a_batch_script_is_rendered() -> None:
    result = run(RENDER)
    assert result.returncode == 0, result.stderr
    assert "exec reshard slurm wrap --run runs/small -- " in result.stdout


def test_batch_config_prints_what_the_readme_shows(tmp_path: Path) -> None:
    lines = [
        "# fine-tuning",
        "per_device_train_batch_size: 4",
        "learning_rate: 2.0e-5",
        "gradient_accumulation_steps: 2",
    ]
    (tmp_path / "args.yaml").write_text("\n".join(lines))
    result = run(BATCH_CONFIG, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == block_after(f"output of: {BATCH_CONFIG}")


def test_estimate_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ESTIMATE.split()[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = block_after(f"excerpt of: {ESTIMATE}").splitlines()
    assert [line for line in printed if line in shown] == shown


def test_batch_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BATCH.split()[1:]) == 0
    assert capsys.readouterr().out == block_after(f"output of: {BATCH}")


def test_the_launcher_runs_the_training_script(tmp_path: Path) -> None:
    result = run(f"{LAUNCH} checkpoint.folder={tmp_path}/checkpoints trace={tmp_path}/trace.jsonl")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert (tmp_path / "checkpoints" / "step-20" / "reshard.json").exists()


def test_the_ordinary_loop_with_the_lines_that_change_is_resumable(tmp_path: Path) -> None:
    """Applies the README's patch, runs it on 2 ranks, then from its middle on 3: the same bits at the end."""
    patch = block_after("patch: train.py")
    assert sum(line.startswith("+") and not line.startswith("+++") for line in patch.splitlines()) <= 15
    (tmp_path / "train.py").write_text(block_after("file: train.py"))
    (tmp_path / "changes.diff").write_text(patch)
    launch = f"CUDA_VISIBLE_DEVICES= bash {ROOT}/scripts/launch.sh --ranks {{}} train.py"
    plain = run(launch.format(2), cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    shutil.rmtree(tmp_path / "checkpoints")

    assert run("patch train.py changes.diff", cwd=tmp_path).returncode == 0
    straight = run(launch.format(2), cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-10", "step-20"}
    (tmp_path / "checkpoints" / "step-20").rename(tmp_path / "expected")
    resumed = run(launch.format(3), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    expected, found = (tensors(tmp_path / name) for name in ("expected", "checkpoints/step-20"))
    assert expected.keys() == found.keys() and len(expected) > 8
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Model and optimizer tensors of a checkpoint, by stock torch."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size") and key.startswith(("model.", "optim."))
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_figures_say_device_ranks_and_date() -> None:
    for line in README.splitlines():
        if re.search(r"\b\d+(\.\d+)? s after", line):
            start = README.index(line)
            assert re.search(r"(CPU|GPU).*\d{4}-\d\d-\d\d", README[start : start + 400], re.DOTALL)
