"""What ways of shuffling cost, for ``dshuffle advise``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.planning.cost import Bill, Prediction

Priced = Sequence[tuple[Prediction, Bill]]


def show_prices(console: Console, priced: Priced) -> None:
    """Print the price of each way, the cheapest first, and name the cheapest one that reshuffles everything."""
    console.print()
    console.print(_table(sorted(priced, key=lambda pair: pair[1].epoch)))
    if sentence := _cheapest(priced):
        console.print(sentence, highlight=False, markup=False)


def _table(priced: Priced) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption="In the currency of the prices. first load: every chunk is read once. epoch: a later one, on "
        "average. What a server reads is not included.",
        caption_justify="left",
    )
    has_run = any(bill.run is not None for _, bill in priced)
    table.add_column("way", no_wrap=True)
    for column in ("first load", "epoch", *(("run",) if has_run else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for prediction, bill in priced:
        amounts = (bill.load, bill.epoch, *(() if bill.run is None else (bill.run,)))
        table.add_row(Text(prediction.work.way), *map(amount, amounts))
    return table


def _cheapest(priced: Priced) -> str:
    """The cheapest way that reshuffles everything, and of several the fastest; empty if there is none."""
    shuffling = [pair for pair in priced if pair[0].work.choices.assignment.redraws_all]
    if not shuffling:
        return ""
    prediction, bill = min(shuffling, key=lambda pair: (pair[1].epoch, pair[0].exchange_seconds))
    return f"Cheapest way to reshuffle everything: {prediction.work.way}, {amount(bill.epoch)} an epoch."


def amount(value: float) -> str:
    """Format an amount of money.

    Examples
    --------
    >>> amount(0.0), amount(0.01234), amount(1234.5)
    ('0', '0.0123', '1,234')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
