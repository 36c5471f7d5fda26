"""Stores that refuse access, or do not list what they have: S3 and HTTP on a server that answers as told."""

from __future__ import annotations

import http.server
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dshuffle.errors import CorruptChunk, DatasetError, InvalidParameter
from dshuffle.store import open_dataset, verify_dataset
from dshuffle.store.patient_store import is_refusal

pytest.importorskip("obstore", reason="obstore is not installed")

REFUSED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
EMPTY_LISTING = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
SECRET = "hunter2hunter2"


class Bucket:
    """A bucket with the files of a folder, for S3 and HTTP.

    Parameters
    ----------
    folder
        Folder of the files.

    Attributes
    ----------
    absent
        Status of the answer if there is no such file.
    listing
        Status and body of the answer to a request to list.
    open
        Whether files may be read.
    headers
        Headers of all requests.
    """

    def __init__(self, folder: Path) -> None:
        self.absent, self.listing, self.open = 403, (403, REFUSED), True
        self.headers: list[dict[str, str]] = []
        bucket = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                bucket.headers.append({name.lower(): value for name, value in self.headers.items()})
                path, _, query = self.path.partition("?")
                file = folder / path.removeprefix("/bucket").strip("/")
                status, body = 200, b""
                if "list-type" in query or file.is_dir():
                    status, body = bucket.listing
                elif file.is_file() and bucket.open:
                    body = file.read_bytes()
                    if wanted := self.headers.get("Range", "").removeprefix("bytes="):
                        start, _, last = wanted.partition("-")
                        body = body[int(start) : int(last) + 1] if start else body[-int(last) :]
                        status = 206
                else:
                    status = bucket.absent if bucket.open else 403
                    body = REFUSED if status == 403 else b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
                if status == 206:
                    self.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
                self.end_headers()
                self.wfile.write(body)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def options(self) -> dict[str, Any]:
        """Storage options to read it as S3 without credentials."""
        return {"anon": True, "endpoint_url": self.endpoint, "max_retries": 0}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    """A bucket with groups ``v2`` and ``v3``, whose array ``x`` lacks its second and last chunks."""
    for zarr_format in (2, 3):
        group = zarr.create_group(tmp_path / f"v{zarr_format}", zarr_format=zarr_format)  # type: ignore[arg-type]
        x = group.create_array("x", shape=(10,), dtype="i4", chunks=(2,), fill_value=7)
        x[:2], x[4:8] = 1, 2
        group.create_group("below").create_array("y", data=np.arange(10), chunks=(5,))
    server = Bucket(tmp_path)
    yield server
    server.close()


EXPECTED = [1, 1, 7, 7, 2, 2, 2, 2, 7, 7]
URLS = ["s3://bucket/v2", "s3://bucket/v3"]


@pytest.mark.parametrize("url", URLS)
def test_a_refused_chunk_is_the_fill_value_if_the_user_says_so(bucket: Bucket, url: str) -> None:
    dataset = open_dataset(url, arrays=["x"], storage_options=bucket.options, absent_chunks="fill")
    assert dataset.read_rows(np.arange(10))["x"].tolist() == EXPECTED
    again = pickle.loads(pickle.dumps(dataset))  # as on a worker
    assert again.read_rows(np.arange(10))["x"].tolist() == EXPECTED
    assert again.identity == dataset.identity
    dataset.check_unchanged()
    assert verify_dataset(dataset).ok


@pytest.mark.parametrize("url", URLS)
def test_a_refused_chunk_is_an_absent_one_if_the_user_says_so(bucket: Bucket, url: str) -> None:
    dataset = open_dataset(url, arrays=["x"], storage_options=bucket.options, absent_chunks="error")
    assert dataset.read_rows([5, 0])["x"].tolist() == [2, 1]
    with pytest.raises(CorruptChunk, match=r"chunk \(1,\) of array 'x'"):
        dataset.read_rows([2])
    assert len(verify_dataset(dataset).bad) == 2


@pytest.mark.parametrize("url", URLS)
def test_a_refused_chunk_is_an_error_by_default(bucket: Bucket, url: str) -> None:
    dataset = open_dataset(url, arrays=["x", "below/y"], storage_options=bucket.options)
    assert dataset.read_rows([5])["x"].tolist() == [2]
    words = 'AccessDenied.*needs anon=True.*same way if the object does not exist.*absent_chunks="fill"$'
    with pytest.raises(DatasetError, match=words) as caught:
        dataset.read_rows([2])
    assert not isinstance(caught.value, CorruptChunk)


def test_lost_access_is_no_absent_chunk(bucket: Bucket) -> None:
    dataset = open_dataset("s3://bucket/v3", arrays=["x"], storage_options=bucket.options, absent_chunks="fill")
    bucket.open = False
    with pytest.raises(DatasetError, match=r"cannot fetch zarr.json .*AccessDenied"):
        dataset.read_rows([2])
    with pytest.raises(DatasetError, match=r"cannot fetch zarr.json .*AccessDenied"):
        dataset.check_unchanged()


