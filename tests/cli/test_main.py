"""The command as a whole: exit codes, where words go, and what a start costs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import pytest

from reshard.cli import main as main_module
from reshard.cli.main import main
from reshard.errors import CheckpointUnsound, UsageError


class NotAnException(BaseException):
    """As torch's CheckpointException is."""


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | int], None]:
    """Replaces all verbs by one, `act`, that raises or returns what it is given."""

    def install(outcome: BaseException | int) -> None:
        def act(_: argparse.Namespace) -> int:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        class Family:
            @staticmethod
            def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
                verbs.add_parser("act").set_defaults(run=act)

        monkeypatch.setattr(main_module, "_FAMILIES", (Family,))

    return install


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (0, 0),
        (1, 1),
        (CheckpointUnsound("short file"), 1),
        (UsageError("no such option"), 2),
        (KeyError("w"), 3),
        (NotAnException("w"), 3),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_exit_codes(verb: Callable[[BaseException | int], None], outcome: BaseException | int, code: int) -> None:
    verb(outcome)
    assert main(["act"]) == code


def test_a_fault_is_one_line_on_stderr(
    verb: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(
        CheckpointUnsound("shorter than recorded", path="step-5/__0_0.distcp", expected=10, found=3, hint="save again")
    )
    main(["act"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "reshard: error: step-5/__0_0.distcp: shorter than recorded: expected 10, found 3; save again\n"


@pytest.mark.parametrize("argv", [["--debug", "act"], ["act", "--debug"]])
def test_a_bug_shows_its_traceback_under_debug_only(
    verb: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    verb(KeyError("w"))
    main(["act"])
    assert capsys.readouterr().err == (
        "reshard: error: a bug in reshard: KeyError: 'w'; run again with --debug for the traceback\n"
    )
    main(argv)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [KeyboardInterrupt(), BrokenPipeError()])
def test_an_interrupt_and_a_broken_pipe_are_quiet(
    verb: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str], quiet: BaseException
) -> None:
    verb(quiet)
    main(["act"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argv", [[], ["no-such-verb"], ["--no-such-option"], ["batch", "--global", "8"]])
def test_a_wrong_command_line_is_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: reshard" in capsys.readouterr().err


def test_help_and_version_are_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "compare-traces" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("reshard ")


def test_the_start_imports_nothing_slow() -> None:
    code = (
        "import reshard.cli.main as m, sys; m.build_parser(); "
        "slow = {'torch', 'numpy', 'matplotlib', 'yaml', 'tqdm'} & set(sys.modules); assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("arguments", ["--help", "batch --global-batch 8 --micro-batch 1 --world-size 8"])
def test_a_reader_that_goes_away_leaves_nothing_on_stderr(arguments: str) -> None:
    # By the time the sleep is over, the reader has gone. Unbuffered, argparse itself would swallow the fault.
    command = f"{{ sleep 0.3; PYTHONUNBUFFERED= {sys.executable} -m reshard {arguments}; echo $? >&2; }} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "141\n"
