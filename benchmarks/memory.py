"""How much memory this process has used at most."""

from __future__ import annotations

from pathlib import Path


def peak_bytes() -> int:
    """Resident, since this program was started; ``ru_maxrss`` would include the one that it was forked from."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
