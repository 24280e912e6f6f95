"""`reshard prove` on somebody's training command: real processes, real kills, and everything that can be wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reshard.cli.main import main

STRANGER = str(Path(__file__).parent.parent / "data" / "stranger.py")


def prove(folder: Path, *options: str, flaw: str = "", ranks: str = "1:1", kill_at: str = "7", steps: int = 16) -> int:
    return main(
        [
            *(
                "prove",
                "--ranks",
                ranks,
                "--kill-at",
                kill_at,
                "--steps",
                str(steps),
                "--folder",
                str(folder / "proof"),
            ),
            *(*options, "--", sys.executable, STRANGER, *([flaw] if flaw else [])),
        ]
    )


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_a_run_that_resumes_is_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--json", ranks="1:1:1", kill_at="7,12") == 0
    found = as_json(capsys)
    first, second, third = found["legs"]
    assert (found["holds"], found["exact"], found["epsilon"], found["common_steps"]) == (True, False, 1e-3, 16)
    assert (found["largest_loss_difference"], found["first_differing_step"]) == (0.0, None)
    assert (first["resumed_at"], second["resumed_at"], third["resumed_at"]) == (0, 5, 10)
    assert 7 <= first["killed_at"] < 16 and 12 <= second["killed_at"] < 16 and third["killed_at"] is None
    assert third["last"] == 16
    assert Path(found["plot"]).stat().st_size > 10_000
    # The kill was real: of the run that was killed the trace has lines that were withdrawn.
    lines = (tmp_path / "proof" / "resumed" / "trace.jsonl").read_text().splitlines()
    assert len(lines) > 16


def test_the_report_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("1 rank, SIGKILL after step ")
    assert lines[1] == "1 rank, resumed at step 5, to the end, step 16"
    assert [line.split()[0] for line in lines[4:12]] == ["1", "...", "5", "6", "...", "16", "largest", "the"]
    assert lines[-1] == "proved: killed and resumed, no loss differs by more than 0.001"
    assert err.splitlines()[0] == "reference: 1 rank, to the end, step 16"


@pytest.mark.parametrize(
    ("flaw", "told", "has_all_steps"),
    [
        (
            "forgets",
            "started from scratch: nothing was committed before the kill; save more often (--interval N)",
            True,
        ),
        ("skips", "resumed at step 6, and the newest committed step was 5", True),
        ("is early", "had nothing left to do: the kill came when the run was over already, or it was ignored", False),
        ("fails", "failed with exit status 1 before its first step: Error: the moments are gone", False),
    ],
)
def test_what_is_wrong_with_a_resume_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flaw: str, told: str, has_all_steps: bool
) -> None:
    assert prove(tmp_path, "--json", flaw=flaw) == 1
    found = as_json(capsys)
    assert found["holds"] is False
    assert found["legs"][-1]["faults"][0].startswith(told)
    assert (found["first_differing_step"] is None) == has_all_steps


def test_a_drift_is_within_epsilon_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--json", "--epsilon", "1e-10", flaw="drifts") == 1
    found = as_json(capsys)
    assert (found["first_differing_step"], found["epsilon"]) == (13, 1e-10)
    assert found["largest_loss_difference"] == pytest.approx(1e-9, rel=1e-3)
    # The same run without a break serves again.
    reference = tmp_path / "proof" / "reference"
    (kept := tmp_path / "kept").mkdir()
    reference.rename(kept / "reference")
    trace = (kept / "reference" / "trace.jsonl").read_bytes()
    assert prove(tmp_path, "--force", "--epsilon", "1e-8", "--reference", str(kept / "reference"), flaw="drifts") == 0
    assert (kept / "reference" / "trace.jsonl").read_bytes() == trace
    assert not reference.exists()


def test_a_command_that_ignores_the_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, flaw="is short") == 1
    assert (
        "the run without a break ended at step 8 of 16: does the command train as many steps as RESHARD_STEPS says"
        in capsys.readouterr().out
    )


def test_a_leg_that_ends_before_its_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path) == 0
    reference = (tmp_path / "proof").rename(tmp_path / "kept") / "reference"
    capsys.readouterr()
    assert prove(tmp_path, "--json", "--reference", str(reference), kill_at="12", flaw="is short") == 1
    found = as_json(capsys)
    assert found["legs"][0]["faults"] == ["ended at step 8, before it could be killed after step 12"]
    assert found["first_differing_step"] == 9


def test_a_leg_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--patience-s", "2", flaw="hangs") == 1
    assert "the run without a break no step in 2 s, the last one was 7: it was ended" in capsys.readouterr().out


def test_the_interval_is_handed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--json", "--interval", "3") == 0
    assert as_json(capsys)["legs"][1]["resumed_at"] in (6, 9)


def test_a_signal_that_asks_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--json", "--signal", "TERM", flaw="saves when asked") == 0
    first, second = as_json(capsys)["legs"]
    assert second["resumed_at"] == first["killed_at"] - first["killed_at"] % 5


def test_workers_are_killed_and_nothing_is_left_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher lives on, and reports the signal of its workers; a child that one of them left behind is ended."""
    assert prove(tmp_path, "--json", flaw="torchrun", ranks="2:2") == 0
    first, second = as_json(capsys)["legs"]
    assert (second["resumed_at"], second["last"]) == (first["killed_at"] - first["killed_at"] % 5, 16)
    assert b"sleep\x00317\x00" not in commands()


