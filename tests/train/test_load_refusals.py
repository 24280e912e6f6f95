"""What does not fit, or is damaged, is refused in words that name it, and the live run stays as it was."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from lab import Setup, build, digest, until
from ranks import run_ranks
from small import Small, edit_manifest, fingerprint
from torch import nn

from reshard import ElasticSampler, ReshardError, load_state, save_state
from reshard.errors import CheckpointNotFound, CheckpointUnsound, StateMismatch, UsageError

STEP = 3


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Small()
    run.train(STEP)
    return save_state(tmp_path_factory.mktemp("pristine"), run.state)


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def refused(path: Path, run: Small, *named: str, kind: type[ReshardError] = ReshardError, **options: Any) -> str:
    """Asserts that the load is refused, names everything in the first line, and leaves the run as it was."""
    before = fingerprint(run)
    with pytest.raises(kind) as refusal:
        load_state(path, run.state, **options)
    assert fingerprint(run) == before
    first = str(refusal.value).splitlines()[0]
    assert not [name for name in named if name not in first], first
    return str(refusal.value)


def grown(run: Small, name: str = "extra_weight") -> Small:
    run.model.register_parameter(name, nn.Parameter(torch.ones(3)))
    return run


class TestTensors:
    def test_a_missing_one(self, path: Path) -> None:
        run = grown(Small())
        refused(path, run, str(path), "model.extra_weight", "not in the checkpoint", "allow_missing")
        report = load_state(path, run.state, allow_missing=["extra_weight"])
        assert run.model.extra_weight.tolist() == [1, 1, 1]
        assert "model.extra_weight" in report.line and "full state" not in report.line

    def test_an_unexpected_one(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        saved = save_state(tmp_path, grown(Small()).state)
        run = Small()
        refused(saved, run, "model.extra_weight", "not in the model", "allow_unexpected")
        load_state(saved, run.state, allow_unexpected=["extra_*"])
        assert any("extra_weight" in record.getMessage() for record in caplog.records)

    def test_a_misspelt_one_is_pointed_at(self, tmp_path: Path) -> None:
        saved = save_state(tmp_path, grown(Small(), "extra_wieght").state)
        refused(saved, grown(Small()), "model.extra_weight", "closest there: extra_wieght")

    def test_another_shape(self, path: Path) -> None:
        run = Small()
        run.model.seen = torch.zeros(3, dtype=torch.int64)
        refused(path, run, "model.seen", "expected shape (3,), found (2,)")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_lossy_cast(self, path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
        run = Small()
        run.model.to(dtype)
        refused(path, run, "model.0.weight", str(dtype), "found torch.float32", "lossy", "allow_cast")
        load_state(path, run.state, allow_cast=True)
        original = Small()
        load_state(path, original.state)
        assert torch.equal(run.model[0].weight, original.model[0].weight.to(dtype))
        told = [r.getMessage() for r in caplog.records if str(dtype) in r.getMessage()]
        assert sorted(text.split()[0] for text in told) == ["optimizer", "weights"], "once per pair"

    def test_a_lossless_cast_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        saver = Small()
        saver.model.to(torch.bfloat16)
        run = Small()
        load_state(save_state(tmp_path, saver.state), run.state)
        assert torch.equal(run.model[0].weight, saver.model[0].weight.float())
        assert any("torch.bfloat16 -> torch.float32" in record.getMessage() for record in caplog.records)

    @pytest.mark.parametrize(
        ("stored", "live"), [(torch.float32, torch.int64), (torch.int64, torch.float32), (torch.int64, torch.bool)]
    )
    def test_another_kind_of_number_is_refused_whatever_is_allowed(
        self, tmp_path: Path, stored: torch.dtype, live: torch.dtype
    ) -> None:
        saver, run = Small(), Small()
        saver.model.seen = torch.full((2,), 0.7).to(stored)
        run.model.seen = torch.zeros(2).to(live)
        path = save_state(tmp_path, saver.state)
        refused(path, run, "model.seen", f"expected {live}", f"found {stored}", allow_cast=True)

    def test_int_narrowing(self, path: Path) -> None:
        run = Small()
        run.model.seen = run.model.seen.to(torch.int32)
        refused(path, run, "model.seen", "lossy")

    def test_a_model_on_the_meta_device(self, path: Path) -> None:
        run = Small({"optimizer": None, "scheduler": None, "scaler": None, "data": None, "plan": None, "extra": {}})
        run.state.model = nn.Sequential(*(layer.to("meta") for layer in Small().model))
        with pytest.raises(StateMismatch, match=r"model.0.weight: on the meta device.*to_empty"):
            load_state(path, run.state, allow_unexpected=["*"])

    def test_all_faults_are_told_at_once(self, path: Path) -> None:
        run = grown(Small(global_batch=4))
        run.model.seen = torch.zeros(3, dtype=torch.int64)
        text = refused(path, run)
        assert all(each in text for each in ("global batch", "model.extra_weight", "model.seen"))


class TestManifest:
    def test_an_unknown_format(self, path: Path) -> None:
        edit_manifest(path, format=99)
        refused(path, Small(), str(path / "reshard.json"), "format", "99", "upgrade", kind=CheckpointUnsound)

    def test_missing_fields(self, path: Path) -> None:
        edit_manifest(path, schedulers=lambda _: None, lr=lambda _: None)
        refused(path, Small(), "reshard.json", "schedulers", "lr", "missing")

    @pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"format": 2, "format": 2}', b"\xff\xfe"])
    def test_damaged_json(self, path: Path, content: bytes) -> None:
        (path / "reshard.json").write_bytes(content)
        refused(path, Small(), str(path / "reshard.json"))

    def test_absent_names_the_parts_and_can_be_allowed(self, path: Path) -> None:
        (path / "reshard.json").unlink()
        run = Small()
        missing = ["scheduler", "scaler", "data", "batch", "step", "extra.ema", "extra.streams"]
        refused(path, run, "no reshard.json", *missing, kind=StateMismatch)
        report = load_state(path, run.state, allow_missing=missing)
        assert run.state.step == 0 and set(missing) <= set(report.missing)
        assert "NOT restored" in report.line and "scheduler" in report.line

    def test_of_another_step_than_the_folder(self, path: Path) -> None:
        edit_manifest(path, step=STEP + 1)
        refused(path, Small(), "step: expected 3", "found 4")

    def test_of_another_save_than_the_tensors(self, path: Path) -> None:
        edit_manifest(path, lr=[0.5, 0.5])
        refused(path, Small(), "learning rates", "[0.5, 0.5]", "use another step")

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("data", lambda _: {}),
            ("data", lambda _: {"ranks": 3}),
            ("data", lambda _: {"shared": {"!unknown": 1}}),
            ("batch", lambda batch: batch | {"global_batch": "8"}),
            ("batch", lambda batch: {}),
            ("scaler", lambda _: {"!tuple": 3}),
            ("extra", lambda extra: {"ema": extra["ema"]}),
            ("extra", lambda extra: extra | {"ema": {"weights": {"!stored": "extra.ema.gone"}, "updates": 1}}),
            ("schedulers", lambda _: {"scheduler": {"!dict": 5}}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_contents_that_make_no_sense(self, path: Path, field: str, change: Callable[[Any], Any]) -> None:
        edit_manifest(path, **{field: change})
        text = refused(path, Small())
        assert field.removesuffix("s") in text.splitlines()[0]
        assert "KeyError" not in text and "AttributeError" not in text


class TestFiles:
    def test_no_such_folder(self, tmp_path: Path) -> None:
        refused(tmp_path / "none", Small(), str(tmp_path / "none"), "no such folder", kind=CheckpointNotFound)

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        refused(tmp_path, Small(), str(tmp_path), "no committed checkpoint", kind=CheckpointNotFound)

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        refused(tmp_path / "file", Small(), "not a folder")

    def test_only_an_uncommitted_step(self, path: Path) -> None:
        path.rename(path.with_name(".staging-step-3-abc"))
        refused(path.parent, Small(), "no committed checkpoint", kind=CheckpointNotFound)

    def test_no_metadata(self, path: Path) -> None:
        (path / ".metadata").unlink()
        refused(path, Small(), str(path), ".metadata", kind=CheckpointUnsound)

    @pytest.mark.parametrize("keep", [0, 10, -20])
    def test_damaged_metadata(self, path: Path, keep: int) -> None:
        content = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(content[:keep])
        refused(path, Small(), str(path / ".metadata"))

    def test_truncated_tensors(self, path: Path) -> None:
        (file,) = path.glob("*.distcp")
        os.truncate(file, file.stat().st_size // 2)
        refused(path, Small(), file.name, kind=CheckpointUnsound)

    def test_lost_tensors(self, path: Path) -> None:
        (file,) = path.glob("*.distcp")
        file.unlink()
        refused(path, Small(), file.name)

    def test_an_object_of_zeros_is_called_damaged(self, path: Path) -> None:
        (file,) = path.glob("*.distcp")
        file.write_bytes(bytes(file.stat().st_size))
        text = refused(path, Small(), str(path), "optim.param_groups.0.amsgrad", "damaged", kind=CheckpointUnsound)
        assert "not run" not in text

    def test_a_tensor_of_zeros_is_named_before_anything_is_touched(self, path: Path) -> None:
        file, place = place_of(path, "model.0.weight")
        with file.open("r+b") as opened:
            opened.seek(place.offset)
            opened.write(bytes(place.length))
        run = Small()
        before = copy.deepcopy(run.model.state_dict())
        with pytest.raises(CheckpointUnsound) as refusal:
            load_state(path, run.state)
        (first,) = str(refusal.value).splitlines()
        assert str(file) in first and "model.0.weight" in first and "not the archive of one tensor" in first
        assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())

    def test_a_flipped_byte_is_named_and_the_run_said_to_be_undefined(self, path: Path) -> None:
        file, place = place_of(path, "model.0.weight")
        with file.open("r+b") as opened:
            # The middle of the archive is the middle of its elements or of the padding before them.
            opened.seek(place.offset + place.length // 2)
            content = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([content[0] ^ 1]))
        with pytest.raises(CheckpointUnsound) as refusal:
            load_state(path, Small().state)
        first, *others = str(refusal.value).splitlines()
        assert str(file) in first and "model.0.weight" in first and "checksum" in first
        assert any("undefined" in line for line in others)


def place_of(path: Path, key: str) -> tuple[Path, Any]:
    """The file and the place in it of a tensor that is stored as one chunk."""
    metadata = stock.FileSystemReader(path).read_metadata()
    (place,) = [entry for index, entry in metadata.storage_data.items() if index.fqn == key]
    return path / place.relative_path, place


class Bomb:
    """A pickle that writes a file when it is read by plain means."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


