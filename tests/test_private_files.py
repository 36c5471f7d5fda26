"""Folders and files of one user: what other users have made or could change is refused, and nothing is waited for."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dshuffle.private_files import cache_folder, check_folder, open_private_file, user_key

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
STRANGER = 12345


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return tmp_path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_cache_folder_is_made_for_its_user_alone(caches):
    earlier = os.umask(0)
    try:
        folder = cache_folder()
        assert folder == caches / "caches" / "dshuffle"
        os.close(open_private_file(folder / "x", os.O_RDWR | os.O_CREAT))
    finally:
        os.umask(earlier)
    assert mode(caches / "caches" / "dshuffle") == 0o700
    assert mode(caches / "caches" / "dshuffle" / "x") == 0o600


@pytest.mark.parametrize("home", ["/dev/null", "/proc"])
def test_without_a_home_directory_the_folder_is_a_temporary_one(caches, monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    folder = cache_folder()
    assert folder == caches / "temporary" / f"dshuffle-{os.geteuid()}"
    assert mode(folder) == 0o700


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        pytest.param(STRANGER, f"belongs to the user {STRANGER}, and not to 0", marks=as_root),
        (None, "has the mode 0777, so other users can enter it. Its mode must be 0700"),
    ],
)
def test_a_temporary_folder_of_others_is_refused(caches, monkeypatch, owner, words):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    folder = caches / "temporary" / f"dshuffle-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    if owner is None:
        folder.chmod(0o777)
    else:
        os.chown(folder, owner, owner)
    with pytest.raises(OSError, match=words):
        cache_folder()


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(NotADirectoryError):
        check_folder(tmp_path / "link")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
def test_links_pipes_and_folders_are_no_files(tmp_path, flags):
    tmp_path.chmod(0o700)
    (tmp_path / "victim").write_bytes(b"victim")
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "pipe", "folder"):
        with pytest.raises(OSError):
            open_private_file(tmp_path / name, flags)
    assert (tmp_path / "victim").read_bytes() == b"victim"
    assert not (tmp_path / "nowhere").exists()


@as_root
def test_a_file_of_another_user_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "x").write_bytes(b"x")
    os.chown(tmp_path / "x", STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"x belongs to the user {STRANGER}, and not to 0"):
        open_private_file(tmp_path / "x", os.O_RDONLY)


def test_all_processes_of_a_user_have_one_key(caches):
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return user_key()

    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(ask, range(8)))
    assert len(keys) == 1
    assert {len(key) for key in keys} == {32}
    assert os.listdir(caches / "caches" / "dshuffle") == ["key"]
    assert mode(caches / "caches" / "dshuffle" / "key") == 0o600
    (caches / "caches" / "dshuffle" / "key").unlink()
    assert user_key() not in keys
