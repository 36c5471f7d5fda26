"""What a comparison means, in two sentences and a doubt: which way was fastest, and whether it was worth it."""

from __future__ import annotations

from dshuffle.planning import Global
from dshuffle.report.summary import CPU_BOUND, Comparison, Figures, WayResult, figures
from dshuffle.units import human_error, human_ratio, human_seconds

# Errors that differ by less are called the same.
SAME_ERROR = 1.1
# Relative residuals below this are the rounding of float32 data; differences between them mean nothing.
ROUNDING = 1e-6


def verdict(comparison: Comparison) -> str:
    """The verdict, computed from the figures alone."""
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> tuple[str, ...]:
    """One sentence on speed, one on what limits it where that is no network or store, and one on worth."""
    measured = [(way, figures(way)) for way in comparison.ways]
    return tuple(sentence for sentence in (_speed(measured), _doubt(measured), _worth(measured)) if sentence)


def _speed(measured: list[tuple[WayResult, Figures]]) -> str:
    whole = [
        (found.shuffle_seconds, way)
        for way, found in measured
        if way.choices.assignment == Global() and found.shuffle_seconds is not None
    ]
    if not whole:
        return "No way with the assignment “global” was run for two epochs or more: none can be called the fastest."
    whole.sort(key=lambda pair: pair[0].median)
    (best, fastest), others = whole[0], whole[1:]
    sentence = (
        f"“{fastest.label}” took {human_seconds(best.median)} an epoch to reshuffle everything "
        f"({_cost(measured, fastest)})"
    )
    if not others:
        return f"{sentence}; no other way of doing so was run{_by_chunks(measured)}."
    slower = [
        f"{human_ratio(spread.median / best.median)} times as fast as “{way.label}”"
        for spread, way in others
        if spread.least > best.greatest
    ]
    alike = [
        f"“{way.label}” ({human_seconds(spread.median)})" for spread, way in others if spread.least <= best.greatest
    ]
    if alike:
        slower.append(f"not clearly faster than {_listed(alike)}, whose times are in the same range")
    return f"{sentence}: {_listed(slower)}{_by_chunks(measured)}."


def _doubt(measured: list[tuple[WayResult, Figures]]) -> str:
    """Which of the times that were compared are not those of a network or a store."""
    known = [
        (way, found.cpu_idle)
        for way, found in measured
        if way.choices.assignment == Global() and found.shuffle_seconds is not None and found.cpu_idle is not None
    ]
    busy = [f"“{way.label}”" for way, idle in known if idle < CPU_BOUND]
    if not busy:
        return ""
    whom = "all of these ways" if len(busy) == len(known) > 1 else _listed(busy)
    return (
        f"Processors were idle for less than {CPU_BOUND:.0%} of the time under {whom}: such times are limited by "
        "processors, and say nothing about networks or stores."
    ).replace("%", " %")


def _by_chunks(measured: list[tuple[WayResult, Figures]]) -> str:
    """What loaders do that re-read stands beside: it shuffles less, so that it can be no fastest way of doing the same.

    Of several ways the fastest; the error says whether less was enough.
    """
    found = [
        (measures.shuffle_seconds.median, way, measures)
        for way, measures in measured
        if way.choices.assignment.in_chunks and measures.shuffle_seconds is not None
    ]
    if not found:
        return ""
    seconds, way, measures = min(found, key=lambda one: one[0])
    return (
        f"; “{way.label}”, which keeps the rows of a chunk together, took {human_seconds(seconds)} and reached an "
        f"error of {human_error(measures.last_error)}"
    )


def _cost(measured: list[tuple[WayResult, Figures]], fastest: WayResult) -> str:
    """What the exchange cost the training that it ran beside."""
    found = next(found for way, found in measured if way is fastest)
    without = [
        other.epoch_seconds
        for way, other in measured
        if not way.choices.assignment.moves and other.epoch_seconds is not None
    ]
    if without and found.epoch_seconds is not None:
        # Waiting alone would hide that exchange and training share cores.
        return f"epochs took {human_seconds(found.epoch_seconds)} with it, {human_seconds(min(without))} without"
    return f"training stood still for {human_seconds(found.waited_seconds)} of it"


def _worth(measured: list[tuple[WayResult, Figures]]) -> str:
    errors = [(way, found.last_error) for way, found in measured if found.last_error is not None]
    whole = [(way, error) for way, error in errors if way.choices.assignment == Global()]
    fixed = [(way, error) for way, error in errors if not way.choices.assignment.moves]
    once = next((pair for pair in fixed if pair[0].choices.sharding == "random"), None)
    never = next((pair for pair in fixed if pair[0].choices.sharding == "contiguous"), None)
    if not whole or not (once or never):
        return ""
    reached = min(error for _, error in whole)
    epochs = max(len(way.history) for way, _ in errors)
    if epochs < 2:  # the first epoch is only loaded: nothing has been reshuffled yet
        return ""
    parts = []
    if once is not None:
        if _same(once[1], reached):
            parts.append(
                f"one shuffle before training reached the same error as reshuffling every epoch "
                f"({human_error(once[1])} against {human_error(reached)}), so reshuffling was not worth "
                f"its cost for this model on these data"
            )
        elif once[1] > reached:
            parts.append(
                f"reshuffling every epoch paid: its error of {human_error(reached)} is "
                f"{human_ratio(once[1] / reached)} times smaller than the {human_error(once[1])} after "
                f"one shuffle before training"
            )
        else:
            parts.append(
                f"one shuffle before training did better than reshuffling every epoch "
                f"({human_error(once[1])} against {human_error(reached)}), so reshuffling was not "
                f"worth its cost here"
            )
    if never is not None:
        if _same(never[1], reached):
            parts.append(
                f"leaving every sample where it is stored reached {human_error(never[1])}: these data need no shuffling"
            )
        else:
            parts.append(f"with every sample left where it is stored the error was {human_error(never[1])}")
            if once is None:
                parts[-1] += f", against {human_error(reached)} with reshuffling"
    return f"After {epochs} epoch{'s' if epochs > 1 else ''}, {'; '.join(parts)}."


def _same(one: float, other: float) -> bool:
    return max(one, other) <= max(ROUNDING, SAME_ERROR * min(one, other))


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
