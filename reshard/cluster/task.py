"""What `reshard slurm wrap` does inside a task: the command below it hears no signal, the batch script hears of each.

SLURM signals the tasks of a preempted job and not its batch script; torchrun kills its ranks half a minute after
SIGTERM and dies of SIGUSR1 at once. So the command runs in a session of its own, where such signals do not reach it,
and is told to stop by way of the batch script and its file control.json. SIGKILL reaches everything.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from reshard.cluster.signals import StopSignal
from reshard.environment import SlurmPlace
from reshard.errors import ReshardError
from reshard.processes import Launch
from reshard.storage.durable import write_atomic
from reshard.storage.run_files import ASKED, read_control

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_TICK_S = 0.2


def shield(
    command: Sequence[str], folder: Path, place: SlurmPlace, *, with_ranks: bool, forward: signal.Signals | None
) -> int:
    """Runs a command, and tells the batch script's `wrap` of signals.

    Args:
        command: the program and its arguments.
        folder: the attempt's.
        place: which task this is.
        with_ranks: give the command RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, of which this task is one.
        forward: a signal for the processes that train, of a program that does not look into control.json.

    Returns:
        Its exit status, as shells have it.

    Raises:
        UsageError: there is no such program.
    """
    # One for each: of several signals all are to be seen.
    signals = [StopSignal([number]) for number in ASKING]
    variables = place.torch_variables() if with_ranks else {}
    told = forwarded = False
    with Launch(command, None, variables) as launch:
        while launch.status is None:
            time.sleep(_TICK_S)
            received = next((asked.received for asked in signals if asked.received), None)
            if received is not None and not told:
                told = True
                with contextlib.suppress(ReshardError):
                    write_atomic(folder / f"{ASKED}{socket.gethostname()}-{place.rank}", received.encode())
            # The batch script may know what no signal has told this task.
            if forward is not None and not forwarded and (told or _must_stop(folder)):
                forwarded = True
                launch.signal_workers(forward)
        return shell_status(launch.status)


def _must_stop(folder: Path) -> bool:
    with contextlib.suppress(ReshardError):
        control = read_control(folder)
        return control is not None and control.stop is not None
    return False


def shell_status(status: int) -> int:
    """An exit status as shells have it, where a signal is 128 and its number."""
    return status if status >= 0 else 128 - status
