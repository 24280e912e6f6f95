from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue.deepspeed.zero import is_deepspeed, open_deepspeed, tag_folder
from reshard.formats.rescue.hints import Hints

MODEL = "mp_rank_00_model_states.pt"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


def optimizer(rank: int, prefix: str = "zero") -> str:
    return f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def stage_3_model(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def write(folder: Path, *names: str, partition_count: int = 1) -> Path:
    """Files as far as it takes to find out that they are not those of one save."""
    folder.mkdir(exist_ok=True)
    masters = [torch.ones(2)]
    states = {
        "partition_count": [partition_count],
        "single_partition_of_fp32_groups": masters,
        "base_optimizer_state": {"state": {}, "param_groups": [{"params": [0]}]},
    }
    for name in names:
        is_optimizer = name.endswith("optim_states.pt")
        torch.save({"optimizer_state_dict": states} if is_optimizer else {"module": {}}, folder / name)
    return folder


def fault_of(folder: Path) -> CheckpointUnsound:
    with pytest.raises(CheckpointUnsound) as caught:
        open_deepspeed(folder, Hints())
    return caught.value


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (MODEL, True),
        (stage_3_model(3), True),
        (optimizer(12), True),
        (optimizer(0, "bf16_zero"), True),
        (optimizer(0, "fp16_zero"), True),
        ("mp_rank_00", False),
        ("model_optim_rng.pt", False),
        ("zero_to_fp32.py", False),
        ("model_world_size_2_rank_0.pt", False),
        (MODEL + ".tmp", False),
    ],
)
def test_names(name: str, is_one: bool) -> None:
    assert is_deepspeed(["other", name]) == is_one


def test_more_files_than_ranks_recorded(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", MODEL, *map(optimizer, range(4)), partition_count=2)
    os.utime(folder / optimizer(3), (86_400, 86_400))
    fault = fault_of(folder)
    assert fault.expected == f"those of 2 ranks, as {optimizer(0)} records"
    assert "4 *_optim_states.pt" in str(fault.found)
    assert f"{optimizer(2)}, {optimizer(3)} of more ranks than there were" in str(fault).splitlines()[0]
    assert f"{optimizer(3)}: written 1970-01-02T00:00:00+00:00" in fault.details
    assert len(fault.details) == 5


def test_fewer_files_than_ranks_recorded(tmp_path: Path) -> None:
    fault = fault_of(write(tmp_path / "x", MODEL, *map(optimizer, range(3)), partition_count=4))
    assert "3 *_optim_states.pt: *_optim_states.pt: none of ranks 3" in str(fault).splitlines()[0]


def test_a_model_file_of_stage_3_too_few(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", stage_3_model(0), stage_3_model(1))
    states = {"partition_count": 3, "fp32_flat_groups": [torch.ones(2)]}
    states["optimizer_state_dict"] = {"state": {}, "param_groups": [{"params": [0]}]}
    for rank in range(3):
        torch.save({"optimizer_state_dict": states}, folder / optimizer(rank))
    assert "zero_*_model_states.pt: none of ranks 2" in str(fault_of(folder))


def test_models_of_two_stages(tmp_path: Path) -> None:
    fault = fault_of(write(tmp_path / "x", MODEL, stage_3_model(0), optimizer(0)))
    assert f"{stage_3_model(0)}: a file of another stage" in str(fault).splitlines()[0]


def test_all_that_is_missing_or_empty_is_listed_before_anything_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", MODEL)
    for rank, content in {0: b"not read", 1: b"", 4: LFS}.items():
        (folder / optimizer(rank)).write_bytes(content)
    lines = str(fault_of(folder)).splitlines()
    assert "expected those of ranks 0 to 4, found *_optim_states.pt: none of ranks 2, 3" in lines[0]
    assert lines[1] == f"  {optimizer(1)}: empty (0 bytes)"
    assert lines[2].startswith(f"  {optimizer(4)}: a Git LFS pointer")


def test_no_model(tmp_path: Path) -> None:
    assert "*_model_states.pt: none" in str(fault_of(write(tmp_path / "x", optimizer(0))))


def test_prefixes_of_two_precisions(tmp_path: Path) -> None:
    fault = fault_of(write(tmp_path / "x", MODEL, optimizer(0), optimizer(1), optimizer(0, "bf16_zero")))
    assert (
        "files of several saves: expected *_optim_states.pt of one precision, found 1 bf16_zero_* and 2 zero_*"
        in str(fault)
    )
    assert len(fault.details) == 3


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("expert_3_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "experts"),
        ("layer_01-model_00-model_states.pt", "pipeline stages"),
        ("mp_rank_01_model_states.pt", "model-parallel ranks"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "model-parallel ranks"),
        ("mp_rank_00_001_model_states.pt", "model-parallel ranks"),
    ],
)
def test_cuts_that_are_not_read(tmp_path: Path, name: str, what: str) -> None:
    folder = write(tmp_path / "x", MODEL, optimizer(0), name)
    with pytest.raises(UsageError, match=rf"{what}.*, which are not read: found {name}; join them"):
        open_deepspeed(folder, Hints())


@pytest.mark.parametrize("damaged", [MODEL, optimizer(0), optimizer(1)])
def test_damaged_files(tmp_path: Path, damaged: str) -> None:
    folder = write(tmp_path / "x", MODEL, optimizer(0), optimizer(1), partition_count=2)
    content = (folder / damaged).read_bytes()
    for part in (content[: len(content) // 2], b"\0" * len(content), b"text"):
        (folder / damaged).write_bytes(part)
        assert fault_of(folder).path == str(folder / damaged)


@pytest.mark.parametrize("root", [[], 3, {"model": {}}, {"optimizer_state_dict": []}])
def test_files_of_another_content(tmp_path: Path, root: object) -> None:
    folder = write(tmp_path / "x", MODEL)
    torch.save(root, folder / optimizer(0))
    assert fault_of(folder).what == "not what DeepSpeed writes"


def test_latest_is_followed(tmp_path: Path) -> None:
    for tag in ("global_step9", "global_step10"):
        write(tmp_path / tag, MODEL)
    assert tag_folder(tmp_path) is None
    (tmp_path / "latest").write_text("global_step9\n")
    assert tag_folder(tmp_path) == tmp_path / "global_step9"


def test_the_only_tag_needs_no_latest(tmp_path: Path) -> None:
    assert tag_folder(tmp_path) is None
    (tmp_path / "other").mkdir()
    write(tmp_path / "last", MODEL)
    assert tag_folder(tmp_path) == tmp_path / "last"


@pytest.mark.parametrize("tag", ["global_step11", "other", "", "..", "../x/global_step9", "latest"])
def test_latest_names_what_is_not_there(tmp_path: Path, tag: str) -> None:
    run = tmp_path / "x"
    run.mkdir()
    for step in (9, 10):
        write(run / f"global_step{step}", MODEL)
    (run / "other").mkdir()
    (run / "latest").write_text(tag)
    with pytest.raises(CheckpointUnsound, match=r"latest: names a checkpoint .* found global_step9, global_step10"):
        tag_folder(run)
