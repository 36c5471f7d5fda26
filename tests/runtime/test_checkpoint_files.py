"""Checkpoints in files: for their user alone, no link is replaced, and one open session writes each of them."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle import Shuffler, create_dataset
from dshuffle.errors import CheckpointError, DatasetError, MixingWarning
from dshuffle.runtime.client.checkpoints import Checkpoint
from dshuffle.store.places import write_object

HOLD = """
import sys
import dshuffle
from dshuffle.runtime.client.checkpoints import Checkpoint
file = Checkpoint(sys.argv[1], dshuffle.create_dataset(None, {"x": [1.0]}))
file.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def client(cluster_of):
    with cluster_of({str(name): {} for name in range(3)}) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def dataset():
    return create_dataset("memory://checkpoint-files", {"x": np.arange(90.0)}, chunk_rows=10, overwrite=True)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "new" / "run.json"


def train(shuffler, client):
    for epoch in shuffler.epochs(1):
        client.gather(epoch.map(len))


def names(place):
    return sorted(os.listdir(place.parent))


def test_only_the_user_can_read_a_checkpoint(client, dataset, place):
    earlier = os.umask(0)
    try:
        with Shuffler(client, dataset, checkpoint=place) as shuffler:
            train(shuffler, client)
            assert names(place) == ["run.json", "run.json.lock"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in place.parent.iterdir()} == {0o600}
    finally:
        os.umask(earlier)


def test_a_link_is_refused_before_a_session_opens(client, dataset, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "run.json"
    with Shuffler(client, dataset, checkpoint=target) as shuffler:
        train(shuffler, client)
    before = target.read_bytes()
    link.symlink_to(target)
    with pytest.raises(CheckpointError, match=r"cannot be read .*symbolic links"):
        Shuffler.resume(client, dataset, link)
    with Shuffler(client, dataset) as shuffler, pytest.raises(CheckpointError, match="is a symbolic link"):
        shuffler.save(link)
    assert link.is_symlink()
    assert target.read_bytes() == before


class Planted:
    """Whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("others can write it", "run.json has the mode 0620, so other users can write it. Change it to 0600"),
        ("link", "cannot be read .*symbolic links"),
        ("other user", r"belongs to the user \d+, and not to 12345"),
        ("folder", ""),  # whatever others put there is theirs
        ("its user", ""),
    ],
)
def test_a_checkpoint_that_another_user_may_have_written_is_not_read(
    client, dataset, place, tmp_path, monkeypatch, way, says
):
    bait = tmp_path / "ran"
    with Shuffler(client, dataset, checkpoint=place) as shuffler:
        shuffler.attach(Planted(bait))
        train(shuffler, client)
    if way == "others can write it":
        place.chmod(0o620)
    elif way == "link":
        place = place.with_name("link.json")
        place.symlink_to("run.json")
    elif way == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif way == "folder":
        place.parent.chmod(0o777)
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


def test_two_open_sessions_cannot_have_one_checkpoint(client, dataset, place):
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
def test_a_checkpoint_is_read_once_nobody_else_writes_it(client, dataset, place, monkeypatch, how):
    """The other session trains on an epoch and ends, just before this one has the lock."""
    other = Shuffler(client, dataset, checkpoint=place)
    train(other, client)

    lock = Checkpoint.lock

    def locked(self, **options):
        train(other, client)
        other.close()
        lock(self, **options)

    monkeypatch.setattr(Checkpoint, "lock", locked)
    if how == "resume":
        with Shuffler.resume(client, dataset, place) as shuffler:
            assert shuffler.next_epoch == 2
    else:
        assert (
            dshuffle.run_with_retries(lambda shuffler: shuffler.next_epoch, lambda: client, dataset, checkpoint=place)
            == 2
        )


def test_a_session_that_does_not_open_leaves_its_checkpoint_to_others(client, dataset, place, monkeypatch):
    def refuse(*_):
        raise MixingWarning("no")

    with monkeypatch.context() as patch:
        patch.setattr("dshuffle.runtime.client.shuffler.install_plugin", refuse)
        with pytest.raises(MixingWarning, match="no") as caught:
            Shuffler(client, dataset, checkpoint=place)
    with pytest.raises(MixingWarning):
        Shuffler(client, dataset, assignment="partial:1.0", checkpoint=place)
    Checkpoint(place, dataset).lock()
    assert caught.value.__traceback__ is not None  # nobody had to free the frames of the error


@pytest.mark.slow
def test_a_lock_goes_away_with_its_process(dataset, place):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"in use by another open session .process {holder.pid} on "):
            Checkpoint(place, dataset).lock()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    Checkpoint(place, dataset).lock()


@pytest.mark.parametrize(
    ("error", "transient"), [(OSError(errno.EROFS, "read only"), False), (DatasetError("busy", transient=True), True)]
)
def test_a_place_that_cannot_be_written_is_refused_at_the_start(
    client, dataset, monkeypatch, sessions_left, error, transient
):
    """Also where there are no locks, as in an object store."""

    def refuse(*_):
        raise error

    monkeypatch.setattr("dshuffle.runtime.client.checkpoints.write_object", refuse)
    with pytest.raises(CheckpointError, match=r"memory://checkpoint-files-state/run.json cannot be written") as caught:
        Shuffler(client, dataset, checkpoint="memory://checkpoint-files-state/run.json")
    assert caught.value.transient is transient
    assert sessions_left(client) == (0, 0)


def test_an_open_session_waits_for_the_place_of_its_checkpoint(client, dataset, place, monkeypatch, caplog):
    failures = iter([errno.EACCES, errno.ESTALE])  # nothing is lasting where a checkpoint was written before

    def write(*args):
        if (error := next(failures, None)) is not None:
            raise OSError(error, os.strerror(error))
        write_object(*args)

    with Shuffler(client, dataset, checkpoint=place) as shuffler:
        monkeypatch.setattr("dshuffle.runtime.client.checkpoints.write_object", write)
        train(shuffler, client)
    assert next(failures, None) is None
    assert caplog.text.count("stays as it is ([Errno 13] Permission denied). It is tried again for 10 s") == 1
    assert Checkpoint(place, dataset).read_state()["epoch"] == 1
