"""`reshard batch`, as people and as scripts call it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from reshard.cli.main import main


def batch(*argv: str) -> int:
    return main(["batch", *argv])


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--global-batch", "64", "--micro-batch", "4", "--world-size", "6", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "global_batch": 64,
        "micro_batch": 4,
        "world_size": 6,
        "slots": 16,
        "accumulation": 3,
        "idle_slots": 2,
        "idle_share": 2 / 18,
        "free_world_sizes": [1, 2, 4, 8, 16],
        "free_micro_batches": [],
    }


def test_text_says_what_idles_and_what_would_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--global-batch", "64", "--micro-batch", "4", "--world-size", "32") == 0
    out, err = capsys.readouterr()
    assert "on 32 ranks: gradient accumulation 1, idle slots 16" in out
    assert "micro-batches that cost nothing on 32 ranks: 1, 2" in out
    assert err == "reshard: warning: a world size of 32 wastes 50 % of every step's compute\n"


def test_a_batch_that_comes_out_even_needs_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--global-batch", "256", "--micro-batch", "8", "--world-size", "8") == 0
    out, err = capsys.readouterr()
    assert "gradient accumulation 4, idle slots 0" in out
    assert "cost nothing" not in out
    assert err == ""


def test_a_small_idle_share_is_advice_and_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--global-batch", "256", "--micro-batch", "8", "--world-size", "11") == 0
    out, err = capsys.readouterr()
    assert "1 of 33 slot places idle: 3.03 %" in out
    assert err == ""


def test_b66_the_assumption_about_the_loss_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    batch("--global-batch", "64", "--micro-batch", "4", "--world-size", "8")
    assert "mean over the whole global batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "micro_batch"), [(["--max-micro-batch", "16"], 8), (["--max-micro-batch", "4"], 4), ([], 8)]
)
def test_auto(capsys: pytest.CaptureFixture[str], extra: list[str], micro_batch: int) -> None:
    assert batch("--global-batch", "64", "--micro-batch", "auto", "--world-size", "8", *extra, "--json") == 0
    assert json.loads(capsys.readouterr().out)["micro_batch"] == micro_batch


def test_an_uneven_micro_batch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--global-batch", "250", "--micro-batch", "8", "--world-size", "6", "--json") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "a global batch of 248 or 256, or a micro-batch of 5 or 10" in err


def test_a_maximum_without_auto_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--global-batch", "64", "--micro-batch", "8", "--world-size", "8", "--max-micro-batch", "9") == 2
    assert "--max-micro-batch" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-8", "eight", "8.0", "²", ""])
@pytest.mark.parametrize("option", ["--global-batch", "--micro-batch", "--world-size", "--max-micro-batch"])
def test_numbers_below_one_or_none_at_all_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, wrong: str
) -> None:
    options = {"--global-batch": "64", "--micro-batch": "auto", "--world-size": "8", "--max-micro-batch": "8"}
    options[option] = wrong
    assert batch(*(f"{name}={value}" for name, value in options.items())) == 2
    assert f"argument {option}: must be a whole number above zero" in capsys.readouterr().err


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "reshard", "batch", "--global-batch", "256", "--micro-batch", "8"]
    done = subprocess.run(
        [*command, "--world-size", "6", "--json"], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["accumulation"] == 6
