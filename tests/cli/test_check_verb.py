"""`reshard check`: exit codes, text, JSON; and that it needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sharded import training_state, write_sharded

from reshard.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "step-40", training_state(), 4, {"extra.note": 1})


def test_sound_is_exit_0(saved: Path, capsys: Capture) -> None:
    length = f"{sum(path.stat().st_size for path in saved.glob('*.distcp')) / 1000:.3g} kB"
    assert main(["check", str(saved)]) == 0
    out, err = capsys.readouterr()
    assert out == f"sound: 32 tensors, 59 chunks in 4 files, {length}\n"
    assert err == ""
    assert main(["check", str(saved), "--deep"]) == 0
    assert capsys.readouterr().out == (
        f"sound: 32 tensors, 59 chunks in 4 files, {length}, checksums of 419 records verified\n"
    )


def test_unsound_is_exit_1_and_names_file_rank_expected_and_found(saved: Path, capsys: Capture) -> None:
    path = saved / "__2_0.distcp"
    length_bytes = path.stat().st_size
    os.truncate(path, 100)
    assert main(["check", str(saved)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: rank 2: cut short: expected at least {length_bytes} bytes, found 100; lost: ")
    assert last.startswith(f"unsound: 1 fault in {saved}: 32 tensors, ")


def test_text_is_limited_and_json_is_not(tmp_path: Path, capsys: Capture) -> None:
    state = {f"model.w{number}": torch.tensor([float("nan")]) for number in range(60)}
    folder = str(write_sharded(tmp_path / "x", state, 1))
    assert main(["check", folder, "--deep"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 52
    assert lines[50] == "... and 10 more; --json lists them all"
    assert main(["check", folder, "--deep", "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert (fields["sound"], len(fields["faults"]), fields["tensors"]) == (False, 60, 60)
    assert fields["faults"][0] == {
        "what": "NaN in its weights",
        "file": f"{folder}/__0_0.distcp",
        "key": "model.w0",
        "rank": 0,
        "expected": "finite elements",
        "found": "1 of 1 elements, the first at (0,)",
        "hint": None,
    }


def test_notes_leave_it_sound(saved: Path, capsys: Capture) -> None:
    (saved / "__9_0.distcp").write_bytes(bytes(10))
    assert main(["check", str(saved)]) == 0
    note, _ = capsys.readouterr().out.splitlines()
    assert note == f"note: {saved}/__9_0.distcp: 10 bytes that nothing refers to, left by an earlier save"


def test_folders_are_combined(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    others = [tmp_path / "node-1", tmp_path / "node-2"]
    for rank, other in enumerate(others, start=1):
        other.mkdir()
        (saved / f"__{rank}_0.distcp").rename(other / f"__{rank}_0.distcp")
    assert main(["check", str(saved)]) == 1
    assert "name the folders of the others with --in" in capsys.readouterr().out
    assert main(["check", str(saved), "--in", str(others[0]), "--in", str(others[1]), "--deep"]) == 0


def test_a_run_folder_is_its_newest_step(saved: Path, capsys: Capture) -> None:
    write_sharded(saved.parent / "step-8", {"model.w": torch.full((3,), float("nan"))}, 1)
    assert main(["check", str(saved.parent), "--deep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(saved)


def test_faults_of_usage_are_exit_2(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["check", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert main(["check", str(saved), "--in", str(tmp_path / "none")]) == 2
    assert "--in: not a folder" in capsys.readouterr().err


def test_metadata_that_would_run_code_is_not_run(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    touched = tmp_path / "touched"
    (saved / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch " + str(touched).encode() + b"'\ntR.")
    assert main(["check", str(saved)]) == 1
    assert "posix.system, which is not on the allow-list" in capsys.readouterr().out
    assert not touched.exists()


def test_torch_is_not_needed(saved: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; "
        f"sys.exit(main(['check', {str(saved)!r}, '--deep']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("sound: ")
