"""S3 servers that fail, fall silent or lie: what is asked again, what is said, and that no wrong row gets through."""

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
from distributed import Client, LocalCluster

from dshuffle import Shuffler
from dshuffle.errors import CorruptChunk, DatasetError, ExchangeError
from dshuffle.store import create_dataset, open_dataset

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


class ToldServer:
    """An HTTP server whose every answer a test chooses, given the request's handler."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answer: Callable[[http.server.BaseHTTPRequestHandler], Answer] = lambda request: Answer(404)
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                told.requests.append(self.path)
                answer = told.answer(self)
                time.sleep(answer.delay)
                try:
                    self.send_response(answer.status)
                    headers = {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", **answer.headers}
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header(
                        "Content-Length", str(len(answer.body) if answer.length is None else answer.length)
                    )
                    self.end_headers()
                    self.wfile.write(answer.body)
                except OSError:
                    pass  # the client has gone
                if answer.length is not None:
                    self.close_connection = True

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def options(self) -> dict[str, Any]:
        """Storage options to reach it by as S3, in little time."""
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "max_retries": 2, "timeout": 20}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def told_server() -> Iterator[ToldServer]:
    server = ToldServer()
    yield server
    server.close()


def xml(code: str, message: str) -> bytes:
    return (
        f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message>'
        f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign></Error>"
    ).encode()


@pytest.mark.parametrize(
    ("answer", "words", "attempts"),
    [
        # The documents of both formats are tried, because a refused object may be one that does not exist.
        (Answer(403, xml("AccessDenied", "Access Denied")), "AccessDenied.*lack the permission", 3),
        (Answer(403, b""), "lack the permission", 3),
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


def serve(folder: Path) -> Any:
    """Answer from the files of a dataset, as S3 does."""

    def answer(request: Any) -> Answer:
        path = request.path.partition("?")[0].removeprefix("/bucket/x")
        if "list-type=2" in request.path:
            names = sorted(p.name for p in folder.iterdir() if p.is_dir())
            inner = "".join(f"<CommonPrefixes><Prefix>x/{name}/</Prefix></CommonPrefixes>" for name in names)
            return Answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{inner}</ListBucketResult>".encode())
        try:
            body = (folder / path.strip("/")).read_bytes()
        except OSError:
            return Answer(404, xml("NoSuchKey", "No"))
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if asked is None:
            return Answer(200, body)
        start = int(asked[1]) if asked[1] else max(0, len(body) - int(asked[2]))
        stop = int(asked[2]) + 1 if asked[1] and asked[2] else len(body)
        return Answer(206, body[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"})

    return answer


def test_a_store_that_recovers(told_server: ToldServer, tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    told_server.answer = right = serve(tmp_path / "d")
    dataset = open_dataset("s3://bucket/x", storage_options=told_server.options)
    failed: set[str] = set()

    def throttled(request: Any) -> Answer:
        if request.path in failed:
            return right(request)
        failed.add(request.path)
        return Answer(503, xml("SlowDown", "Please reduce"))

    told_server.answer = throttled
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    assert dataset.traffic.retries == 3
    assert dataset.traffic.requests == 3


def test_a_store_that_stops_answering_in_the_middle(told_server: ToldServer, tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    told_server.answer = right = serve(tmp_path / "d")
    options = {**told_server.options, "timeout": 0.3, "max_retries": 9}
    dataset = open_dataset("s3://bucket/x", storage_options=options)
    told_server.answer = lambda request: Answer(delay=5.0) if request.path.endswith("c/5/0") else right(request)
    rows = dataset.layout.empty(100)
    with pytest.raises(
        DatasetError, match=r"cannot fetch x/c/5/0 of s3://bucket/x: .*in time\.; tried [23] times"
    ) as caught:
        dataset.read_into(rows, np.arange(100), np.arange(100))
    assert not isinstance(caught.value, CorruptChunk)
    told_server.answer = right
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])


def whole(answer: Answer) -> Answer:
    return Answer(200, answer.body * 9)


def fewer(answer: Answer) -> Answer:
    return Answer(206, answer.body[:-1], answer.headers)


def more(answer: Answer) -> Answer:
    return Answer(206, answer.body + b"x", answer.headers)


def another(answer: Answer) -> Answer:
    return Answer(206, answer.body[::-1], answer.headers)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [whole, fewer, more, another])
@pytest.mark.parametrize("which", ["bytes=-", "bytes=[0-9]"])  # a shard's index, its chunks
@pytest.mark.parametrize("ids", [[0], [8, 12]])
def test_a_range_answered_wrongly_never_gives_rows(
    told_server: ToldServer, tmp_path: Path, wrong: Any, which: str, ids: list[int]
) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5, shard_rows=50)
    told_server.answer = right = serve(tmp_path / "d")
    dataset = open_dataset("s3://bucket/x", storage_options=told_server.options)
    np.testing.assert_array_equal(dataset.read_rows(ids)["x"], X[ids])

    def lie(request: Any) -> Answer:
        answer = right(request)
        return wrong(answer) if re.match(which, request.headers.get("Range", "")) else answer

    told_server.answer = lie
    with pytest.raises(DatasetError, match=r"wrongly|checksum|too short"):
        dataset.read_rows(ids)


def test_without_credentials(monkeypatch: Any, told_server: ToldServer) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    endpoint = told_server.options["endpoint_url"]
    options = {"endpoint": endpoint, "metadata_endpoint": endpoint}
    with pytest.raises(DatasetError, match=r"s3://bucket/x.*No credentials were found.*AWS_ACCESS_KEY_ID") as caught:
        open_dataset("s3://bucket/x", storage_options=options)
    assert "tried" not in str(caught.value)
    with pytest.raises(DatasetError, match="s3://bucket/x"):
        open_dataset("s3://bucket/x", storage_options={"endpoint": endpoint, "anon": True})
    assert "/bucket/x/zarr.json" in told_server.requests, "an anonymous request goes out without credentials"


def test_nobody_listens() -> None:
    options = {"key": KEY, "secret": SECRET, "endpoint": "http://127.0.0.1:9", "max_retries": 1}
    with pytest.raises(DatasetError, match=r"Nothing is listening at the endpoint\.; tried 2 times"):
        open_dataset("s3://bucket/x", storage_options=options)


def sample_ids(partition: Any) -> Any:
    return partition.sample_ids


@pytest.mark.slow
def test_an_epoch_survives_a_silent_store(told_server: ToldServer, tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5)
    told_server.answer = right = serve(tmp_path / "d")
    options = {**told_server.options, "timeout": 0.5, "max_retries": 20}
    dataset = open_dataset("s3://bucket/x", storage_options=options)
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        Shuffler(client, dataset, assignment="global", delivery="storage") as shuffler,
    ):
        list(shuffler.epochs(1))
        # All chunks, because one of them may be in the caches of both workers.
        told_server.answer = lambda request: Answer(delay=5.0) if "/c/" in request.path else right(request)
        with pytest.raises(ExchangeError, match=r"cannot fetch x/c/\d+/0 of s3://bucket/x.*tried \d times"):
            list(shuffler.epochs(3))  # the exchange for the first of these may have been made in time
        told_server.answer = right
        [epoch] = shuffler.epochs(1)
        trained = np.concatenate(client.gather(epoch.map(sample_ids)))
        np.testing.assert_array_equal(np.sort(trained), np.arange(100))
        assert SECRET not in "".join(record.to_json() for record in shuffler.records) + repr(shuffler)
