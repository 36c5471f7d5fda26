"""The XOR kernels against NumPy, packet by packet."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.coding import add_packets, decode, encode
from dshuffle.rows import checksum_rows

ROW_SIZES = st.integers(0, 40) | st.sampled_from([800, 803, 1024])
SEEDS = st.integers(0, 2**32)
# What packets look like that come off a wire: read-only, and wherever in a frame they happen to stand.
WIRES = st.sampled_from(["own memory", "read-only", "unaligned"])


def xor(rows: np.ndarray) -> np.ndarray:
    """The XOR of all rows (or checksums); zero of none."""
    return np.bitwise_xor.reduce(rows, axis=0)


def as_received(array: np.ndarray, wire: str) -> np.ndarray:
    if wire == "own memory":
        return array.copy()
    skip = 1 if wire == "unaligned" else 0
    received = np.frombuffer(bytes(skip) + array.tobytes(), np.uint8)[skip:].view(array.dtype).reshape(array.shape)
    assert not received.flags.writeable
    return received


def random_rows(rng: np.random.Generator, n_rows: int, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, (n_rows, nbytes), dtype=np.uint8)


def random_words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2**32, count, dtype=np.uint32)


def random_lists(rng: np.random.Generator, count: int, least: int, most: int, below: int) -> tuple[np.ndarray, ...]:
    """``count`` lists of ``least`` to ``most`` numbers below a bound, in CSR form."""
    offsets = np.cumsum([0, *rng.integers(least, most + 1, count)])
    return offsets, rng.integers(0, below, offsets[-1])


# -- encode --------------------------------------------------------------------------------------------------------


@given(nbytes=ROW_SIZES, seed=SEEDS)
def test_packets_are_encoded_as_numpy_does(nbytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows, n_packets = int(rng.integers(1, 30)), int(rng.integers(1, 12))
    rows, checksums = random_rows(rng, n_rows, nbytes), random_words(rng, n_rows)
    offsets, slots = random_lists(rng, n_packets, 1, 9, n_rows)
    packets = rng.integers(0, n_packets, int(rng.integers(0, 2 * n_packets)))  # in any order, some more than once
    # The room for them is part of something longer, the rest of which must stay as it is.
    buffer, sums = random_rows(rng, len(packets) + 2, nbytes), random_words(rng, len(packets) + 2)
    expected, expected_sums = buffer.copy(), sums.copy()
    for i, packet in enumerate(packets):
        members = slots[offsets[packet] : offsets[packet + 1]]
        expected[i + 1], expected_sums[i + 1] = xor(rows[members]), xor(checksums[members])
    before = rows.copy(), checksums.copy()
    encode(rows, checksums, offsets, slots, packets, buffer[1:-1], sums[1:-1])
    np.testing.assert_array_equal(buffer, expected)
    np.testing.assert_array_equal(sums, expected_sums)
    np.testing.assert_array_equal(rows, before[0])
    np.testing.assert_array_equal(checksums, before[1])


# -- decode --------------------------------------------------------------------------------------------------------


@dataclass
class Decoding:
    """A worker that holds some of the rows, and packets each of which has one row more."""

    rng: np.random.Generator
    nbytes: int
    wire: str
    n_packets: int = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        n_held, n_packets = int(rng.integers(1, 20)), int(rng.integers(1, 12))
        self.n_packets = n_packets
        # Samples have any numbers, and rows any slots; nothing is known of the other slots.
        self.samples = rng.choice(10**6, n_held + n_packets, replace=False)
        truth = random_rows(rng, n_held + n_packets, self.nbytes)
        truth_sums = checksum_rows(truth, self.samples)
        places = rng.permutation(n_held + n_packets + 5)
        self.held, self.free = places[:n_held], places[n_held : n_held + n_packets]
        self.rows, self.checksums = random_rows(rng, len(places), self.nbytes), random_words(rng, len(places))
        self.rows[self.held], self.checksums[self.held] = truth[:n_held], truth_sums[:n_held]
        self.offsets, self.slots = random_lists(rng, n_packets, 0, 8, n_held)
        self.slots = self.held[self.slots]
        self.truth, self.truth_sums = truth[n_held:], truth_sums[n_held:]
        self.sample_ids = self.samples[n_held:]
        self.packets, self.packet_sums = self.truth.copy(), self.truth_sums.copy()
        for i in range(n_packets):
            self.packets[i] ^= xor(self.rows[self.known(i)])
            self.packet_sums[i] ^= xor(self.checksums[self.known(i)])
        self.targets = np.where(rng.random(n_packets) < 0.2, -1 - rng.integers(0, 3, n_packets), self.free)

    def known(self, packet: int) -> np.ndarray:
        """The slots of a packet's other rows."""
        return self.slots[self.offsets[packet] : self.offsets[packet + 1]]

    def decode(self) -> int:
        packets, sums = as_received(self.packets, self.wire), as_received(self.packet_sums, self.wire)
        wrong = decode(
            self.rows, self.checksums, packets, sums, self.offsets, self.slots, self.targets, self.sample_ids
        )
        np.testing.assert_array_equal(packets, self.packets)
        np.testing.assert_array_equal(sums, self.packet_sums)
        assert isinstance(wrong, int)
        return wrong


