"""Partitions as PyTorch's ``IterableDataset``."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter, StaleEpoch
from dshuffle.rows import RowLayout
from dshuffle.runtime import Partition


def partition_of(n=10, shares=None, unequal=False, **more):
    arrays = {"x": np.arange(3 * n, dtype="f4").reshape(n, 3), "y": np.arange(n), **more}
    layout = RowLayout.of({name: (array.dtype, array.shape[1:]) for name, array in arrays.items()})
    rows = layout.empty(n)
    for name, array in arrays.items():
        layout.column(rows, name)[:] = array
    order = np.random.default_rng(0).permutation(n)
    return Partition(layout, rows, order, order, rank=1, epoch=4, shares=shares, unequal=unequal)


def test_without_torch_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "dshuffle.integrations.torch", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'dshuffle\[torch\]'"):
        partition_of().to_torch(2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_on_a_device(torch, device):
    partition = partition_of(10)
    batches = list(partition.to_torch(4, mode="uneven", arrays=("x", "y"), device=device))
    assert {tensor.device.type for batch in batches for tensor in batch} == {device}
    as_dict = next(iter(partition.to_torch(4, device=torch.device(device))))
    assert {name: tensor.device.type for name, tensor in as_dict.items()} == {"x": device, "y": device}
    if device == "cpu":
        assert torch.cat([y for _, y in batches]).tolist() == partition.sample_ids.tolist()
    with pytest.raises(InvalidParameter, match="device='gpu'"):
        partition.to_torch(4, device="gpu")


@pytest.mark.parametrize(("mode", "sizes"), [("drop", [3] * 3), ("pad", [3] * 4), ("uneven", [2, 3, 2, 3])])
def test_batches_are_the_partition_in_its_order(torch, mode, sizes):
    partition = partition_of(10, shares=(10, 11))
    batches = partition.to_torch(3, mode=mode)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    seen = list(loader)
    assert len(loader) == len(batches) == len(seen)
    assert [len(batch["y"]) for batch in seen] == sizes
    ids = torch.cat([batch["y"] for batch in seen]).numpy()
    order = partition.sample_ids
    assert np.array_equal(ids, np.concatenate([order, order])[: len(ids)])
    x = torch.cat([batch["x"] for batch in seen])
    assert x.dtype == torch.float32
    assert np.array_equal(x.numpy()[:, 0], 3 * ids)


def test_tensors_are_the_gathered_arrays_themselves(torch, monkeypatch):
    partition = partition_of()
    taken = []
    take = partition.take
    monkeypatch.setattr(partition, "take", lambda *args: taken.append(take(*args)) or taken[-1])
    batches = partition.to_torch(4, arrays=("y", "x"))
    taken.clear()
    y, x = next(iter(batches))
    assert x.data_ptr() == taken[0]["x"].ctypes.data
    assert y.data_ptr() == taken[0]["y"].ctypes.data
    assert x.is_contiguous()


def test_other_epochs_have_other_orders_of_the_same_samples(torch):
    batches = partition_of(100).to_torch(10)
    orders = {}
    for epoch in (4, 5, 6, 5):
        batches.set_epoch(epoch)
        order = torch.cat([batch["y"] for batch in batches]).tolist()
        assert sorted(order) == list(range(100))
        assert orders.setdefault(epoch, order) == order
    assert len({tuple(order) for order in orders.values()}) == 3


ITEMS = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("byteorder", "<>")
@pytest.mark.parametrize("more", [(), (3,)], ids=str)
def test_values_and_dtypes_are_those_of_the_arrays(torch, item, byteorder, more):
    values = np.array([[1, 0, 100], [0, 2, 300]]).repeat(4, axis=0).astype(item)[:, : more[0] if more else None]
    values = values if more else values[:, 2]
    partition = partition_of(8, z=values.astype(np.dtype(item).newbyteorder(byteorder)))
    for batch in partition.to_torch(3, mode="pad"):
        assert batch["z"].dtype == torch.from_numpy(values).dtype
        assert batch["z"].tolist() == values[batch["y"].numpy()].tolist()
    assert partition["z"].tolist() == values[partition.sample_ids].tolist()  # the rows stay as they are
    array, first, slots = partition.rows("z")
    assert array.dtype.isnative
    width = values[0].size
    found = array[slots][:, first : first + width].reshape(8, *more)
    assert found.tolist() == values[partition.sample_ids].tolist()


@pytest.mark.parametrize(
    "dtype", ["M8[ns]", "m8[s]", ">M8[s]", "S3", "U2", ">U2", [("a", "<i4")], [("a", ">i4")], "V4"]
)
def test_items_that_torch_does_not_have_are_refused_by_name(torch, dtype):
    partition = partition_of(4, z=np.zeros(4, dtype))
    with pytest.raises(InvalidParameter, match=r"arrays\['z'\].dtype=.*a dtype that PyTorch supports"):
        partition.to_torch(2)
    assert len(partition.to_torch(2, arrays=("x", "y"))) == 2


def test_bad_input(torch):
    partition = partition_of(10, name=np.full(10, b"abc"))
    for options, message in (
        ({"batch_size": 11}, r"batch_size=11 is not allowed; it must be in \[1, 10\]"),
        ({"batch_size": 2, "mode": "all"}, "mode='all'"),
        ({"batch_size": 2}, r"arrays\['name'\].dtype='\|S3'.*arrays="),
    ):
        with pytest.raises(InvalidParameter, match=message):
            partition.to_torch(**options)
    with pytest.raises(KeyError, match="no array 'z'"):
        partition.to_torch(2, arrays=("z",))
    batches = partition.to_torch(2, arrays=("x",))
    with pytest.raises(InvalidParameter, match="'batch_size'"):
        batches.load_state_dict(partition.to_torch(3, arrays=("x",)).state_dict())
    partition.close()
    with pytest.raises(StaleEpoch):
        next(iter(batches))


@pytest.mark.parametrize("arrays", [None, ("x", "y")])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 5}, {"batch_size": 5, "drop_last": True}])
def test_a_loader_that_would_stack_batches_is_refused(torch, arrays, options):
    batches = partition_of(50).to_torch(5, arrays=arrays)
    with pytest.raises(InvalidParameter, match=r"batch_size of the DataLoader=\d is not allowed; it must be None"):
        next(iter(torch.utils.data.DataLoader(batches, **options)))


def test_other_processes_are_refused(torch, monkeypatch):
    module = importlib.import_module("dshuffle.integrations.torch")
    batches = partition_of().to_torch(2)
    monkeypatch.setattr(module, "get_worker_info", lambda: type("Info", (), {"num_workers": 2}))
    with pytest.raises(InvalidParameter, match="num_workers=2"):
        next(iter(batches))
