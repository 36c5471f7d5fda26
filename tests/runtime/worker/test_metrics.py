"""What a worker says of its partitions and exchanges: its log and its Prometheus metrics."""

import re
import urllib.request

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.planning import ShuffleSpec
from dshuffle.runtime.memory import member_nbytes


@pytest.fixture
def counted():
    """Read the metrics of a worker."""

    def counted(port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            found = re.findall(r"^dshuffle_worker_(\w+) (\S+)$", answer.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in found if not name.endswith("_created")}

    return counted


@pytest.mark.slow
def test_workers_count_their_exchanges_and_partitions(tmp_path, counted):
    pytest.importorskip("prometheus_client")
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((600, 3))})
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        ports = client.run(lambda dask_worker: dask_worker.http_server.port)
        with Shuffler(client, dataset) as shuffler:
            for epoch in shuffler.epochs(3):
                client.gather(epoch.map(len))
            found = [counted(ports[address]) for address in shuffler.addresses]
            needed = member_nbytes(ShuffleSpec(600, 2, shuffler.choices), dataset.layout)
            records = shuffler.records
        after = [counted(ports[address]) for address in ports]
        logs = client.get_worker_logs()
    for rank, one in enumerate(found):
        assert one["exchanges_total"] == 3
        # The record of the last epoch has its exchange.
        assert one["sent_bytes_total"] == sum(record.wire_sent_bytes[rank] for record in records)
        assert one["received_bytes_total"] == sum(record.wire_received_bytes[rank] for record in records) > 0
        assert one["exchange_seconds_total"] > 0
        assert one["partition_bytes"] == needed
    assert sum(one["store_bytes_total"] for one in found) == sum(record.store_bytes for record in records) > 0
    assert [one["partition_bytes"] for one in after] == [0, 0]
    for lines in logs.values():
        said = [message for _, message in lines if "dshuffle session" in message]
        assert [("reserves" in one, "freed" in one) for one in said] == [(False, True), (True, False)]  # newest first
