import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.errors import StorageError
from reshard.storage.durable import (
    fsync_tree,
    make_folder,
    remove_tree,
    rename_durably,
    storage_errors,
    temporary_target,
    write_atomic,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def flushed(monkeypatch):
    """The paths given to fsync, in order; the real fsync still runs."""
    paths = []
    real = os.fsync

    def fsync(descriptor):
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def refuse(monkeypatch, call, number):
    def refusing(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refusing)


def test_write_atomic_replaces_the_whole_file(tmp_path):
    path = tmp_path / "manifest.json"
    write_atomic(path, b"a long first version")
    write_atomic(path, b"short")
    assert path.read_bytes() == b"short"
    assert names(tmp_path) == ["manifest.json"]


def test_write_atomic_writes_nothing_for_no_bytes(tmp_path):
    write_atomic(tmp_path / "empty", b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_write_atomic_respects_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_write_atomic_flushes_the_hidden_sibling_and_then_the_folder(tmp_path, flushed):
    write_atomic(tmp_path / "file", b"x")
    sibling, folder = flushed
    assert sibling.parent == tmp_path and sibling.name.startswith(".")
    assert temporary_target(sibling.name) == "file"
    assert folder == tmp_path


def test_write_atomic_goes_on_after_a_short_write(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    write_atomic(tmp_path / "file", bytes(range(100)))
    assert (tmp_path / "file").read_bytes() == bytes(range(100))


def test_full_disk_says_how_far_it_came_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    real, calls = os.write, []

    def write(descriptor, data):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:4])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StorageError) as caught:
        write_atomic(path, b"ten bytes!")
    assert str(caught.value) == (
        f"{path}: cannot write: no space left on the file system (4 of 10 bytes written); "
        "free space there or use another file system, then try again"
    )
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_noticed_only_at_the_flush_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    refuse(monkeypatch, "fsync", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"no space left .*\(3 of 3 bytes written\)"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "I/O error"),
        (errno.ESTALE, os.strerror(errno.ESTALE)),
    ],
)
def test_the_reason_is_given_in_words_with_a_hint(tmp_path, monkeypatch, number, words):
    refuse(monkeypatch, "open", number)
    with pytest.raises(StorageError, match=words) as caught:
        write_atomic(tmp_path / "file", b"x")
    assert caught.value.path == str(tmp_path / "file")
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StorageError, match="permission denied"):
        write_atomic(tmp_path / "file", b"x")


def test_file_size_limit_of_the_process(tmp_path):
    # In a child: a limit that was lowered would stay with the test process.
    script = (
        "import sys; from reshard.errors import StorageError; from reshard.storage.durable import write_atomic\n"
        "try: write_atomic(sys.argv[1], bytes(10_000))\n"
        "except StorageError as error: print(error)\n"
    )
    (tmp_path / "file").write_bytes(b"old")
    child = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "file"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    assert "over the limit of 4096 bytes a file (RLIMIT_FSIZE) (4096 of 10000 bytes written)" in child.stdout
    assert "ulimit -f" in child.stdout
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_file_too_large_for_the_file_system_is_not_blamed_on_the_process(tmp_path, monkeypatch):
    refuse(monkeypatch, "write", errno.EFBIG)
    with pytest.raises(StorageError, match="larger than a file may be on this file system"):
        write_atomic(tmp_path / "file", b"x")


@pytest.mark.parametrize("name", ["file", ".file.tmp", ".file.0123456.tmp", ".file.01234567.tmpx", "file.01234567.tmp"])
def test_other_names_are_not_taken_for_temporary_files(name):
    assert temporary_target(name) is None


def test_make_folder_makes_and_flushes_every_missing_level(tmp_path, flushed):
    make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a/b"]


def test_make_folder_leaves_an_existing_one_alone(tmp_path, flushed):
    (tmp_path / "file").write_bytes(b"x")
    make_folder(tmp_path)
    assert (tmp_path / "file").exists()
    assert flushed == []


def test_make_folder_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder("run")
    assert (tmp_path / "run").is_dir()


