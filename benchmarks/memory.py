"""How much memory this process uses, and has used at most."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def peak_bytes() -> int:
    """Resident, since this program was started; ``ru_maxrss`` would include the one that it was forked from."""
    return _resident("VmHWM:")


def resident_bytes() -> int:
    """Resident now."""
    return _resident("VmRSS:")


def forget_peak() -> None:
    """Makes ``peak_bytes`` count from now on, where the system lets a process do so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    return 0
