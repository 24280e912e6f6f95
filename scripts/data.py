"""Data sets for language modelling: fixed, non-overlapping windows over one long row of tokens.

Item i is the pair (inputs, targets), int64 tensors of `length` tokens each: inputs are the tokens
[i * length, (i + 1) * length) and targets the same range shifted by one. So item i is the same wherever and whenever
it is read, and the order of items is the sampler's business alone.
"""

import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

BETWEEN_FILES = b"\0"
"""Never part of a text, so the model can learn that a file ends here."""

TOKEN_DTYPE = np.dtype("<u2")
PROBE_BYTES = 64 * 1024

OUTSIDE_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
"""Folders that hold other people's code, tests, or that some distributions of Python leave out."""

KEYS_OF_KIND = {
    "stdlib": {"length", "max_bytes"},
    "text": {"length", "max_bytes", "path", "paths"},
    "tokens": {"length", "path"},
}


class TokenWindows(Dataset[tuple[Tensor, Tensor]], ABC):
    """Windows of `length` tokens over a row of `token_count` tokens. Subclasses say where the tokens are."""

    def __init__(self, source: str, token_count: int, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, not {length}")
        if token_count < length + 1:
            raise ValueError(
                f"{source}: too short for one window of length {length}: "
                f"expected at least {length + 1} tokens (the targets are shifted by one), found {token_count}"
            )
        self.token_count = token_count
        self.length = length

    @abstractmethod
    def read(self, start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
        """The tokens [start, stop)."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change when the data or the windows change: compare them before resuming a run."""

    def __len__(self) -> int:
        return (self.token_count - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        tokens = torch.from_numpy(self.read(start, start + self.length + 1).astype(np.int64))
        return tokens[:-1], tokens[1:]


class TextWindows(TokenWindows):
    """The bytes of some files as tokens (vocabulary 256), one file after the other with a zero byte between them.

    Everything is held in memory; `max_bytes` keeps the first bytes only.
    """

    def __init__(self, files: Sequence[Path | str], length: int, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")
        self._bytes = np.frombuffer(_concatenate(files, max_bytes), dtype=np.uint8)
        super().__init__(_describe(files), len(self._bytes), length)

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self._bytes[start:stop]

    @property
    def fingerprint(self) -> str:
        return _fingerprint(f"text {self.length}", self._bytes.tobytes())


class TokenFile(TokenWindows):
    """A flat file of little-endian uint16 tokens, memory-mapped: each process reads only the pages it needs."""

    def __init__(self, path: Path | str, length: int) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path}: expected a file of uint16 tokens, found none")
        file_bytes = self.path.stat().st_size
        if file_bytes % TOKEN_DTYPE.itemsize:
            raise ValueError(f"{self.path}: expected an even number of bytes (uint16 tokens), found {file_bytes}")
        super().__init__(str(self.path), file_bytes // TOKEN_DTYPE.itemsize, length)
        self._mapped: npt.NDArray[np.uint16] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A memory map is pickled as all of its data: a DataLoader worker is to open the file itself.
        return {**self.__dict__, "_mapped": None}

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint16]:
        if self._mapped is None:
            self._mapped = np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r")
        return self._mapped[start:stop]

    @property
    def fingerprint(self) -> str:
        """Of the number of tokens and of 64 KiB at the start, the middle and the end: such a file may be terabytes."""
        probe_tokens = min(PROBE_BYTES // TOKEN_DTYPE.itemsize, self.token_count)
        last = self.token_count - probe_tokens
        probes = [self.read(start, start + probe_tokens).tobytes() for start in (0, last // 2, last)]
        return _fingerprint(f"tokens {self.token_count} {self.length}", *probes)


def standard_library_files() -> list[Path]:
    """Every .py file of this Python's standard library, without tests: megabytes of real text on any machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Assigning to the slice keeps os.walk out of site-packages, which may be tens of thousands of files.
        subfolders[:] = [name for name in subfolders if name not in OUTSIDE_STANDARD_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def open_dataset(config: dict[str, Any]) -> TokenWindows:
    """The data set that the `data` section of a configuration describes.

    kind        stdlib (Python's standard library), text (files, byte by byte) or tokens (one file of uint16)
    path        the file, or a glob that matches it (text, tokens)
    paths       several of them, in this order (text)
    length      tokens in a window
    max_bytes   keep the first bytes only (stdlib, text)
    workers     for the DataLoader, not used here
    """
    kind = config.get("kind")
    if kind not in KEYS_OF_KIND:
        raise ValueError(f"data.kind: expected one of {', '.join(KEYS_OF_KIND)}, found {kind!r}")
    known = {"kind", "workers"} | KEYS_OF_KIND[kind]
    unknown = sorted(set(config) - known)
    if unknown:
        raise ValueError(f"data: {', '.join(unknown)} unknown for kind {kind}, which takes {', '.join(sorted(known))}")
    length, max_bytes = config.get("length"), config.get("max_bytes")
    if not isinstance(length, int):
        raise ValueError(f"data.length: expected a number of tokens, found {length!r}")
    if max_bytes is not None and not isinstance(max_bytes, int):
        raise ValueError(f"data.max_bytes: expected a number of bytes, found {max_bytes!r}")
    if kind == "stdlib":
        return TextWindows(standard_library_files(), length, max_bytes)
    files = _matching_files(config)
    if kind == "text":
        return TextWindows(files, length, max_bytes)
    if len(files) != 1:
        raise ValueError(f"data.path: kind tokens reads one file, {config['path']!r} matches {len(files)}")
    return TokenFile(files[0], length)


def _matching_files(config: dict[str, Any]) -> list[Path]:
    """The files that `path` or `paths` names: patterns in the order given, the matches of each one sorted."""
    if ("path" in config) == ("paths" in config):
        raise ValueError("data: give exactly one of path and paths")
    patterns = config["paths"] if "paths" in config else [config["path"]]
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"data: expected a path, or a list of them in paths, found {patterns!r}")
    files = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        # A file that exists is meant literally, even where its name has brackets.
        matches = [path] if path.exists() else Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        found = sorted(match for match in matches if match.is_file())
        if not found:
            raise ValueError(f"data: no file matches {pattern!r} (working directory {Path.cwd()})")
        files += found
    return files


def _concatenate(files: Sequence[Path | str], max_bytes: int | None) -> bytes:
    """The bytes of the files with a zero byte between them, no more than `max_bytes`."""
    joined = bytearray()
    for number, file in enumerate(files):
        if max_bytes is not None and len(joined) >= max_bytes:
            break
        if number:
            joined += BETWEEN_FILES
        with Path(file).open("rb") as stream:
            joined += stream.read(-1 if max_bytes is None else max_bytes - len(joined))
    return bytes(joined)


def _describe(files: Sequence[Path | str]) -> str:
    if not files:
        return "no files"
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _fingerprint(description: str, *parts: bytes) -> str:
    digest = hashlib.sha256(description.encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
