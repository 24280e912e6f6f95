"""The data sets against slices of a plain list, and the words they use for what is wrong."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data import PROBE_BYTES, TextWindows, TokenFile, open_dataset, standard_library_files
from torch.utils.data import DataLoader

CONFIGS = Path(__file__).parents[2] / "scripts" / "configs"


def write_texts(folder: Path, *texts: bytes) -> list[Path]:
    files = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.txt"
        path.write_bytes(text)
        files.append(path)
    return files


def write_tokens(path: Path, tokens: object) -> Path:
    np.asarray(tokens, dtype="<u2").tofile(path)
    return path


def naive_windows(tokens: list[int], length: int) -> list[tuple[list[int], list[int]]]:
    """Windows cut one after the other for as long as there is a target for each input."""
    windows, start = [], 0
    while start + length + 1 <= len(tokens):
        windows.append((tokens[start : start + length], tokens[start + 1 : start + length + 1]))
        start += length
    return windows


def all_windows(dataset) -> list[tuple[list[int], list[int]]]:
    return [tuple(part.tolist() for part in dataset[index]) for index in range(len(dataset))]


@pytest.mark.parametrize("token_count", range(6, 20))
@pytest.mark.parametrize("length", [1, 2, 5])
def test_windows_are_those_of_a_naive_reference(tmp_path, token_count, length):
    text = bytes(range(100, 100 + token_count))
    expected = naive_windows(list(text), length)
    assert all_windows(TextWindows(write_texts(tmp_path, text), length)) == expected
    assert all_windows(TokenFile(write_tokens(tmp_path / "t.bin", list(text)), length)) == expected


def test_items_are_int64_tensors(tmp_path):
    for dataset in (
        TextWindows(write_texts(tmp_path, b"a few bytes"), 4),
        TokenFile(write_tokens(tmp_path / "t.bin", [65535] * 9), 4),
    ):
        inputs, targets = dataset[0]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (4,)
        assert inputs.min() >= 0


def test_an_index_out_of_range_is_an_error(tmp_path):
    dataset = TextWindows(write_texts(tmp_path, b"123456789"), 4)
    assert len(dataset) == 2
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"window {index} of 2"):
            dataset[index]


def test_texts_are_joined_by_a_zero_byte_and_cut_at_max_bytes(tmp_path):
    texts = [b"one", b"", b"three", b"four"]
    files = write_texts(tmp_path, *texts)
    joined = b"\0".join(texts)
    for max_bytes in [*range(2, len(joined) + 3), None]:
        dataset = TextWindows(files, 1, max_bytes)
        assert dataset.read(0, dataset.token_count).tobytes() == joined[:max_bytes]


def test_the_order_of_the_files_is_kept(tmp_path):
    first, second = write_texts(tmp_path, b"ab", b"cd")
    assert TextWindows([second, first], 4)[0][0].tolist() == list(b"cd\0a")


def test_a_token_file_pickles_small_even_after_it_was_read(tmp_path):
    dataset = TokenFile(write_tokens(tmp_path / "t.bin", np.arange(60000)), 100)
    before = all_windows(dataset)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert all_windows(pickle.loads(pickled)) == before


def test_loader_workers_read_the_same_items(tmp_path):
    dataset = TokenFile(write_tokens(tmp_path / "t.bin", np.arange(1000)), 10)
    loaded = torch.cat([inputs for inputs, _ in DataLoader(dataset, batch_size=4, num_workers=2)])
    assert loaded.flatten().tolist() == list(range(990))


def test_a_text_fingerprint_follows_the_bytes_the_cut_and_the_length(tmp_path):
    files = write_texts(tmp_path, b"the same text", b"and more of it")
    (tmp_path / "copy").mkdir()
    copies = write_texts(tmp_path / "copy", b"the same text", b"and more of it")
    fingerprint = TextWindows(files, 4).fingerprint
    assert re.fullmatch("[0-9a-f]{16}", fingerprint)
    assert TextWindows(copies, 4).fingerprint == fingerprint
    copies[1].write_bytes(b"and more of It")
    others = {
        TextWindows(copies, 4).fingerprint,
        TextWindows(files[::-1], 4).fingerprint,
        TextWindows(files, 4, max_bytes=20).fingerprint,
        TextWindows(files, 5).fingerprint,
    }
    assert len(others) == 4
    assert fingerprint not in others


def test_a_token_fingerprint_follows_the_ends_the_middle_and_the_file_length(tmp_path):
    token_count = 4 * PROBE_BYTES
    path = tmp_path / "t.bin"
    seen = {TokenFile(write_tokens(path, np.zeros(token_count)), 8).fingerprint}
    for place in (0, token_count // 2, token_count - 1):
        tokens = np.zeros(token_count)
        tokens[place] = 1
        seen.add(TokenFile(write_tokens(path, tokens), 8).fingerprint)
    seen.add(TokenFile(write_tokens(path, np.zeros(token_count + 1)), 8).fingerprint)
    assert len(seen) == 5


def test_a_short_token_file_has_a_fingerprint_of_all_of_it(tmp_path):
    path = tmp_path / "t.bin"
    seen = set()
    for place in range(9):
        tokens = np.zeros(9)
        tokens[place] = 1
        seen.add(TokenFile(write_tokens(path, tokens), 8).fingerprint)
    assert len(seen) == 9


def test_the_standard_library_is_megabytes_of_modules_without_tests():
    files = standard_library_files()
    assert sum(file.stat().st_size for file in files) > 4_000_000
    assert {"argparse.py", "zipfile.py"} <= {file.name for file in files}
    folders = {part for file in files for part in file.parts[:-1]}
    assert folders.isdisjoint({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
    assert files == standard_library_files()


def test_a_token_file_of_odd_size_is_an_error(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(b"x" * 101)
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: expected an even number of bytes (uint16 tokens)") + ".*101"
    ):
        TokenFile(path, 4)


@pytest.mark.parametrize("token_count", [0, 1, 8])
def test_data_shorter_than_a_window_is_an_error(tmp_path, token_count):
    message = f"expected at least 9 tokens .*, found {token_count}"
    path = write_tokens(tmp_path / "t.bin", [1] * token_count)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{message}"):
        TokenFile(path, 8)
    files = write_texts(tmp_path, b"x" * token_count)
    with pytest.raises(ValueError, match=f"{re.escape(str(files[0]))}: .*{message}"):
        TextWindows(files, 8)


def test_no_files_are_an_error():
    with pytest.raises(ValueError, match="no files: too short"):
        TextWindows([], 8)


def test_open_dataset_reads_texts_by_glob_in_the_order_given(tmp_path):
    write_texts(tmp_path, b"zero", b"one", b"two")
    dataset = open_dataset({"kind": "text", "path": f"{tmp_path}/*.txt", "length": 3, "workers": 2})
    assert isinstance(dataset, TextWindows)
    assert dataset.read(0, 100).tobytes() == b"zero\0one\0two"
    paths = [f"{tmp_path}/2.txt", f"{tmp_path}/[01].txt"]
    dataset = open_dataset({"kind": "text", "paths": paths, "length": 3, "max_bytes": 10})
    assert dataset.read(0, 100).tobytes() == b"two\0zero\0o"


def test_open_dataset_takes_relative_globs_and_names_with_brackets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deep/er").mkdir(parents=True)
    Path("deep/er/a[1].txt").write_bytes(b"bracketed")
    for pattern in ("deep/er/a[1].txt", "**/*.txt"):
        dataset = open_dataset({"kind": "text", "path": pattern, "length": 3})
        assert dataset.read(0, 100).tobytes() == b"bracketed"


def test_open_dataset_reads_a_token_file(tmp_path):
    path = write_tokens(tmp_path / "train.bin", range(50))
    dataset = open_dataset({"kind": "tokens", "path": f"{tmp_path}/*.bin", "length": 8})
    assert isinstance(dataset, TokenFile)
    assert dataset.path == path


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_shipped_configurations_open_here(name):
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    dataset = open_dataset(settings["data"])
    # Enough for the run that the file describes to see a few epochs at most.
    assert len(dataset) > settings["train"]["steps"] * settings["batch"]["global_batch"] / 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"length": 8}, "data.kind: expected one of stdlib, text, tokens, found None"),
        ({"kind": "csv", "length": 8}, "found 'csv'"),
        ({"kind": "stdlib"}, "data.length: expected a number of tokens, found None"),
        ({"kind": "stdlib", "length": "8"}, "data.length: expected a number of tokens, found '8'"),
        ({"kind": "stdlib", "length": 0}, "length must be at least 1, not 0"),
        ({"kind": "stdlib", "length": 8, "max_bytes": "1MB"}, "data.max_bytes: expected a number of bytes"),
        ({"kind": "stdlib", "length": 8, "max_bytes": 0}, "max_bytes must be at least 1, not 0"),
        ({"kind": "stdlib", "length": 8, "path": "a"}, "path unknown for kind stdlib"),
        ({"kind": "text", "length": 8, "path": "a", "shuffle": True}, "shuffle unknown for kind text"),
        ({"kind": "tokens", "length": 8, "path": "a", "max_bytes": 9}, "max_bytes unknown for kind tokens"),
        ({"kind": "text", "length": 8}, "exactly one of path and paths"),
        ({"kind": "text", "length": 8, "path": "a", "paths": ["a"]}, "exactly one of path and paths"),
        ({"kind": "text", "length": 8, "paths": "a"}, "expected a path, or a list of them in paths"),
        ({"kind": "text", "length": 8, "path": "nowhere/*.txt"}, r"no file matches 'nowhere/\*.txt'"),
        ({"kind": "tokens", "length": 8, "path": "nowhere.bin"}, "no file matches 'nowhere.bin'"),
    ],
)
def test_open_dataset_says_what_is_wrong(config, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(config)


def test_open_dataset_takes_one_token_file_only(tmp_path):
    for name in "ab":
        write_tokens(tmp_path / f"{name}.bin", range(50))
    with pytest.raises(ValueError, match=r"kind tokens reads one file, .* matches 2"):
        open_dataset({"kind": "tokens", "path": f"{tmp_path}/*.bin", "length": 8})