class TestPickles:
    def test_an_object_in_the_tensors_file_is_not_run(self, tmp_path: Path) -> None:
        run = Small()
        bomb = Bomb(tmp_path / "ran")
        groups = [{"lr": bomb, "params": ["0.weight"]}]
        tree = {"model": run.model.state_dict(), "optim": {"state": {}, "param_groups": groups}}
        stock.save(tree, checkpoint_id=tmp_path / "stock", no_dist=True)
        refused(tmp_path / "stock", run, "optim.param_groups.0.lr", "not run", allow_missing=["*"])
        assert not (tmp_path / "ran").exists()

    def test_a_metadata_file_is_not_run(self, path: Path, tmp_path: Path) -> None:
        (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
        refused(path, Small(), ".metadata", "mkdir", "not run")
        assert not (tmp_path / "ran").exists()


class TestParts:
    def test_another_global_batch(self, path: Path) -> None:
        refused(path, Small(global_batch=4), "global batch", "expected 8", "found 4", "allow_global_batch_change")
        run = Small(global_batch=4)
        report = load_state(path, run.state, allow_global_batch_change=True)
        assert any("0.5" in warning for warning in report.warnings)

    def test_another_grouping(self, path: Path) -> None:
        run = Small()
        run.state.optimizer = run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.05)
        run.state.scheduler = run.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=16)
        text = refused(path, run, "optim.param_groups", "2 groups", "1 group", "param_groups='target'")
        assert "0.weight: with the run's groups weight_decay 0.1 -> 0.01" in text

    def test_other_optimizer_names(self, path: Path) -> None:
        run = Small()
        run.state.optimizer = {"main": run.optimizer}
        refused(path, run, "optimizers", "expected optimizer", "found main")

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
    def test_another_kind_of_optimizer(self, path: Path, kind: Any) -> None:
        run = Small()
        groups = [{k: g[k] for k in ("params", "weight_decay")} for g in run.optimizer.param_groups]
        run.state.optimizer = run.optimizer = kind(groups, lr=0.05)
        run.state.scheduler = run.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=16)
        refused(path, run, "another kind of optimizer", "betas")

    def test_another_scheduler_name(self, path: Path) -> None:
        run = Small()
        run.state.scheduler = {"cosine": run.scheduler}
        refused(path, run, "scheduler", "expected schedulers named scheduler", "found cosine")

    def test_another_kind_of_schedule(self, path: Path) -> None:
        run = Small()
        run.state.scheduler = run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 4)
        refused(path, run, "scheduler.scheduler", "T_max", "found StepLR with gamma, step_size")

    def test_another_data_set(self, path: Path) -> None:
        run = Small()
        run.state.data = run.sampler = ElasticSampler(39, run.plan, seed=5)
        refused(path, run, "data.length", "expected 40, found 39", "data='restart'")
        report = load_state(path, run.state, data="restart")
        assert run.sampler.offset == 0 and "data" in report.missing and "data" in report.line
        assert any("24 samples" in warning for warning in report.warnings)

    def test_a_part_that_refuses_its_state_late_leaves_the_others_as_they_were(self, path: Path) -> None:
        class Stubborn:
            def state_dict(self) -> dict[str, Any]:
                return {"seed": 9, "step": 0}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                raise RuntimeError("wrong shape of me")

        run = Small()
        run.state.extra = {"ema": run.average, "streams": Stubborn()}
        before = fingerprint(run)
        with pytest.raises(
            ReshardError, match=r"extra.streams: Stubborn.load_state_dict refused.*wrong shape"
        ) as error:
            load_state(path, run.state)
        after = fingerprint(run)
        assert "undefined now: extra.ema" in str(error.value)
        del before["ema"], after["ema"]
        assert after == before

    def test_random_states_that_are_not_there(self, path: Path) -> None:
        edit_manifest(path, rng={"ranks": 2})
        refused(path, Small(), "rng", "of 2 ranks", "those of rank 0")