@given(nbytes=ROW_SIZES, seed=SEEDS, wire=WIRES)
def test_rows_are_decoded_as_numpy_does_and_have_their_own_checksums(nbytes: int, seed: int, wire: str) -> None:
    case = Decoding(np.random.default_rng(seed), nbytes, wire)
    expected, sums = case.rows.copy(), case.checksums.copy()
    wanted = case.targets >= 0
    expected[case.targets[wanted]], sums[case.targets[wanted]] = case.truth[wanted], case.truth_sums[wanted]
    for _ in range(2):  # once more changes nothing
        assert case.decode() == -1
        np.testing.assert_array_equal(case.rows, expected)
        np.testing.assert_array_equal(case.checksums, sums)
    decoded = case.targets[wanted]
    np.testing.assert_array_equal(
        case.checksums[decoded], checksum_rows(case.rows, case.sample_ids[wanted], slots=decoded)
    )


@given(nbytes=ROW_SIZES, seed=SEEDS, wire=WIRES, fault=st.sampled_from(["packet", "its checksum", "held", "sample"]))
def test_a_fault_is_found_where_it_is_and_nothing_after_it_counts_as_right(
    nbytes: int, seed: int, wire: str, fault: str
) -> None:
    rng = np.random.default_rng(seed)
    case = Decoding(rng, nbytes, wire)
    bad = int(rng.integers(case.n_packets))
    affected = np.arange(case.n_packets) == bad
    if fault == "packet" and nbytes:
        case.packets[bad, rng.integers(nbytes)] ^= 1 << rng.integers(8)
    elif fault == "held" and nbytes:
        slot = rng.choice(case.held)
        case.rows[slot, rng.integers(nbytes)] ^= 1 << rng.integers(8)
        # A row that a packet has twice takes itself out.
        affected = np.array([np.count_nonzero(case.known(i) == slot) % 2 == 1 for i in range(case.n_packets)])
    elif fault == "sample":
        case.sample_ids = case.sample_ids.copy()
        case.sample_ids[bad] += 1
    else:
        case.packet_sums[bad] ^= np.uint32(1) << rng.integers(32, dtype=np.uint32)
    hit = np.flatnonzero(affected & (case.targets >= 0))
    expected = int(hit[0]) if len(hit) else -1
    rows, sums = case.rows.copy(), case.checksums.copy()
    assert case.decode() == expected
    ended = expected if expected >= 0 else case.n_packets
    right = np.flatnonzero((case.targets >= 0) & (np.arange(case.n_packets) < ended))
    rows[case.targets[right]], sums[case.targets[right]] = case.truth[right], case.truth_sums[right]
    np.testing.assert_array_equal(case.checksums, sums)
    unclear = [case.targets[expected]] if expected >= 0 else []  # the bad row itself may have any bytes
    np.testing.assert_array_equal(np.delete(case.rows, unclear, axis=0), np.delete(rows, unclear, axis=0))


# -- add_packets ---------------------------------------------------------------------------------------------------


@given(nbytes=ROW_SIZES, seed=SEEDS, wire=WIRES)
def test_packets_are_added_as_numpy_does(nbytes: int, seed: int, wire: str) -> None:
    rng = np.random.default_rng(seed)
    n_rows, n_packets = int(rng.integers(1, 9)), int(rng.integers(0, 12))
    rows, checksums = random_rows(rng, n_rows, nbytes), random_words(rng, n_rows)
    packets, packet_sums = random_rows(rng, n_packets, nbytes), random_words(rng, n_packets)
    offsets, targets = random_lists(rng, n_packets, 0, 4, n_rows)  # some to the same row twice
    expected, sums = rows.copy(), checksums.copy()
    for i, (begin, end) in enumerate(pairwise(offsets)):
        for target in targets[begin:end]:
            expected[target] ^= packets[i]
            sums[target] ^= packet_sums[i]
    add_packets(rows, checksums, as_received(packets, wire), as_received(packet_sums, wire), offsets, targets)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(checksums, sums)
