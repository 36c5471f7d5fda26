"""The strategies that a comparison runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dshuffle.planning import (
    Aligned,
    Assignment,
    Choices,
    Chunks,
    ExchangeEpochs,
    Global,
    Local,
    Partial,
    ShuffleSpec,
    parse_assignment,
)
from dshuffle.planning.exchange_epochs import EVERY_EPOCH
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.store import Dataset


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy and what a report calls it.

    Only a dataset can tell whether the labels and the sharding that the choices name exist.

    Parameters
    ----------
    label
        What a report calls it.
    choices
        How it shuffles.
    copy
        What it trains on, if that is a copy of the dataset in random order; see
        :func:`~dshuffle.store.shuffle_dataset`.
    copy_seconds
        How long it took to make the copy, if it was made for a comparison.
    """

    label: str
    choices: Choices
    copy: Dataset | None = field(default=None, compare=False)
    copy_seconds: float | None = None

    def dataset(self, compared: Dataset) -> Dataset:
        """What it trains on: its copy, or else the dataset that is compared on."""
        return compared if self.copy is None else self.copy

    def spec(self, dataset: Dataset, n_workers: int) -> ShuffleSpec:
        """The shuffle of a dataset, or :class:`InvalidParameter` if it cannot be shuffled in this way."""
        return ShuffleSpec.at_first(dataset.n_samples, n_workers, resolved(dataset, self.choices.with_one_delivery()))


DEFAULT = Choices()


def default_ways(
    base: Choices = DEFAULT,
    copy: Dataset | None = None,
    coded_fraction: float | None = None,
    *,
    copy_seconds: float | None = None,
) -> tuple[Way, ...]:
    """The baselines of the papers, from the least shuffling to the most.

    ``partial`` starts from contiguous shards, because the question is whether exchanging a tenth makes up for leaving
    data where they are stored. ``chunks`` is how loaders shuffle that read the dataset again, and needs a chunk for
    every worker. With a copy of the dataset in random order, this is compared on the copy as well: shuffled once on
    disk, then by chunks (Livne et al., 2023). With a cache fraction, coded deliveries are compared, too.

    Parameters
    ----------
    base
        The cache fraction and the seed of all strategies; its other choices are ignored.
    copy, copy_seconds
        The dataset in random order, and how long it took to write that.
    coded_fraction
        Cache fraction of two more strategies, ``server`` and ``clique``. Ignored if ``base`` has a cache fraction.
    """

    def way(label: str, assignment: Assignment, delivery: str, sharding: str = "random", **changes: Any) -> Way:
        fraction = changes.pop("cache_fraction", base.cache_fraction)
        choices = Choices(assignment, delivery, None, fraction, sharding=sharding, seed=base.seed)
        return Way(label, choices, **changes)

    ways = [
        way("local, as stored", Local(), "peer", "contiguous"),
        way("local, shuffled once", Local(), "peer"),
        way("partial:0.1 + peer, from stored order", Partial(0.1), "peer", "contiguous"),
        way("chunks + storage", Chunks(), "storage"),
    ]
    if copy is not None:
        label = "chunks + storage, shuffled on disk"
        ways.append(way(label, Chunks(), "storage", copy=copy, copy_seconds=copy_seconds))
    ways += [way(f"global + {delivery}", Global(), delivery) for delivery in ("storage", "server", "peer")]
    if base.cache_fraction is not None:
        ways += [way(f"global + {delivery}", Global(), delivery) for delivery in ("ubershuffle", "clique")]
        ways.append(way("aligned + clique", Aligned(), "clique"))
    elif coded_fraction is not None:
        ways += [
            way(
                f"global + {delivery}, {100 * coded_fraction:.0f} % cached",
                Global(),
                delivery,
                cache_fraction=coded_fraction,
            )
            for delivery in ("server", "clique")
        ]
    return tuple(ways)


def product_of_ways(
    base: Choices,
    assignments: Sequence[str],
    deliveries: Sequence[str],
    *,
    caching: str | None = None,
    relays: Sequence[str] = ("pipelined",),
    epochs: Sequence[ExchangeEpochs] = (EVERY_EPOCH,),
) -> tuple[Way, ...]:
    """Every assignment with every delivery, and with every relay where there are packets to relay.

    ``local`` moves nothing, so it occurs once. Alone, it is refused with epochs without an exchange.

    Parameters
    ----------
    base
        All other choices.
    caching
        The caching policy of all strategies; by default the one that suits each assignment.
    epochs
        Which epochs have an exchange; every assignment that moves samples occurs with each.

    Raises
    ------
    InvalidParameter
        If a choice is not allowed, or no assignment moves samples and not every epoch shall have an exchange.

    Examples
    --------
    >>> [way.label for way in product_of_ways(Choices(), ["local", "global"], ["peer", "storage"])]
    ['local', 'global + peer', 'global + storage']
    >>> ways = product_of_ways(Choices(), ["global"], ["peer"], epochs=[ExchangeEpochs(1), ExchangeEpochs(2)])
    >>> [way.label for way in ways]
    ['global + peer', 'global + peer, every 2 epochs']
    >>> [way.label for way in product_of_ways(Choices(), ["global"], ["peer", "clique"], relays=["ring", "unicast"])]
    ['global + peer', 'global + clique, ring', 'global + clique, unicast']
    >>> [way.label for way in product_of_ways(Choices(balance="label"), ["global"], ["peer"])]
    ['global + peer, balance: label']
    """
    ways: dict[str, Way] = {}
    rules = [parse_assignment(name) for name in assignments]
    some_move = any(rule.moves for rule in rules)
    for assignment, delivery, chosen_epochs in itertools.product(rules, deliveries, epochs):
        every = dataclasses.asdict(EVERY_EPOCH if some_move and not assignment.moves else chosen_epochs)
        chosen = dataclasses.replace(base, assignment=assignment, delivery=delivery, caching=caching, **every)
        for relay in relays if chosen.has_relays else (chosen.relay,):
            label = f"{assignment} + {delivery}" if assignment.moves else str(assignment)
            if len(relays) > 1 and chosen.has_relays and assignment.moves:
                label += f", {relay}"
            label += chosen.exchange_epochs.label
            if base.balance is not None:
                label += f", balance: {base.balance}"
            ways.setdefault(label, Way(label, dataclasses.replace(chosen, relay=relay)))
    return tuple(ways.values())
