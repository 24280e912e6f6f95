from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import CheckpointUnsound, ReshardError, UsageError
from reshard.formats import manifest
from reshard.formats.manifest import FILE_NAME, Manifest, World

MANIFEST = Manifest(
    step=4000,
    attempt="job-17.2",
    world=World(ranks=8, nodes=2, gpus_per_node=4, mesh={"dp_replicate": 2, "dp_shard": 4}),
    parts={"model": "saved", "optimizer": "saved", "scaler": "none", "extra.ema": "saved"},
    lr=[1e-4, 0.0],
    batch={"global_batch": 256, "micro_batch": 8},
    data={"epoch": 1, "samples": 1_024_000},
    schedulers={"main": {"last_epoch": 4000, "betas": {"!tuple": [0.9, 0.95]}}},
    scaler=None,
    rng={"python": {"!tuple": [3, None]}},
    extra={"tokens": 2**70, "note": "å"},
    optimizers={"main": {"param_groups": [{"foreach": None}]}},
    versions={"torch": "2.13.0", "reshard": "0.1.0"},
    saved_at="2026-03-01T12:00:00+00:00",
)


def write(folder: Path, content: bytes | dict[str, Any]) -> Path:
    if isinstance(content, dict):
        content = json.dumps(content).encode()
    (folder / FILE_NAME).write_bytes(content)
    return folder


def fields(**changes: Any) -> dict[str, Any]:
    return {**json.loads(manifest.to_bytes(MANIFEST)), **changes}


def test_round_trip(tmp_path: Path) -> None:
    assert not manifest.exists(tmp_path)
    write(tmp_path, manifest.to_bytes(MANIFEST))
    assert manifest.exists(tmp_path)
    assert manifest.read(tmp_path) == MANIFEST


def test_the_fingerprints_of_files_may_be_there(tmp_path: Path) -> None:
    assert b'"files"' not in manifest.to_bytes(MANIFEST)
    files = {"__0_0.distcp": {"bytes": 10, "records": "00ff12ab"}}
    with_files = dataclasses.replace(MANIFEST, files=files)
    assert manifest.read(write(tmp_path, manifest.to_bytes(with_files))) == with_files


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {"a": {"bytes": 1}},
        {"a": {"bytes": -1, "records": "00ff12ab"}},
        {"a": {"bytes": 1, "records": "00FF12AB"}},
        {"a": {"bytes": 1, "records": "00ff12abc"}},
        {"a": "00ff12ab"},
    ],
)
def test_fingerprints_that_are_none(tmp_path: Path, files: Any) -> None:
    with pytest.raises(CheckpointUnsound, match=r"files: a field of the wrong type: expected .* found"):
        manifest.read(write(tmp_path, fields(files=files)))


def test_the_file_is_text_that_a_person_can_read() -> None:
    text = manifest.to_bytes(MANIFEST).decode("ascii")
    assert text.startswith('{\n "format": 2,\n "step": 4000,\n "attempt": "job-17.2",\n "world": {\n  "ranks": 8,')
    assert text.endswith("}\n")


@pytest.mark.parametrize("value", [math.nan, math.inf, b"bytes", {1, 2}, {1: 2}, (1, 2)], ids=repr)
def test_what_json_would_change_is_refused_when_written(value: Any) -> None:
    with pytest.raises(UsageError, match=r"extra: not plain JSON.*tagged\.encode"):
        manifest.to_bytes(dataclasses.replace(MANIFEST, extra={"x": value}))


def test_fields_that_this_version_does_not_know_are_ignored(tmp_path: Path) -> None:
    content = fields(later=[1], world={**fields()["world"], "racks": 2})
    assert manifest.read(write(tmp_path, content)) == MANIFEST


def test_a_missing_manifest_says_what_to_do(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointUnsound, match=r"reshard\.json: missing; .*stock dcp\.save.*resume from"):
            manifest.read(folder)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (3, r"unknown format: expected 2, found 3; it was written by a newer reshard: upgrade"),
        (1, r"expected 2, found 1; it is not a manifest of reshard"),
        ("2", r"found '2'"),
        (2.0, r"found 2\.0"),
        (True, r"found True"),
        (None, r"format: missing"),
    ],
)
def test_unknown_formats(tmp_path: Path, number: Any, reason: str) -> None:
    with pytest.raises(CheckpointUnsound, match=reason):
        manifest.read(write(tmp_path, fields(format=number)))


