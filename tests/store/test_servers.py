"""Servers of S3 and HTTP that fail, refuse, fall silent or lie: what is asked again and said, and no wrong row."""

from __future__ import annotations

import http.server
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from zarr.abc.store import Store
from zarr.storage import ObjectStore, WrapperStore

from dshuffle import Shuffler
from dshuffle.errors import CorruptChunk, DatasetError, ExchangeError, InvalidParameter
from dshuffle.store import create_dataset, open_dataset
from dshuffle.store.places import PatientStore

from ..conftest import in_a_fork

obstore = pytest.importorskip("obstore", reason="obstore is not installed")

KEY = "AKIAEXAMPLE"
SECRET = "hunter2hunter2"
X = np.arange(600.0).reshape(100, 6)
IDS = np.array([99, 3, 3, 50, 0])


@dataclass
class Answer:
    """What the server says: a status, a body, and what may be wrong with them."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    delay: float = 0.0


Request = http.server.BaseHTTPRequestHandler


class ToldServer(http.server.ThreadingHTTPServer):
    """An HTTP server whose every answer a test chooses, given the request. It counts its connections."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.open = self.peak = 0
        self.answer: Callable[[Request], Answer] = lambda request: Answer(404)
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def setup(self) -> None:
                super().setup()
                told.open += 1
                told.peak = max(told.peak, told.open)

            def finish(self) -> None:
                super().finish()
                told.open -= 1

            def do_GET(self) -> None:
                told.requests.append(self.path)
                answer = told.answer(self)
                time.sleep(answer.delay)
                length = len(answer.body) if answer.length is None else answer.length
                headers = {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "Content-Length": length}
                try:
                    self.send_response(answer.status)
                    for name, value in (headers | answer.headers).items():
                        self.send_header(name, str(value))
                    self.end_headers()
                    self.wfile.write(answer.body)
                except OSError:
                    pass  # the client has gone
                if answer.length is not None:
                    self.close_connection = True

        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.options = {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint, "max_retries": 2, "timeout": 20}


@pytest.fixture
def told_server() -> Iterator[ToldServer]:
    server = ToldServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def xml(code: str, message: str) -> bytes:
    return (
        f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message>'
        f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign></Error>"
    ).encode()