@pytest.mark.parametrize("absent_chunks", [None, "fill", "error"])
def test_absent_chunks_of_other_stores(tmp_path: Path, absent_chunks: Any) -> None:
    array = zarr.create_group(tmp_path / "g").create_array("x", shape=(4,), dtype="i4", chunks=(2,), fill_value=7)
    array[:2] = 1
    dataset = open_dataset(tmp_path / "g", absent_chunks=absent_chunks)
    if absent_chunks == "error":
        with pytest.raises(CorruptChunk):
            dataset.read_rows([3])
    else:
        assert dataset.read_rows([1, 3])["x"].tolist() == [1, 7]
    with pytest.raises(InvalidParameter, match=r"""absent_chunks='zero' is not .* must be "fill", "error" or"""):
        open_dataset(tmp_path / "g", absent_chunks="zero")


@pytest.mark.parametrize("url", URLS)
def test_what_a_store_has_that_may_not_be_listed(bucket: Bucket, url: str, tmp_path: Path) -> None:
    words = r"cannot list .*AccessDenied.* Name the arrays.*zarr.consolidate_metadata"
    with pytest.raises(DatasetError, match=words):
        open_dataset(url, storage_options=bucket.options)
    bucket.listing = (200, EMPTY_LISTING)
    with pytest.raises(DatasetError, match=rf"^{url} cannot be listed.* Name the arrays.*consolidate"):
        open_dataset(url, storage_options=bucket.options)
    with pytest.raises(InvalidParameter, match=r"arrays='z' is not allowed.*cannot be listed, so the names"):
        open_dataset(url, arrays=["z"], storage_options=bucket.options)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_consolidated_metadata_need_no_listing(bucket: Bucket, url: str, tmp_path: Path) -> None:
    zarr.consolidate_metadata(tmp_path / url[-2:])
    assert list(open_dataset(url, storage_options=bucket.options).arrays) == ["x"]


def test_a_refused_group_says_what_to_give(bucket: Bucket) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(DatasetError, match=r"cannot fetch zarr.json .*AccessDenied") as caught:
            open_dataset("s3://bucket/none", storage_options={**bucket.options, **options})
        assert SECRET not in str(caught.value)
        return str(caught.value)

    assert "requester_pays=True" in refusal()
    assert "needs anon=True" in refusal(anon=False, key="AKIAEXAMPLE", secret=SECRET)


@pytest.mark.parametrize("name", ["requester_pays", "request_payer"])
def test_requester_pays(bucket: Bucket, name: str) -> None:
    options = {**bucket.options, "anon": False, "key": "AKIAEXAMPLE", "secret": SECRET, name: True}
    open_dataset("s3://bucket/v3", arrays=["x"], storage_options=options)
    assert {headers.get("x-amz-request-payer") for headers in bucket.headers} == {"requester"}
    bucket.headers.clear()
    open_dataset("s3://bucket/v3", arrays=["x"], storage_options={**options, name: False})
    assert {headers.get("x-amz-request-payer") for headers in bucket.headers} == {None}


@pytest.mark.parametrize("group", ["v2", "v3"])
@pytest.mark.parametrize("listing", [(403, b""), (404, b""), (200, b"<html></html>")])
def test_http_without_a_listing(bucket: Bucket, group: str, listing: tuple[int, bytes]) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    pytest.importorskip("requests", reason="requests is not installed")
    bucket.absent, bucket.listing = 404, listing
    url, options = f"{bucket.endpoint}/bucket/{group}", {"max_retries": 0}
    with pytest.raises(DatasetError, match=r"Name the arrays to open.*consolidated metadata"):
        open_dataset(url, storage_options=options)
    dataset = open_dataset(url, arrays=["x"], storage_options=options)
    assert dataset.read_rows(np.arange(10))["x"].tolist() == EXPECTED
    bucket.absent = 403
    dataset = open_dataset(url, arrays=["x"], storage_options=options, absent_chunks="fill")
    assert dataset.read_rows(np.arange(10))["x"].tolist() == EXPECTED


class StatusError(Exception):
    """As aiohttp's and gcsfs's errors."""

    def __init__(self, **fields: int) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (PermissionError("Access Denied"), True),
        (StatusError(status=403), True),
        (StatusError(code=401), True),
        (StatusError(status=404), False),
        (OSError("<Error><Code>AccessDenied</Code></Error>"), True),
        (PermissionError("<Error><Code>InvalidAccessKeyId</Code></Error>"), False),
        (PermissionError("<Error><Code>ExpiredToken</Code></Error>"), False),
        (ConnectionResetError(), False),
    ],
)
def test_only_refusals_may_mean_absence(error: Exception, refused: bool) -> None:
    assert is_refusal(error) is refused