def test_the_format_is_judged_before_the_fields(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnsound, match="newer reshard"):
        manifest.read(write(tmp_path, {"format": 99}))


def test_all_missing_fields_are_named(tmp_path: Path) -> None:
    content = fields()
    del content["lr"], content["scaler"], content["world"]["nodes"]
    with pytest.raises(CheckpointUnsound, match=r"lr, scaler, world\.nodes: fields are missing"):
        manifest.read(write(tmp_path, content))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"step": "4000"}, "step"),
        ({"step": True}, "step"),
        ({"step": -1}, "step"),
        ({"attempt": None}, "attempt"),
        ({"world": []}, "world"),
        ({"world": {**fields()["world"], "mesh": {"dp": "8"}}}, "world.mesh"),
        ({"world": {**fields()["world"], "ranks": 8.0}}, "world.ranks"),
        ({"parts": {"model": "perhaps"}}, "parts"),
        ({"parts": {"model": ["saved"]}}, "parts"),
        ({"lr": 0.1}, "lr"),
        ({"lr": ["0.1"]}, "lr"),
        ({"lr": [10**400]}, "lr"),
        ({"lr": [True]}, "lr"),
        ({"batch": [1]}, "batch"),
        ({"schedulers": None}, "schedulers"),
        ({"extra": "x"}, "extra"),
        ({"optimizers": []}, "optimizers"),
        ({"versions": {"torch": 2}}, "versions"),
        ({"saved_at": 0}, "saved_at"),
    ],
)
def test_wrong_types_are_named(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointUnsound, match=r"expected .*found") as caught:
        manifest.read(write(tmp_path, fields(**changes)))
    assert caught.value.key == key


def test_a_number_too_large_for_a_float_is_none(tmp_path: Path) -> None:
    content = manifest.to_bytes(MANIFEST).replace(b"0.0001", b"1e999")
    with pytest.raises(CheckpointUnsound, match="lr: a field of the wrong type"):
        manifest.read(write(tmp_path, content))


def test_every_wrong_field_is_listed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnsound) as caught:
        manifest.read(write(tmp_path, fields(step=None, lr=None, versions=None)))
    assert caught.value.key == "step"
    assert [detail.split(":")[0] for detail in caught.value.details] == ["lr", "versions"]


def test_whole_numbers_are_learning_rates(tmp_path: Path) -> None:
    (rate,) = manifest.read(write(tmp_path, fields(lr=[1]))).lr
    assert type(rate) is float


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 10_000, "not valid JSON"),
        (b"[1, 2]", "expected an object, found a list of 2"),
        (b"null", "expected an object, found null"),
        (b'{"format": 2, "step": 1, "step": 2}', "duplicate key 'step'"),
        (b'{"format": 2, "data": {"a": 1, "a": 1}}', "duplicate key 'a'"),
        (b'{"format": 2, "lr": [NaN]}', "NaN is not JSON"),
    ],
)
def test_what_is_not_a_manifest(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(CheckpointUnsound, match=reason):
        manifest.read(write(tmp_path, content))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / FILE_NAME).open("wb") as file:
        file.truncate(manifest.MAX_BYTES + 1)
    with pytest.raises(CheckpointUnsound, match=f"too large: .*found {manifest.MAX_BYTES + 1}"):
        manifest.read(tmp_path)


def test_flipped_bytes_raise_only_our_errors(tmp_path: Path) -> None:
    chance = random.Random(0)
    original = manifest.to_bytes(MANIFEST)
    for _ in range(500):
        content = bytearray(original)
        content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            manifest.read(write(tmp_path, bytes(content)))
        except ReshardError as error:
            assert FILE_NAME in str(error)


def test_every_truncation_is_unsound(tmp_path: Path) -> None:
    content = manifest.to_bytes(MANIFEST)
    for length in range(len(content) - 2):
        with pytest.raises(CheckpointUnsound):
            manifest.read(write(tmp_path, content[:length]))