REFUSED = Answer(403, xml("AccessDenied", "Access Denied"))
ABSENT = Answer(404, xml("NoSuchKey", "No"))
NOTHING_LISTED = Answer(
    200, b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


def serve(folder: Path, absent: Answer = ABSENT, listing: Answer | None = None) -> Callable[[Request], Answer]:
    """Answer from the files of a folder as S3 does, which is the bucket ``bucket``."""

    def answer(request: Request) -> Answer:
        path = folder / request.path.partition("?")[0].removeprefix("/bucket").strip("/")
        if "list-type=2" in request.path or path.is_dir():
            if listing is not None:
                return listing
            names = sorted(p.name for p in (folder / "x").iterdir() if p.is_dir())
            inner = "".join(f"<CommonPrefixes><Prefix>x/{name}/</Prefix></CommonPrefixes>" for name in names)
            return Answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{inner}</ListBucketResult>".encode())
        try:
            body = path.read_bytes()
        except OSError:
            return absent
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if asked is None:
            return Answer(200, body)
        start = int(asked[1]) if asked[1] else max(0, len(body) - int(asked[2]))
        stop = int(asked[2]) + 1 if asked[1] and asked[2] else len(body)
        return Answer(206, body[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"})

    return answer


# -- Servers that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words", "attempts"),
    [
        (REFUSED, "AccessDenied.*lack the permission.*anon=True.*requester_pays=True", 1),
        (Answer(403, b""), "lack the permission", 1),
        (Answer(403, xml("RequestTimeTooSkewed", "The difference is too large")), "clock of this machine is wrong", 1),
        (Answer(403, xml("InvalidAccessKeyId", "No such key")), "credentials are wrong", 1),
        (Answer(400, xml("InvalidRequest", "Bad")), "InvalidRequest: Bad", 1),
        (Answer(301, xml("PermanentRedirect", "Elsewhere")), "another region", 1),
        (Answer(503, xml("SlowDown", "Please reduce")), r"SlowDown.*; tried 3 times in \d", 3),
        (Answer(500, b"oops"), r"500 .*; tried 3 times", 3),
        (Answer(429, b"wait"), r"429 .*; tried 3 times", 3),
        (Answer(200, b"{", length=10), r"; tried 3 times", 3),
    ],
)
def test_what_is_asked_again_and_what_is_said(
    told_server: ToldServer, answer: Answer, words: str, attempts: int
) -> None:
    told_server.answer = lambda request: answer
    with pytest.raises(DatasetError, match=rf"cannot fetch zarr.json of s3://bucket/x: .*{words}") as caught:
        open_dataset("s3://bucket/x", storage_options=told_server.options)
    assert len(told_server.requests) == attempts
    shown = str(caught.value) + "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert KEY not in shown


def test_a_store_that_recovers(told_server: ToldServer, tmp_path: Path) -> None:
    create_dataset(tmp_path / "x", {"x": X}, chunk_rows=10)
    told_server.answer = right = serve(tmp_path)
    dataset = open_dataset("s3://bucket/x", storage_options=told_server.options)
    failed: set[str] = set()

    def throttled(request: Request) -> Answer:
        if request.path in failed:
            return right(request)
        failed.add(request.path)
        return Answer(503, xml("SlowDown", "Please reduce"))

    told_server.answer = throttled
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    assert (dataset.traffic.retries, dataset.traffic.requests) == (3, 3)


def test_a_store_that_stops_answering_in_the_middle(told_server: ToldServer, tmp_path: Path) -> None:
    create_dataset(tmp_path / "x", {"x": X}, chunk_rows=10)
    told_server.answer = right = serve(tmp_path)
    options = {**told_server.options, "timeout": 0.3, "max_retries": 9}
    dataset = open_dataset("s3://bucket/x", storage_options=options)
    told_server.answer = lambda request: Answer(delay=5.0) if request.path.endswith("c/5/0") else right(request)
    words = r"cannot fetch x/c/5/0 of s3://bucket/x: .*in time\.; tried [23] times"
    with pytest.raises(DatasetError, match=words) as caught:
        dataset.read_into(dataset.layout.empty(100), np.arange(100), np.arange(100))
    assert not isinstance(caught.value, CorruptChunk)
    told_server.answer = right
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        lambda answer: Answer(200, answer.body * 9),
        lambda answer: Answer(206, answer.body[:-1], answer.headers),
        lambda answer: Answer(206, answer.body + b"x", answer.headers),
        lambda answer: Answer(206, answer.body[::-1], answer.headers),
    ],
    ids=["whole", "fewer", "more", "another"],
)
@pytest.mark.parametrize("which", ["bytes=-", "bytes=[0-9]"])  # a shard's index, its chunks
@pytest.mark.parametrize("ids", [[0], [8, 12]])
def test_a_range_answered_wrongly_never_gives_rows(
    told_server: ToldServer, tmp_path: Path, wrong: Any, which: str, ids: list[int]
) -> None:
    create_dataset(tmp_path / "x", {"x": X}, chunk_rows=5, shard_rows=50)
    told_server.answer = right = serve(tmp_path)
    dataset = open_dataset("s3://bucket/x", storage_options=told_server.options)
    np.testing.assert_array_equal(dataset.read_rows(ids)["x"], X[ids])

    def lie(request: Request) -> Answer:
        answer = right(request)
        return wrong(answer) if re.match(which, request.headers.get("Range", "")) else answer

    told_server.answer = lie
    with pytest.raises(DatasetError, match=r"wrongly|checksum|too short"):
        dataset.read_rows(ids)


def test_without_credentials_or_a_server(monkeypatch: Any, told_server: ToldServer) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    options = {"endpoint": told_server.endpoint, "metadata_endpoint": told_server.endpoint}
    with pytest.raises(DatasetError, match=r"s3://bucket/x.*No credentials were found.*AWS_ACCESS_KEY_ID") as caught:
        open_dataset("s3://bucket/x", storage_options=options)
    assert "tried" not in str(caught.value)
    with pytest.raises(DatasetError, match="s3://bucket/x"):
        open_dataset("s3://bucket/x", storage_options={"endpoint": told_server.endpoint, "anon": True})
    assert "/bucket/x/zarr.json" in told_server.requests, "an anonymous request goes out without credentials"
    options = {**told_server.options, "endpoint_url": "http://127.0.0.1:9", "max_retries": 1}
    with pytest.raises(DatasetError, match=r"Nothing is listening at the endpoint\.; tried 2 times"):
        open_dataset("s3://bucket/x", storage_options=options)


