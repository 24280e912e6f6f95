"""Puts ``tests/`` on the path for the shared helpers (``ranks``, ``lab``), and skips what this machine cannot run."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("-m") or ""
    if "slow" not in chosen:
        skip = pytest.mark.skip(reason="full grid: run with -m slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
