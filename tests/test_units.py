from __future__ import annotations

import math

import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.units import human_bytes, human_numbers, human_ratio, human_seconds, kept_together, parse_rate

BYTES = {999.4: "999 B", 999.6: "1.00 kB", 1e6: "1.00 MB", 999_600: "1.00 MB", 2.5e15: "2500 TB", math.inf: "inf TB"}
SECONDS = {9.996e-4: "1.00 ms", 0.9996: "1.00 s", 0.9994: "999 ms", 72e-3: "72.0 ms", 1e-7: "0.100 µs", None: "-"}
RATIOS = {1.0: "1.0", 9.94: "9.9", 9.96: "10", 12_345_678: "12,000,000", math.inf: "inf"}


@pytest.mark.parametrize(
    ("form", "texts"), [(human_bytes, BYTES), (human_seconds, SECONDS | {math.nan: "nan s"}), (human_ratio, RATIOS)]
)
def test_numbers_have_two_or_three_figures(form, texts):
    assert {value: form(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("values", "digits", "texts"),
    [
        ([0.1, 0.098], 2, ["0.100", "0.098"]),
        ([0.2459, 0.1, 0.2066], 4, ["0.2459", "0.1000", "0.2066"]),
        ([12.0, 0.0], 3, ["12.0", "0.0"]),
        ([9.996, 1.0], 3, ["10.0", "1.0"]),
        ([-0.5, 0.25], 2, ["-0.50", "0.25"]),
        ([5e-4, 2e-4], 2, ["0.00050", "0.00020"]),
        ([0.6, 2e-5], 2, ["0.60", "2.0e-05"]),
        ([2_000_000.0, 1234.0], 4, ["2.000e+06", "1234"]),
        ([float("nan"), 1.5, None], 2, ["nan", "1.5", "-"]),
        ([100.0, 0.01], 2, ["100", "0.010"]),
        ([123_456, 50.0, 0.0], 2, ["123456", "50", "0.0"]),
        ([-0.5, -0.0], 2, ["-0.50", "0.00"]),
        ([-0.004, 1.0], 2, ["-0.0040", "1.0000"]),
        ([], 2, []),
    ],
)
def test_compared_numbers_have_equally_many_digits(values, digits, texts):
    assert human_numbers(values, digits) == texts


def test_no_line_ends_between_a_number_and_its_unit():
    text = "1 % [8.0, 14.9] % (95 %, 5 pairs) of 200 Mbit/s, 5 server and ‖Xw - y‖ / ‖y‖ in 3 s"
    kept = "1~% [8.0,~14.9]~% (95~%, 5~pairs) of 200~Mbit/s, 5 server and ‖Xw~-~y‖~/~‖y‖ in 3~s"
    assert kept_together(text) == kept.replace("~", "\xa0")


RATES = {"100mbit": 12.5e6, "100 Mbit/s": 12.5e6, "10Gbps": 1.25e9, "1.25GB/s": 1.25e9, "1MiB": 2**20, "64kb": 8e3}
RATES |= {"12500000 B": 12.5e6, "1e6B": 1e6, "3 bytes/s": 3}


def test_rates_as_people_write_them():
    assert {text: parse_rate("bandwidth", text) for text in RATES} == pytest.approx(RATES)


@pytest.mark.parametrize("text", ["", "fast", "-1MB", "0", "1.2.3MB", "1.2.3", "5 parsec", "1e999"])
def test_what_is_no_rate(text):
    with pytest.raises(InvalidParameter, match=r"bandwidth=.*1\.25GB/s"):
        parse_rate("bandwidth", text)


@pytest.mark.parametrize(("text", "meant"), [("100", "'100bit' or '100B'"), ("1e6", "'1e6B'"), ("25g/s", "'25gbit'")])
def test_bits_and_bytes_are_not_guessed(text, meant):
    with pytest.raises(InvalidParameter, match=f"bandwidth='{text}' .*bits or bytes.*{meant}"):
        parse_rate("bandwidth", text)
