"""The training script's settings: what a user writes, and what they are told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings import read_settings

CONFIGS = Path(__file__).parent.parent.parent / "scripts" / "configs"
TINY = str(CONFIGS / "tiny.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_are_read(path: Path) -> None:
    settings = read_settings(str(path), [])
    assert settings.train.steps >= 1
    assert settings.batch.global_batch >= 1


def test_changes_by_full_and_by_short_key() -> None:
    settings = read_settings(TINY, ["train.steps=7", "lr=1e-3", "exact=false", "micro_batch=auto", "trace=x.jsonl"])
    assert settings.train.steps == 7
    assert settings.optimizer.lr == 1e-3
    assert settings.train.exact is False
    assert settings.batch.micro_batch == "auto"
    assert settings.trace == "x.jsonl"
    assert read_settings(TINY, ["resume=40"]).checkpoint.resume == 40


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.stepps=7", "unknown stepps; known are steps,"),
        ("stepps=7", "no section has it"),
        ("steps", "expected key=value"),
        ("steps=many", "train: steps: expected int, found 'many'"),
        ("steps=1.5", "expected int, found 1.5"),
        ("exact=1", "expected bool, found 1"),
        ("precision=fp8", "expected fp32, bf16 or fp16, found 'fp8'"),
        ("betas=0.9", "expected a list of numbers, found 0.9"),
        ("betas=[0.9]", "expected two numbers, found [0.9]"),
        ("micro_batch=most", "expected a number or auto, found 'most'"),
        ("clip_norm=-1", "must be above 0"),
        ("lr=nan", "expected a number of at least 0"),
        ("seed=99999999999999999999", "expected 0 to 2^63 - 1"),
        ("model=3", "expected keys and values, found 3"),
        ("train=3", "expected keys and values, found 3"),
    ],
)
def test_a_wrong_change_is_named(change: str, told: str) -> None:
    with pytest.raises(SystemExit) as stop:
        read_settings(TINY, [change])
    assert told in str(stop.value)


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("model: {}\ndata: {}\ntrace: t.jsonl\n")
    with pytest.raises(SystemExit, match="batch, checkpoint, optimizer, schedule, train missing"):
        read_settings(str(path), [])
