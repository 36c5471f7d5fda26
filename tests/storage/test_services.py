"""Storage services: real ones where they are installed, and checks that see through false ones."""

import os
import shutil
import socket
import struct
import threading
from contextlib import contextmanager

import click
import pytest
from click.testing import CliRunner

import nfs
import places
import s3
import sharedfs


@contextmanager
def running(service, place, directory):
    """A service on this machine; a skip where it cannot run."""
    missing = [program for program in service.programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if service.root and os.geteuid() != 0:
        pytest.skip(f"{service.name} needs root")
    if any(place.listens(port) for port in service.ports):
        pytest.skip(f"a port of {service.ports} is taken")
    try:
        yield service.start(place, directory)
    finally:
        service.stop(place)


@pytest.mark.slow
def test_nfs_is_served(tmp_path):
    place, data = places.this_machine(tmp_path / "state"), tmp_path / "data"
    with running(nfs.SERVICE, place, data) as said:
        assert "nfs://127.0.0.1/shared (NFS version 3" in said
        assert nfs.SERVICE.running(place)
        with pytest.raises(click.ClickException, match="does not export /other"):
            nfs.check("nfs://127.0.0.1/other")
        with pytest.raises(click.ClickException, match="is already running"):
            nfs.SERVICE.start(place, data)
    assert not nfs.SERVICE.running(place)
    with pytest.raises(click.ClickException, match="no NFS server answers"):
        nfs.check("nfs://127.0.0.1/shared")


@pytest.mark.slow
def test_s3_is_served_and_keeps_its_objects(tmp_path):
    place, data = places.this_machine(tmp_path / "state"), tmp_path / "data"
    url, content = f"http://127.0.0.1:{s3.PORT}", os.urandom(100_000)
    with running(s3.SERVICE, place, data) as said:
        assert f"export AWS_ENDPOINT_URL={url}" in said
        s3.request("PUT", f"{url}/{s3.BUCKET}/kept", content)
        assert s3.request("GET", f"{url}/{s3.BUCKET}/kept", headers={"range": "bytes=-10"}) == (206, content[-10:])
        with pytest.raises(click.ClickException, match="answered with 404"):
            s3.request("GET", f"{url}/{s3.BUCKET}/missing")
        assert s3.SERVICE.stop(place) == ["s3.gateway", "s3.storage", "s3.monitor"]
        s3.SERVICE.start(place, data)
        assert s3.request("GET", f"{url}/{s3.BUCKET}/kept") == (200, content)
        elsewhere = places.Place("other", "127.0.0.2", place.state)
        with pytest.raises(click.ClickException, match=r"belongs to a server at 127\.0\.0\.1"):
            s3.launch(elsewhere, data, [])


@pytest.mark.slow
def test_the_shared_file_system_is_mounted(tmp_path):
    if shutil.which("ip") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs iproute2 and /dev/fuse")
    try:
        address = sharedfs.own_address()
    except click.ClickException as error:
        pytest.skip(error.message)
    place = places.this_machine(tmp_path / "state", address)
    path = sharedfs.mount_point(place)
    with running(sharedfs.SERVICE, place, tmp_path / "data"):
        assert sharedfs.is_shared(sharedfs.mounted(place, path))
        (path / "file").write_bytes(b"there")
        assert (path / "file").read_bytes() == b"there"
        place.run("umount", "-l", str(path))
        # Without the mount, nothing can be written beside it.
        with pytest.raises(OSError, match="Read-only"):
            (path / "file").write_bytes(b"here")
        with pytest.raises(click.ClickException, match="is not a MooseFS mount"):
            sharedfs.check(str(path))
    assert not path.exists()


def test_ranges_answered_with_200_are_refused(monkeypatch):
    monkeypatch.setattr(s3, "request", lambda *_, **__: (200, bytes(4096)))
    with pytest.raises(click.ClickException, match="status 200 and 4096 bytes; it must be 206"):
        s3.check("http://127.0.0.1:1")


def test_an_error_names_neither_key_nor_secret():
    with pytest.raises(click.ClickException) as caught:
        s3.check("http://127.0.0.1:1")
    assert "no S3 server answers at http://127.0.0.1:1" in caught.value.message
    assert s3.SECRET not in caught.value.message


@pytest.mark.parametrize("answer", [b"", b"\x80\x00\x00\x20half", struct.pack(">7I", 1 << 31 | 24, 0, 1, 0, 0, 0, 1)])
def test_what_speaks_no_nfs_is_refused(answer, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        monkeypatch.setattr(nfs, "NFS_PORT", server.getsockname()[1])
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(click.ClickException, match="no NFS server answers"):
            nfs.check("nfs://127.0.0.1/shared")
        thread.join()


@pytest.mark.parametrize("url", ["http://127.0.0.1/shared", "nfs:///shared", "nfs://host"])
def test_urls_that_are_not_of_nfs_are_refused(url):
    with pytest.raises(click.ClickException, match="must be like nfs://"):
        nfs.check(url)


def test_a_directory_is_no_shared_file_system(tmp_path):
    with pytest.raises(click.ClickException, match="is not a MooseFS mount"):
        sharedfs.check(str(tmp_path))


@pytest.mark.parametrize("service", [s3.SERVICE, sharedfs.SERVICE])
def test_a_directory_with_other_things_is_left_alone(service, tmp_path):
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(click.ClickException, match="nothing was changed"):
        service.launch(places.this_machine(tmp_path / "state"), tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("module", "package"), [(nfs, "nfs-ganesha"), (s3, "radosgw"), (sharedfs, "moosefs-master")])
def test_a_missing_package_is_named(module, package, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(module.SERVICE_COMMANDS, ["start", str(tmp_path / "data")])
    assert result.exit_code == 1
    assert "apt-get install" in result.output
    assert package in result.output
    assert not (tmp_path / "data").exists()
