"""`reshard estimate`, as people and as scripts call it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small import Small

import reshard
from reshard.cli.main import main

CONFIG = Path(__file__).parents[2] / "scripts" / "configs" / "gpu8.yaml"


def estimate(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["estimate", *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    small = Small()
    small.train(2)
    reshard.save_state(folder, small.state)
    return folder


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--params", "70B", "--world-size", 64, "--bandwidth", "5GB/s", "--json")
    found = json.loads(estimate(capsys, *argv))
    conventions = found.pop("conventions")
    share = 70_000_000_000 // 64
    assert found == {
        "source": "params",
        "parameters": 70_000_000_000,
        "world_size": 64,
        "largest_rank_parameters": share,
        "largest_rank_is_exact": False,
        "largest_block_parameters": None,
        "bandwidth_bytes_per_s": 5e9,
        "measured": None,
    }
    assert conventions["bf16-master"] == {
        "title": "bf16 weights, fp32 master and moments",
        "checkpoint": {
            "weights": 2,
            "masters": 4,
            "moments": 8,
            "gradients": 0,
            "bytes_per_parameter": 14,
            "bytes": 980_000_000_000,
            "largest_rank_bytes": 14 * share,
            "whole_in_rank_0": [],
            "write_s": 196,
        },
        "memory": {
            "weights": 2,
            "masters": 4,
            "moments": 8,
            "gradients": 2,
            "whole_on_each_rank": [],
            "bytes_per_parameter": 16,
            "bytes": 1_120_000_000_000,
            "largest_rank_bytes": 16 * share,
        },
        "transient_bytes_per_block_parameter": 4,
        "transient_bytes": None,
    }
    zero_1 = conventions["zero-1"]
    assert zero_1["memory"]["largest_rank_bytes"] == 4 * 70_000_000_000 + 12 * share
    assert zero_1["checkpoint"]["largest_rank_bytes"] == 2 * 70_000_000_000 + 12 * share
    each = {name: entry["checkpoint"]["bytes_per_parameter"] for name, entry in conventions.items()}
    assert (each["fp32-adam"], each["fsdp-mixed"], each["bf16-adam"], each["zero-3"]) == (12, 12, 6, 12)


def test_text_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    out = estimate(capsys, "--params", "70B")
    assert out.startswith("70 B parameters (70,000,000,000)\n\nin a checkpoint: bytes per parameter\n")
    assert "  fp32 Adam                                      4        -        8     12  840 GB\n" in out
    assert "largest rank" not in out and "written in" not in out
    assert "Activations and buffers of collectives are not counted" in out
    out = estimate(capsys, "--params", "70B", "--world-size", 64, "--bandwidth", "5GB/s")
    assert "the largest of 64 ranks has 1,093,750,000 parameters, 1.562 %, and up to one row of each" in out
    assert re.search(r"^  fp32 Adam +4 +- +8 +12 +840 GB +13\.1 GB +2\.8 min$", out, re.MULTILINE)
    assert "one rank has all 5 parameters\n" in estimate(capsys, "--params", "5", "--world-size", 1)


def test_a_config_knows_its_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(estimate(capsys, "--config", CONFIG, "--world-size", 7, "--json"))
    assert (found["source"], found["largest_rank_is_exact"]) == ("config", True)
    even = found["parameters"] / found["world_size"]
    assert even < found["largest_rank_parameters"] < 1.002 * even
    # The embedding is larger than a block.
    block = found["largest_block_parameters"]
    assert block == 32000 * 2048 + 2048
    assert found["conventions"]["fsdp-mixed"]["transient_bytes"] == 4 * block
    out = estimate(capsys, "--config", CONFIG, "--world-size", 7)
    assert f"the largest of 7 ranks has {found['largest_rank_parameters']:,} parameters" in out
    assert "an even share is 14.29 %" in out and "block of 65.5 M" in out


def test_a_checkpoint_beside_its_estimates(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(estimate(capsys, "--checkpoint", run, "--bandwidth", "1MB/s", "--json"))
    measured = found["measured"]
    assert (found["source"], found["parameters"]) == ("checkpoint", 31)
    assert measured["path"] == str(run / "step-2")
    assert (measured["bytes_by_kind"]["weights"], measured["bytes_by_kind"]["moments"]) == (31 * 4 + 16, 31 * 8)
    assert (measured["bytes_per_parameter"], measured["has_optimizer_state"]) == (12, True)
    assert measured["matches"] == ["fp32-adam", "fsdp-mixed"]
    assert measured["weights_without_optimizer_state"] == ["model.seen"]
    assert measured["write_s"] == measured["disk_bytes"] / 1e6
    out = estimate(capsys, "--checkpoint", run / "step-2")
    assert "  moments     248 B              8  float32\n" in out
    assert "  as estimated for: fp32 Adam; FSDP mixed precision, fp32 shards\n" in out
    assert "  16 B in 1 other weight without optimizer state (tied, frozen or buffers): model.seen\n" in out


def test_no_torch_for_a_checkpoint(run: Path) -> None:
    code = "import sys; from reshard.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "estimate", "--checkpoint", str(run), "--world-size", "2"]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("text", "parameters"), [
    ("7000000000", 7 * 10**9), ("1.5b", 1_500_000_000), ("0.5K", 500), ("2.3M", 2_300_000), ("1T", 10**12), ("1", 1),
])  # fmt: skip
def test_numbers_of_parameters(text: str, parameters: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(estimate(capsys, "--params", text, "--json"))["parameters"] == parameters


@pytest.mark.parametrize(("text", "bytes_per_s"), [
    ("5GB/s", 5e9), ("5G", 5e9), ("1.5 GB/s", 1.5e9), ("2GiB/s", 2 * 2**30), ("800MB", 8e8), ("100", 100),
    ("1kB/s", 1e3),
])  # fmt: skip
def test_bandwidths(text: str, bytes_per_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(estimate(capsys, "--params", "1B", "--bandwidth", text, "--json"))
    assert found["bandwidth_bytes_per_s"] == bytes_per_s
    assert found["conventions"]["fp32-adam"]["checkpoint"]["write_s"] == pytest.approx(12e9 / bytes_per_s)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["estimate", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reshard: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("wrong", ["0", "0B", "-1", "seventy", "1.5", "1e9", "", "²", "1" * 30, "nan", "70 B"])
def test_what_is_no_number_of_parameters(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, f"--params={wrong}")
    assert "--params: not a number of parameters" in said and repr(wrong) in said and "write 70B" in said


@pytest.mark.parametrize("wrong", ["0", "-2", "two", "2.0", "", "1" * 5000])
def test_what_is_no_world_size(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--world-size: not a number of ranks" in refused(capsys, "--params", "7B", f"--world-size={wrong}")


@pytest.mark.parametrize("wrong", ["0", "0GB/s", "-1GB/s", "fast", "5GB/h", "", "5iB/s", "inf"])
def test_what_is_no_bandwidth(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--bandwidth: not a bandwidth" in refused(capsys, "--params", "7B", f"--bandwidth={wrong}")


def test_bits_are_not_taken_for_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "that is bits: divide by 8" in refused(capsys, "--params", "7B", "--bandwidth", "100Gb/s")


def test_one_source(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "found none" in refused(capsys)
    assert "found --params and --config" in refused(capsys, "--params", "7B", "--config", CONFIG)
    assert "found --params and --checkpoint" in refused(capsys, "--params", "7B", "--checkpoint", run)


def test_faults_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path / "none") in refused(capsys, "--checkpoint", tmp_path / "none")
    assert "No such file" in refused(capsys, "--config", tmp_path / "none.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 5}')
    said = refused(capsys, "--config", tmp_path)
    assert "hidden_size" in said and "num_attention_heads missing" in said and "--params" in said


def test_sizes_beyond_all_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(
        f"model: {{vocabulary: {10**12}, layers: {10**12}, width: {10**12}, heads: 1, hidden: {10**12}}}"
    )
    out = estimate(capsys, "--config", tmp_path / "run.yaml", "--world-size", 10**9, "--bandwidth", "1")
    assert "parameters" in out


def test_the_share_of_experts_is_told_for_both_ways_to_keep_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4,
    }))  # fmt: skip
    outside, attention, router, norms = 2 * 64 * 64, 4 * 64 * 64, 4 * 64, 2 * 64
    expert = 3 * 64 * 96
    # One row of each matrix and one whole expert in every layer.
    stacked = (outside + 3 * attention) // 64 + 3 * (64 + 2 + expert) + 1
    separate = (outside + 3 * attention) // 64 + 3 * (64 + 2 + 4 * (2 * 2 * 64 + 96)) + 1
    argv = ("--config", path, "--world-size", 64)
    found = json.loads(estimate(capsys, *argv, "--json"))
    assert found["parameters"] == outside + 3 * (attention + router + norms + 4 * expert) + 64
    assert found["largest_rank_parameters"] == separate
    assert found["largest_rank_is_exact"] is False
    assert f"  {stacked:,} where the experts of a layer are one tensor" in estimate(capsys, *argv)
    even = json.loads(estimate(capsys, "--config", path, "--world-size", 4, "--json"))
    assert even["largest_rank_is_exact"] is True
    assert "experts" not in estimate(capsys, "--config", path, "--world-size", 4)
