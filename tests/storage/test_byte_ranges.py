from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from reshard.errors import CheckpointUnsound
from reshard.storage import byte_ranges
from reshard.storage.byte_ranges import SourceFiles


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    chance = random.Random(0)
    files = [tmp_path / f"file-{number}" for number in range(12)]
    for file in files:
        file.write_bytes(chance.randbytes(5000))
    return files


def test_any_range_of_any_file(paths: list[Path]) -> None:
    chance = random.Random(1)
    with SourceFiles(paths) as files:
        for _ in range(300):
            number, start = chance.randrange(12), chance.randrange(5000)
            length = chance.randrange(5001 - start)
            assert files.read(number, start, length) == paths[number].read_bytes()[start : start + length]
        assert files.size_bytes(3) == 5000


def test_pieces_are_filled_one_after_the_other(paths: list[Path]) -> None:
    pieces = [bytearray(length) for length in [1, 0, 7, 2000, 1] + [1] * 2900]
    with SourceFiles(paths) as files:
        files.read_into(0, 50, [memoryview(piece) for piece in pieces])
        assert files.bytes_read == sum(map(len, pieces)) > byte_ranges.MOST_PIECES
    assert b"".join(pieces) == paths[0].read_bytes()[50 : 50 + sum(map(len, pieces))]


def test_a_file_that_ends_before_is_named_with_its_length(paths: list[Path]) -> None:
    with SourceFiles(paths) as files:
        with pytest.raises(CheckpointUnsound, match=r"file-2: cut short: expected at least 5001 bytes, found 5000"):
            files.read(2, 4990, 11)
        with pytest.raises(CheckpointUnsound, match="cut short"):
            files.read(2, 9000, 1)


def test_a_file_that_is_missing_is_named_with_a_way_out(tmp_path: Path) -> None:
    with SourceFiles([tmp_path / "gone"]) as files, pytest.raises(CheckpointUnsound, match=r"gone: missing; .*--in"):
        files.read(0, 0, 1)


def test_few_files_are_open_at_a_time(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "MOST_OPEN_FILES", 3)
    before = open_files()
    files = SourceFiles(paths)
    for _ in range(2):
        for number in range(12):
            assert files.read(number, 10, 5) == paths[number].read_bytes()[10:15]
            assert open_files() <= before + 3
    files.close()
    assert open_files() == before


def test_threads_share_files(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "MOST_OPEN_FILES", 2)
    contents = [path.read_bytes() for path in paths]
    wrong: list[int] = []
    with SourceFiles(paths) as files:

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(400):
                number, start = chance.randrange(12), chance.randrange(4900)
                if files.read(number, start, 100) != contents[number][start : start + 100]:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert files.bytes_read == 6 * 400 * 100