@pytest.mark.slow
def test_an_epoch_survives_a_silent_store(client: Client, told_server: ToldServer, tmp_path: Path) -> None:
    create_dataset(tmp_path / "x", {"x": X}, chunk_rows=5)
    told_server.answer = right = serve(tmp_path)
    options = {**told_server.options, "timeout": 0.5, "max_retries": 20}
    dataset = open_dataset("s3://bucket/x", storage_options=options)
    with Shuffler(client, dataset, assignment="global", delivery="storage") as shuffler:
        list(shuffler.epochs(1))
        # All chunks, because one of them may be in the caches of both workers.
        told_server.answer = lambda request: Answer(delay=5.0) if "/c/" in request.path else right(request)
        with pytest.raises(ExchangeError, match=r"cannot fetch x/c/\d+/0 of s3://bucket/x.*tried \d times"):
            list(shuffler.epochs(3))  # the exchange for the first of these may have been made in time
        told_server.answer = right
        [epoch] = shuffler.epochs(1)
        trained = np.concatenate(client.gather(epoch.map(lambda partition: partition.sample_ids)))
        np.testing.assert_array_equal(np.sort(trained), np.arange(100))
        assert SECRET not in "".join(record.to_json() for record in shuffler.records) + repr(shuffler)


# -- Servers that refuse access, or do not list what they have ---------------------------------------------------------

EXPECTED = [1, 1, 7, 7, 2, 2, 2, 2, 7, 7]