def test_a_run_that_was_over_when_it_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its loop trains one step more before it looks whether it is done."""
    assert prove(tmp_path, "--json", flaw="goes on") == 1
    assert as_json(capsys)["legs"][1]["faults"] == [
        "resumed at step 16 of 16: the kill came when the run was over already, or it was ignored; "
        "kill earlier (--kill-at)"
    ]


def test_a_launcher_that_starts_its_workers_again_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--json", flaw="restarts") == 0
    first, second = as_json(capsys)["legs"]
    assert 7 <= first["killed_at"] < 16
    assert (second["resumed_at"], second["last"]) == (first["killed_at"] - first["killed_at"] % 5, 16)


def test_a_process_that_hides_its_environment_is_found_by_its_parents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after setproctitle, which writes over what a process was started with."""
    hidden = ["env", "-u", "RESHARD_LAUNCH", sys.executable, STRANGER]
    options = ["--ranks", "1:1", "--kill-at", "7", "--steps", "16", "--folder", str(tmp_path / "proof")]
    assert main(["prove", *options, "--json", "--", *hidden]) == 0
    assert as_json(capsys)["legs"][0]["killed_at"] < 16
    assert main(["prove", *options, "--force", "--patience-s", "2", "--", *hidden, "hangs"]) == 1
    assert not [command for command in commands() if b"hangs" in command]


def commands() -> list[bytes]:
    return [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_proof_that_is_ended_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    options = ["--ranks", "1:1", "--kill-at", "9", "--steps", "16", "--folder", str(tmp_path / "proof")]
    command = [sys.executable, "-m", "reshard", "prove", *options, "--", sys.executable, STRANGER, "hangs"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    trace = tmp_path / "proof" / "reference" / "trace.jsonl"
    while not trace.exists() or trace.read_text().count("step") < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == 130
    assert not [each for each in commands() if b"hangs" in each]


def test_the_reason_is_that_of_the_leg_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(tmp_path, "--json", flaw="fails quietly") == 1
    (fault,) = as_json(capsys)["legs"][1]["faults"]
    assert fault.startswith("failed with exit status 7 before its first step: the data disk is not mounted (")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": "4"}, "--ranks: nothing would be resumed: expected two world sizes or more, found 4"),
        ({"ranks": "4:x"}, "--ranks: not whole numbers above 0: expected such as 4:2:1, found 4:x"),
        (
            {"ranks": "2:1:1"},
            "--kill-at: every leg but the last is killed once: expected 2 steps for 3 world sizes, found 7",
        ),
        ({"kill_at": "9" * 5000}, "--kill-at: not whole numbers above 0"),
        ({"kill_at": "16"}, "--kill-at: the run would not come that far, or has been there before: expected ascending"),
        ({"ranks": "2:1"}, "CMD: the command does not say where the number of ranks goes: expected {ranks} in it"),
        ({"steps": 0}, "--steps: not a number of steps"),
    ],
    ids=str,
)
def test_legs_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], told: str
) -> None:
    assert prove(tmp_path, **options) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--interval", "0"], "--interval: not above 0"),
        (["--epsilon", "-1"], "--epsilon: not a distance"),
        (["--patience-s", "nan"], "--patience-s: not above 0"),
        (["--reference", "nowhere"], "nowhere/trace.jsonl: no run without a break is there"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert prove(tmp_path, *options) == 2
    assert told in capsys.readouterr().err


def test_what_is_in_the_folder_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proof = tmp_path / "proof"
    (proof / "reference").mkdir(parents=True)
    (proof / "notes").write_text("mine")
    assert prove(tmp_path) == 2
    assert f"{proof}: has a proof already; overwrite it with --force" in capsys.readouterr().err
    (thesis := proof / "reference" / "thesis.tex").write_text("years")
    assert prove(tmp_path, "--force") == 2
    assert f"{proof}/reference/thesis.tex: is not of a proof; name another --folder" in capsys.readouterr().err
    thesis.unlink()
    assert prove(tmp_path, "--force") == 0
    assert (proof / "notes").read_text() == "mine"
    trace = (proof / "reference" / "trace.jsonl").read_bytes()
    assert prove(tmp_path, "--force", "--reference", str(tmp_path / "nowhere")) == 2
    (tmp_path / "link").symlink_to(proof)
    assert prove(tmp_path, "--force", "--reference", str(tmp_path / "link" / "reference")) == 2
    assert "would be cleared with the folder" in capsys.readouterr().err
    assert (proof / "reference" / "trace.jsonl").read_bytes() == trace
    (other := tmp_path / "other").mkdir()
    (other / "loss.png").write_text("mine")
    assert main(["prove", "--ranks", "1:1", "--kill-at", "3", "--steps", "5", "--folder", str(other), "--", "x"]) == 2
    assert (other / "loss.png").read_text() == "mine"
    capsys.readouterr()
    assert prove(tmp_path, "--force", "--reference", str(proof / "reference")) == 2
    assert "would be cleared with the folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert prove(tmp_path / "file") == 2
    assert f"{tmp_path}/file/proof/reference: cannot make the folder" in capsys.readouterr().err


def test_a_command_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["prove", "--ranks", "1:1", "--kill-at", "3", "--steps", "5", "--folder", str(tmp_path / "proof")]
    assert main([*options, "--", "/no/such/program"]) == 2
    assert "/no/such/program: cannot be started: No such file or directory" in capsys.readouterr().err
    (script := tmp_path / "no shebang").write_text("echo\n")
    script.chmod(0o755)
    assert main([*options, "--force", "--", str(script)]) == 2
    assert f"{script}: cannot be started: Exec format error" in capsys.readouterr().err
