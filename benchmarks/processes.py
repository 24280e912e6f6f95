"""Runs a contender in a process of its own, and says how long it took, how much memory, and what it reported.

The launcher stays small on purpose (no numpy, no torch): a child inherits the peak of the process that it was forked
from, so a large one could not measure a small one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESHARD = (sys.executable, "-m", "reshard")
PATIENCE_S = 1800.0


class ContenderFailed(Exception):
    """It cannot be run here, or ended with an error; the message is the end of what it said."""


@dataclass(frozen=True)
class Finished:
    """A process that ended well.

    Attributes:
        seconds: from before its start until after its end, so with the start of the interpreter.
        cpu_s: of all cores together, children included; less shaken by what else the machine does.
        peak_bytes: of resident memory; of the largest process, where it has children.
        report: the JSON object that it printed last, or nothing.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    report: Mapping[str, Any]


def script(name: str, *arguments: object) -> list[str]:
    """The command that runs a script of this folder."""
    return [sys.executable, str(HERE / name), *map(str, arguments)]


def torchrun(ranks: int, command: Sequence[str]) -> list[str]:
    """A script's command, on several ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command[1:]]


def run(command: Sequence[object], patience_s: float = PATIENCE_S) -> Finished:
    """Runs a command to its end.

    Raises:
        ContenderFailed: there is no such program, it fails, or takes longer than ``patience_s``.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    surroundings.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is not compiled at every start
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as talk:
        started = time.perf_counter()
        try:
            process = subprocess.Popen(
                [*map(str, command)], stdout=out, stderr=talk, env=surroundings, start_new_session=True
            )
        except OSError as error:
            raise ContenderFailed(f"{command[0]}: {error.strerror}") from error
        signal.signal(signal.SIGALRM, _out_of_patience)
        signal.setitimer(signal.ITIMER_REAL, patience_s)
        try:
            # Not Popen.wait: this also gives the peak of memory, exactly and without polling.
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - started
        except BaseException:
            _end(process)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), talk.seek(0)
        if process.returncode:
            said = " ".join(talk.read().decode(errors="replace").split())
            # torchrun's own words come after those of the ranks.
            cause = said[: said.find("torch/distributed/elastic")] if "torch/distributed/elastic" in said else said
            raise ContenderFailed(f"exit status {process.returncode}: {(cause or said)[-400:]}")
        return Finished(
            seconds,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss << 10,
            _report(out.read().decode(errors="replace")),
        )


def _report(text: str) -> Mapping[str, Any]:
    start = f"\n{text}".rfind("\n{")
    try:
        return json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}


def _out_of_patience(*_: object) -> None:
    raise ContenderFailed("took too long")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end, and its children through it (torchrun starts sessions of their own); then makes it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