class TestUsage:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"allow_missing": "optimizer"}, ["allow_missing", "a list of names"]),
            ({"allow_unexpected": "*"}, ["allow_unexpected"]),
            ({"param_groups": "targets"}, ["param_groups", "'checkpoint' or 'target'", "targets"]),
            ({"data": "restrat"}, ["data", "'restore' or 'restart'"]),
            ({"lr_scaling": "cubic", "allow_global_batch_change": True}, ["lr_scaling", "cubic"]),
            ({"lr_scaling": "linear"}, ["lr_scaling", "allow_global_batch_change"]),
            ({"lr": [0.1]}, ["lr", "expected 2, found 1"]),
            ({"lr": float("nan")}, ["lr", "nan"]),
            ({"lr": -1.0}, ["lr", "-1"]),
        ],
    )
    def test_options_that_make_no_sense(self, path: Path, options: dict[str, Any], named: list[str]) -> None:
        refused(path, Small(), *named, kind=UsageError, **options)

    def test_a_learning_rate_for_an_optimizer_that_is_not_restored(self, tmp_path: Path) -> None:
        saved = save_state(tmp_path, Small({"optimizer": None, "scheduler": None}).state)
        options = {"allow_missing": ["optimizer", "scheduler"], "lr": 0.1}
        refused(saved, Small(), "lr", "not restored", kind=UsageError, **options)


