"""Workers on the same machine share its link: what is measured for them, and which ranks they get."""

import dataclasses
from types import SimpleNamespace

import pytest
from distributed import Client

from dshuffle.planning.cost import ClusterRates, predict
from dshuffle.planning.cost.explain import _why
from dshuffle.planning.cost.job import Work
from dshuffle.runtime.measure.probe import _Probe, measure_cluster
from dshuffle.runtime.measure.shared_links import SharedLinks
from dshuffle.runtime.scheduler.member_choice import in_rank_order

LINK = 125e6


@pytest.mark.parametrize(("each", "n_machines"), [(2, 4), (4, 4), (3, 2)])
def test_the_oversubscription_of_a_shared_link_is_measured(each, n_machines):
    """While all exchange, the link carries what its workers receive from other machines, and nothing else."""
    workers = [f"{machine}-{i}" for machine in range(n_machines) for i in range(each)]
    shared = SharedLinks.of({worker: worker.split("-")[0] for worker in workers})
    n, outside = len(workers), (len(workers) - each) / (len(workers) - 1)
    received = LINK / each / outside  # into each worker
    assert shared.exist
    assert shared.oversubscription(LINK, received, limited=False) == pytest.approx(each)
    assert shared.oversubscription(LINK, received / 10, limited=True) == each
    # Links of their own: every worker receives at the rate of the link.
    assert shared.oversubscription(LINK, LINK / outside, limited=False) == 1
    # The model then finds what such an exchange takes: all rows that come from other machines, over their link.
    cluster = ClusterRates(
        n, LINK, LINK, rack_workers=each, machine_workers=each, oversubscription=each, wire_overhead=0, cores=64
    )
    work = Work(1000 * n, 10_000)
    entering = 1000 * each * (n - each) / n * (10_000 + 4)
    predicted = predict(cluster, work, precision="closed")
    assert predicted.wire_seconds == pytest.approx(entering / LINK, rel=1e-3)
    assert _why(cluster, predicted) == f"the {each} workers of a machine share its link"


def test_no_links_are_shared_on_one_machine_or_with_a_worker_each():
    assert not SharedLinks.of({"a": "one", "b": "one"}).exist
    assert not SharedLinks.of({"a": "one", "b": "two"}).exist
    assert not SharedLinks.of({"a": "one"}).exist
    assert not SharedLinks.of({"a": "one", "b": "one", "c": "two"}).exist  # racks are of one size


def test_the_workers_of_a_host_have_consecutive_ranks():
    names = {"0": "x", "1": "y", "10": "x", "2": "x", "3": "y", "late": "z"}
    workers = [SimpleNamespace(name=name, host=host, address=f"tcp://{host}:{name}") for name, host in names.items()]
    assert [worker.name for worker in in_rank_order(reversed(workers))] == ["0", "2", "10", "1", "3", "late"]


@pytest.mark.slow
def test_a_cluster_of_two_machines(cluster_of, small, monkeypatch):
    machines, alone, pull = _Probe._machines, [], _Probe._pull

    def two(probe):
        found = machines(probe)
        names = {address: f"machine {place // 2}" for place, address in enumerate(sorted(found))}
        return {address: dataclasses.replace(one, name=names[address]) for address, one in found.items()}

    def watched(probe, senders, receivers, seconds, background):
        if len(senders) == len(receivers) == 1:
            alone.append((*senders, *receivers))
        return pull(probe, senders, receivers, seconds, background)

    monkeypatch.setattr(_Probe, "_machines", two)
    monkeypatch.setattr(_Probe, "_pull", watched)
    with cluster_of({0: {}, 1: {}, 2: {}, 3: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(4)
        addresses = sorted(client.scheduler_info()["workers"])
        found = measure_cluster(client, small, seconds=0.5)
    assert (found.cluster.machine_workers, found.cluster.rack_workers) == (2, 2)
    assert alone == [(addresses[0], addresses[2]), (addresses[1], addresses[3])]