def test_make_folder_where_a_file_is_in_the_way(tmp_path):
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot create the folder: a file of that name is in the way"):
        make_folder(tmp_path / "run")


def test_fsync_tree_flushes_files_first_and_folders_from_the_bottom(tmp_path, flushed):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    files = {tmp_path / "x", tmp_path / "a/x", tmp_path / "a/b/x", tmp_path / "c/x"}
    for path in files:
        path.write_bytes(b"x")
    fsync_tree(tmp_path)
    assert set(flushed[:4]) == files
    folders = flushed[4:]
    assert sorted(folders) == sorted([tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "c"])
    assert folders.index(tmp_path / "a/b") < folders.index(tmp_path / "a")
    assert folders[-1] == tmp_path


def test_fsync_tree_neither_follows_links_nor_hangs_on_a_pipe(tmp_path, flushed):
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    tree.mkdir()
    (tree / "link").symlink_to(outside / "file")
    (tree / "folder").symlink_to(outside)
    (tree / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tree / "pipe")
    fsync_tree(tree)
    assert flushed == [tree]


def test_fsync_tree_of_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no such file or folder"):
        fsync_tree(tmp_path / "absent")


def test_fsync_tree_names_the_file_that_could_not_be_flushed(tmp_path, monkeypatch):
    (tmp_path / "shard").write_bytes(b"x")
    refuse(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StorageError, match="cannot flush: the device reported an I/O error") as caught:
        fsync_tree(tmp_path)
    assert caught.value.path == str(tmp_path / "shard")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_folders_is_accepted_for_folders_only(tmp_path, monkeypatch, number):
    refuse(monkeypatch, "fsync", number)
    make_folder(tmp_path / "run")
    with pytest.raises(StorageError):
        write_atomic(tmp_path / "run/file", b"x")


def test_rename_durably_flushes_both_parents(tmp_path, flushed):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/x").write_bytes(b"x")
    rename_durably(tmp_path / "a/x", tmp_path / "b/y")
    assert (tmp_path / "b/y").read_bytes() == b"x"
    assert flushed == [tmp_path / "b", tmp_path / "a"]
    rename_durably(tmp_path / "b/y", tmp_path / "b/z")
    assert flushed[2:] == [tmp_path / "b"]


def test_rename_durably_onto_a_folder_with_content_changes_nothing(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(StorageError, match=rf"cannot rename to {tmp_path}/b: a folder that is not empty is in the way"):
        rename_durably(tmp_path / "a", tmp_path / "b")
    assert [(tmp_path / name / "file").read_text() for name in ("a", "b")] == ["a", "b"]


def test_remove_tree_takes_folders_files_and_absence(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    for name in ("a", "file", "absent"):
        remove_tree(tmp_path / name)
    assert names(tmp_path) == []


def test_remove_tree_takes_the_link_and_leaves_its_target(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/x").write_bytes(b"x")
    for name, target in (("link", "target"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        remove_tree(tmp_path / name)
    assert names(tmp_path) == ["target"]
    assert (tmp_path / "target/x").exists()


def test_remove_tree_shares_the_work_with_another_process(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(3):
        (tree / str(number)).write_bytes(b"x")
    real, taken = os.unlink, []

    def unlink(path, **kwargs):
        if not taken:
            taken.append(path)
            real(path, **kwargs)
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    remove_tree(tree)
    assert taken and not tree.exists()


def test_remove_tree_names_what_could_not_be_deleted(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    refuse(monkeypatch, "rmdir", errno.EACCES)
    with pytest.raises(StorageError, match="cannot delete: permission denied") as caught:
        remove_tree(tmp_path / "tree")
    assert caught.value.path == str(tmp_path / "tree")


def test_an_error_below_a_folder_is_placed_at_the_file(tmp_path):
    with pytest.raises(StorageError) as caught, storage_errors("list", tmp_path):
        os.scandir(tmp_path / "deep")
    assert caught.value.path == str(tmp_path / "deep")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
