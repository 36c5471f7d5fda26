"""The next epoch's rows arrive while this one is trained on, which neither waits for them nor sees them.

By how much an exchange makes training slower is measured by tests/benchmarks/promises.py.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset

pytestmark = pytest.mark.slow

N_EPOCHS = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """24 MB in rows of 2 KiB."""
    x = np.random.default_rng(0).integers(0, 2**62, (12_000, 250))
    return create_dataset(str(tmp_path_factory.mktemp("large") / "d.zarr"), {"x": x})


@pytest.mark.parametrize("delivery", ["peer", "storage", "server"])
def test_rows_arrive_during_training_and_leave_its_partition_alone(processes, large, tmp_path, eventually, delivery):
    def fingerprints(partition, end):
        """Hashes of the partition, the last of them after the next epoch's rows have arrived."""
        hashes, ended = set(), False
        while not ended:
            ended = Path(end).exists()
            rows = hashlib.sha1(partition.sample_ids)
            for batch in partition.batches(512):
                rows.update(batch["x"])
            hashes.add(rows.hexdigest())
        return hashes

    def is_ready(dask_scheduler):
        [coordinator] = dask_scheduler.plugins["dshuffle"].coordinators.values()
        return coordinator.machine.is_ready

    partitions = set()
    with Shuffler(processes, large, delivery=delivery) as shuffler:
        for epoch in shuffler.epochs(N_EPOCHS):
            end = tmp_path / f"end of epoch {epoch.number}"
            futures = epoch.map(fingerprints, str(end))
            if epoch.number < N_EPOCHS - 1:
                eventually(lambda: processes.run_on_scheduler(is_ready), seconds=60)
            assert not any(future.done() for future in futures)
            end.touch()
            hashes = processes.gather(futures)
            assert [len(one) for one in hashes] == [1, 1, 1]
            partitions |= set.union(*hashes)
        assert [record.waited_seconds for record in shuffler.records[1:]] == [0] * (N_EPOCHS - 1)
    assert len(partitions) == 3 * N_EPOCHS