def refusals_on_ranks(folder: str) -> list[tuple[str, bool]]:
    """On each rank: every error and whether the run is untouched."""
    outcomes = []
    for change in (widen, other_batch, lambda run: None):
        run = build(Setup())
        change(run)
        before = digest(run), json.dumps(run.state.scheduler.state_dict()), torch.get_rng_state().tolist()
        path = Path(folder) / ("step-1" if change in (widen, other_batch) else "broken")
        try:
            load_state(path, run.state)
        except ReshardError as fault:
            after = digest(run), json.dumps(run.state.scheduler.state_dict()), torch.get_rng_state().tolist()
            outcomes.append((str(fault), before == after))
    return outcomes


def widen(run: Any) -> None:
    run.model.register_buffer("surplus", torch.zeros(2))


def other_batch(run: Any) -> None:
    from reshard import BatchPlan

    run.state.plan = BatchPlan(16, 1, 2)


def test_every_rank_raises_the_same_and_none_hangs(tmp_path: Path) -> None:
    run_ranks(2, until, Setup(), str(tmp_path), 1)
    broken = Path(shutil.copytree(tmp_path / "step-1", tmp_path / "broken"))
    last = sorted(broken.glob("*.distcp"))[-1]
    os.truncate(last, last.stat().st_size - 100)
    mine, theirs = run_ranks(2, refusals_on_ranks, str(tmp_path))
    assert mine == theirs and len(mine) == 3
    assert all(untouched for _, untouched in mine)
    missing, batch, file = (text.splitlines()[0] for text, _ in mine)
    assert "model.surplus" in missing and "global batch: expected 12" in batch and last.name in file
