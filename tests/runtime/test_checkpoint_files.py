"""Checkpoints in files: for their user alone, no link is replaced, and one open session writes each of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle import Dataset, Shuffler, create_dataset
from dshuffle.errors import CheckpointError, MixingWarning
from dshuffle.runtime.client.checkpoint_file import checkpoint_lock
from dshuffle.runtime.client.checkpoints import read_checkpoint
from dshuffle.store.places import write_object

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

HOLD = """
import sys
from dshuffle.runtime.client.checkpoint_file import checkpoint_lock
from dshuffle.runtime.client.checkpoints import read_checkpoint
from dshuffle.store.places import write_object
with checkpoint_lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def client(cluster_of) -> Iterator[Client]:
    with cluster_of({str(name): {} for name in range(3)}) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return create_dataset("memory://checkpoint-files", {"x": np.arange(90.0)}, chunk_rows=10, overwrite=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "new" / "run.json"


def train(shuffler: Shuffler, client: Client) -> None:
    for epoch in shuffler.epochs(1):
        client.gather(epoch.map(len))


def names(place: Path) -> list[str]:
    return sorted(os.listdir(place.parent))


def test_only_the_user_can_read_a_checkpoint(client: Client, dataset: Dataset, place: Path) -> None:
    earlier = os.umask(0)
    try:
        with Shuffler(client, dataset, checkpoint=place) as shuffler:
            train(shuffler, client)
            assert names(place) == ["run.json", "run.json.lock"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in place.parent.iterdir()} == {0o600}
    finally:
        os.umask(earlier)
    assert names(place) == ["run.json"]


def test_a_link_is_refused_before_a_session_opens(client: Client, dataset: Dataset, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "run.json"
    with Shuffler(client, dataset, checkpoint=target) as shuffler:
        train(shuffler, client)
    before = target.read_bytes()
    link.symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"{link} is a symbolic link to {target}. Give the path of the file"):
        Shuffler.resume(client, dataset, link)
    with Shuffler(client, dataset) as shuffler, pytest.raises(CheckpointError, match="is a symbolic link"):
        shuffler.save(link)
    assert link.is_symlink()
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["run.json", "target.json"]


class Planted:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("way", ["others can write it", "link", "folder", "sticky folder", "other user", "its user"])
def test_a_checkpoint_that_another_user_may_have_written_is_not_read(
    client: Client, dataset: Dataset, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bait = tmp_path / "ran"
    with Shuffler(client, dataset, checkpoint=place) as shuffler:
        shuffler.attach(Planted(bait))
        train(shuffler, client)
    says = ""
    match way:
        case "others can write it":
            place.chmod(0o620)
            says = "run.json has the mode 0620, so other users can write it. Change it to 0600"
        case "link":
            place = place.with_name("link.json")
            place.symlink_to("run.json")
            says = "link.json is a symbolic link to run.json"
        case "folder" | "sticky folder":
            place.parent.chmod(0o777 if way == "folder" else 0o1777)
            says = "" if "sticky" in way else "has the mode 0777, so all users can replace files in it"
        case "other user":
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            says = r"belongs to the user \d+, and not to 12345"
    if not says:
        with Shuffler.resume(client, dataset, place) as shuffler:
            assert shuffler.attached is None
        assert bait.exists()
        return
    for options in ({}, {"checkpoint": None}):
        with pytest.raises(CheckpointError, match=says):
            Shuffler.resume(client, dataset, place, **options)
    with pytest.raises(CheckpointError, match=says):
        dshuffle.run_with_retries(lambda shuffler: shuffler.attached, lambda: client, dataset, checkpoint=place)
    assert not bait.exists()


def test_two_open_sessions_cannot_have_one_checkpoint(client: Client, dataset: Dataset, place: Path) -> None:
    mine = f"is in use by another open session .process {os.getpid()} on "
    with Shuffler(client, dataset, checkpoint=place) as shuffler:
        with pytest.raises(CheckpointError, match=mine):  # also before there is a checkpoint
            Shuffler(client, dataset, checkpoint=place)
        train(shuffler, client)
        with pytest.raises(CheckpointError, match=mine):
            Shuffler.resume(client, dataset, place)
        with Shuffler(client, dataset, checkpoint=place.with_name("other.json")):
            pass
    with Shuffler.resume(client, dataset, place) as shuffler:
        assert shuffler.next_epoch == 1


@pytest.mark.parametrize("how", ["resume", "run_with_retries"])
def test_a_checkpoint_is_read_once_nobody_else_writes_it(
    client: Client, dataset: Dataset, place: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The other session trains on an epoch and ends, just before this one has the lock."""
    other = Shuffler(client, dataset, checkpoint=place)
    train(other, client)

    @contextlib.contextmanager
    def locked(*args: Any, **keywords: Any) -> Iterator[None]:
        train(other, client)
        other.close()
        with checkpoint_lock(*args, **keywords):
            yield

    monkeypatch.setattr("dshuffle.runtime.client.checkpoint_file.checkpoint_lock", locked)
    if how == "resume":
        with Shuffler.resume(client, dataset, place) as shuffler:
            assert shuffler.next_epoch == 2
    else:
        assert (
            dshuffle.run_with_retries(lambda shuffler: shuffler.next_epoch, lambda: client, dataset, checkpoint=place)
            == 2
        )


def test_a_checkpoint_that_is_not_there_leaves_no_folder(client: Client, dataset: Dataset, place: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*run.json"):
        Shuffler.resume(client, dataset, place)
    assert not place.parent.exists()
    place.parent.mkdir()
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*run.json"):
        Shuffler.resume(client, dataset, place)
    assert names(place) == []


def test_a_session_that_does_not_open_leaves_its_checkpoint_to_others(
    client: Client, dataset: Dataset, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise MixingWarning("no")

    with monkeypatch.context() as patch:
        patch.setattr("dshuffle.runtime.client.shuffler.install_plugin", refuse)
        with pytest.raises(MixingWarning, match="no") as caught:
            Shuffler(client, dataset, checkpoint=place)
    with pytest.raises(MixingWarning):
        Shuffler(client, dataset, assignment="partial:1.0", checkpoint=place)
    assert names(place) == []
    assert caught.value.__traceback__ is not None  # nobody had to free the frames of the error


def test_a_checkpoint_that_cannot_be_written_is_refused_at_the_start(
    client: Client, dataset: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        Shuffler(client, dataset, checkpoint=tmp_path / "file" / "run.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        Shuffler(client, dataset, checkpoint=tmp_path / "folder")


@pytest.mark.slow
def test_a_lock_goes_away_with_its_process(place: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(CheckpointError, match=f"in use by another open session .process {holder.pid} on "),
            checkpoint_lock(str(place)),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert names(place) == ["run.json.lock"]
    with checkpoint_lock(str(place)):
        pass
    assert names(place) == []


def test_a_lock_that_the_user_has_removed_is_not_missed(place: Path) -> None:
    with checkpoint_lock(str(place)):
        (place.parent / "run.json.lock").unlink()
    with checkpoint_lock(str(place)):
        assert names(place) == ["run.json.lock"]


def test_what_a_link_in_place_of_a_lock_leads_to_is_not_touched(place: Path, tmp_path: Path) -> None:
    place.parent.mkdir()
    (tmp_path / "victim").write_bytes(b"victim")
    (place.parent / "run.json.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match="cannot be written"), checkpoint_lock(str(place)):
        pass
    assert (tmp_path / "victim").read_bytes() == b"victim"


@as_root
def test_a_lock_of_another_user_is_named(place: Path) -> None:
    place.parent.mkdir()
    (place.parent / "run.json.lock").touch()
    os.chown(place.parent / "run.json.lock", 12345, 12345)
    with (
        pytest.raises(CheckpointError, match=r"run\.json\.lock belongs to the user 12345, and not to 0"),
        checkpoint_lock(str(place)),
    ):
        pass


def test_a_file_system_without_locks(place: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with checkpoint_lock(str(place)):
        assert "this file system has no locks" in caplog.text
    assert names(place) == []


@pytest.mark.parametrize("place", ["memory://here/run.json", "s3://bucket/run.json"])
def test_other_stores_have_no_locks(place: str) -> None:
    with checkpoint_lock(place), checkpoint_lock(place):
        pass


@pytest.mark.parametrize(
    ("error", "transient"),
    [(errno.EACCES, False), (errno.EROFS, False), (errno.EIO, True), (errno.ENOSPC, True)],
)
def test_a_place_that_cannot_be_written_is_refused_at_the_start(
    client: Client,
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    sessions_left: Callable[[Client], tuple[int, int]],
    error: int,
    transient: bool,
) -> None:
    """Also where there are no locks, as in an object store."""

    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("dshuffle.runtime.client.checkpoints.write_object", refuse)
    with pytest.raises(CheckpointError, match=r"memory://checkpoint-files-state/run.json cannot be written") as caught:
        Shuffler(client, dataset, checkpoint="memory://checkpoint-files-state/run.json")
    assert caught.value.transient is transient
    assert sessions_left(client) == (0, 0)


def test_an_open_session_waits_for_the_place_of_its_checkpoint(
    client: Client, dataset: Dataset, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([errno.EACCES, errno.ESTALE])  # nothing is lasting where a checkpoint was written before

    def write(*args: Any) -> None:
        if (error := next(failures, None)) is not None:
            raise OSError(error, os.strerror(error))
        write_object(*args)

    with Shuffler(client, dataset, checkpoint=place) as shuffler:
        monkeypatch.setattr("dshuffle.runtime.client.checkpoints.write_object", write)
        train(shuffler, client)
    assert next(failures, None) is None
    assert caplog.text.count("cannot be written ([Errno 13] Permission denied). It is tried again for 10 s") == 1
    assert read_checkpoint(place, dataset)["epoch"] == 1