@pytest.fixture(params=[2, 3])
def group(request: Any, told_server: ToldServer, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A group in a bucket, whose array ``x`` lacks its second and last chunks, and options to read it."""
    group = zarr.create_group(tmp_path / "x", zarr_format=request.param)
    x = group.create_array("x", shape=(10,), dtype="i4", chunks=(2,), fill_value=7)
    x[:2], x[4:8] = 1, 2
    group.create_group("below").create_array("y", data=np.arange(10), chunks=(5,))
    told_server.answer = serve(tmp_path, REFUSED, REFUSED)
    return "s3://bucket/x", {"anon": True, "endpoint_url": told_server.endpoint, "max_retries": 0}


@pytest.mark.parametrize("group", [3], indirect=True)
def test_a_refused_chunk_is_an_error(group: Any, told_server: ToldServer, tmp_path: Path) -> None:
    url, options = group
    zarr.open_group(tmp_path / "x")["x"][:] = 2
    dataset = open_dataset(url, arrays=["x", "below/y"], storage_options=options)
    assert dataset.read_rows([5, 0])["x"].tolist() == [2, 2]
    (tmp_path / "x/x/c/1").unlink()
    words = "AccessDenied.*the object does not exist in a store that may not be listed.*needs anon=True"
    with pytest.raises(DatasetError, match=words) as caught:
        dataset.read_rows([2])
    assert not isinstance(caught.value, CorruptChunk)
    told_server.answer = lambda request: REFUSED
    with pytest.raises(DatasetError, match=r"cannot fetch zarr.json .*AccessDenied"):
        dataset.check_unchanged()


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
@pytest.mark.parametrize("group", [3], indirect=True)
def test_what_a_store_has_that_may_not_be_listed(
    group: tuple[str, dict[str, Any]], told_server: ToldServer, tmp_path: Path
) -> None:
    url, options = group
    words = r"cannot list .*AccessDenied.* Name the arrays.*zarr.consolidate_metadata"
    with pytest.raises(DatasetError, match=words):
        open_dataset(url, storage_options=options)
    told_server.answer = serve(tmp_path, REFUSED, NOTHING_LISTED)
    with pytest.raises(DatasetError, match=rf"^{url} cannot be listed.* Name the arrays.*consolidate"):
        open_dataset(url, storage_options=options)
    with pytest.raises(DatasetError, match="AccessDenied"):
        open_dataset(url, arrays=["z"], storage_options=options)
    zarr.open_group(tmp_path / "x")["x"][:] = 2  # no chunk is absent
    zarr.consolidate_metadata(tmp_path / "x")
    assert list(open_dataset(url, storage_options=options).arrays) == ["x"]


@pytest.mark.parametrize("listing", [(403, b""), (200, b"<html></html>")])
def test_http_without_a_listing(
    group: tuple[str, dict[str, Any]], told_server: ToldServer, tmp_path: Path, listing: tuple[int, bytes]
) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    pytest.importorskip("requests", reason="requests is not installed")
    told_server.answer = serve(tmp_path, Answer(404), Answer(*listing))
    url, options = f"{told_server.endpoint}/bucket/x", {"max_retries": 0}
    with pytest.raises(DatasetError, match=r"Name the arrays to open.*consolidated metadata"):
        open_dataset(url, storage_options=options)
    dataset = open_dataset(url, arrays=["x"], storage_options=options)
    assert dataset.read_rows(np.arange(10))["x"].tolist() == EXPECTED


# -- Whatever zarr reads from our stores passes through their get: retries, limits and counts hold ---------------------


def test_every_way_to_read_is_known() -> None:
    """A release of zarr with another one fails here, and not in somebody's training."""
    forwarded = {name for name in vars(WrapperStore) if "get" in name}
    assert forwarded <= {"get", "get_partial_values", "get_sync", "_get_many", "get_ranges"}, forwarded
    for name in ("_get_many", "get_ranges"):
        assert getattr(PatientStore, name, None) is getattr(Store, name, None)
    assert {"get", "get_sync", "_supports_sync_io"} <= vars(PatientStore).keys()


def test_an_absent_chunk_is_an_error_with_every_codec_pipeline(tmp_path: Path) -> None:
    pipeline = pytest.importorskip("zarr.core.codec_pipeline")
    if not hasattr(pipeline, "FusedCodecPipeline"):
        pytest.skip("this release of zarr has one codec pipeline")
    mark = {"dshuffle": {"version": 1, "complete": True}}
    group = zarr.create_group(tmp_path / "g", attributes=mark)
    array = group.create_array("x", shape=X.shape, dtype="f4", chunks=(4, 2))
    array[:] = X
    (tmp_path / "g/x/c/0/0").unlink()
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.FusedCodecPipeline"}):
        dataset = open_dataset(tmp_path / "g")
        with pytest.raises(CorruptChunk, match="x/c/0/0"):
            dataset.read_rows([0])
        assert dataset.traffic.requests > 0


@pytest.fixture
def served(told_server: ToldServer, tmp_path: Path) -> str:
    """The URL of a dataset of 100 chunks on a slow server."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    create_dataset(tmp_path / "x", {"x": np.arange(200)}, chunk_rows=2)
    right = serve(tmp_path)

    def slow(request: Request) -> Answer:
        answer = right(request)
        answer.delay = 0.005
        return answer

    told_server.answer = slow
    return f"{told_server.endpoint}/bucket/x"


def test_few_connections_to_a_server(served: str, told_server: ToldServer) -> None:
    dataset = open_dataset(served, arrays=["x"])
    np.testing.assert_array_equal(dataset.read_rows(np.arange(200))["x"], np.arange(200))
    assert 1 < told_server.peak <= 16


def test_a_store_that_does_not_survive_a_fork_says_so_at_once(served: str, tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": np.arange(20)}, chunk_rows=2)
    store = ObjectStore(obstore.store.LocalStore(str(tmp_path / "d")), read_only=True)
    for dataset in (open_dataset(store), open_dataset(served, arrays=["x"])):
        assert dataset.read_rows([7])["x"] == [7]
        words = "DatasetError: cannot fetch .* in a process that was forked after its parent had used such a.* spawn"
        assert re.match(words, in_a_fork(lambda dataset=dataset: dataset.read_rows([9])))
        assert dataset.read_rows([9])["x"] == [9]
    assert re.match(words, in_a_fork(lambda: open_dataset(store)))
    assert in_a_fork(lambda: open_dataset(tmp_path / "d").read_rows([9])["x"].tolist()) == "returned [9]"


def test_wrong_limits(tmp_path: Path) -> None:
    for value in (-1, True, 2.5, "3"):
        with pytest.raises(InvalidParameter, match=r"storage_options\['max_retries'\]="):
            open_dataset(tmp_path, storage_options={"max_retries": value})
