"""The order of an epoch as arrays: the permutation that Grain's shuffle draws, of many places at a time.

Grain computes one place a call. The permutation is a block cipher of as many bits as the number of places needs,
applied again while its result is beyond the last of them (cycle walking: Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). The cipher is Simon (Beaulieu et al., 2013) of four rounds, with keys of C++'s `seed_seq`.

Grain gives the last of 2^16 + 1, 2^18 + 1, 2^20 + 1, ... places the number of place 0, and never the last number. Here
each number comes once whatever their count: a bit more makes room for it.
"""

from __future__ import annotations

import functools

import numpy as np

ROUNDS = 4
LEAST_BITS = 16
AT_A_TIME = 1 << 20
"""Places whose intermediate values are held."""
_WORD = 0xFFFFFFFF


def shuffled(places: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The numbers, each below `count`, that stand at these places of the order of `count` numbers by a seed.

    places: integers below `count`, of any shape. seed: below 2^32.
    """
    if count <= 1 << LEAST_BITS:
        return _order(count, seed)[places]
    flat = np.asarray(places).reshape(-1)
    found = np.empty(len(flat), np.int64)
    keys = _keys(seed)
    for start in range(0, len(flat), AT_A_TIME):
        found[start : start + AT_A_TIME] = _walked(flat[start : start + AT_A_TIME].astype(np.uint64), count, keys)
    return found.reshape(np.shape(places))


def _walked(values: np.ndarray, count: int, keys: list[np.uint64]) -> np.ndarray:
    """Values encrypted, again and again until they are below `count`: one time in four at least, each time."""
    half = -(-(count - 1).bit_length() // 2)
    left = np.arange(len(values))
    while len(left):
        values[left] = _encrypted(values[left], half, keys)
        left = left[values[left] >= count]
    return values


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int) -> np.ndarray:
    """The whole order of at most 2^16 numbers, which would be walked to up to 2^16 times."""
    if count < 2:
        return np.arange(count)
    numbers = np.arange(1 << LEAST_BITS, dtype=np.uint64)
    after = _encrypted(numbers, LEAST_BITS // 2, _keys(seed)).astype(np.int64)
    # Where walks end: of a step, of 2, of 4, ... of 2^16.
    end = np.where(numbers < count, numbers.astype(np.int64), after)
    for _ in range(LEAST_BITS):
        end = end[end]
    return end[after[:count]]


def _encrypted(values: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    """A permutation of the numbers of 2 `half` bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)

    def mixed(word: np.ndarray) -> np.ndarray:
        one, two, eight = ((word << np.uint64(r) | word >> bits - np.uint64(r)) & mask for r in (1, 2, 8))
        return (one & eight) ^ two

    high, low = values >> bits, values & mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        high ^= mixed(low) ^ (first & mask)
        low ^= mixed(high) ^ (second & mask)
    return np.asarray(high << bits | low)


def _keys(seed: int) -> list[np.uint64]:
    """`ROUNDS` words of 32 bits from one: `std::seed_seq{seed}.generate` (ISO C++, [rand.util.seedseq])."""
    count = ROUNDS
    words = [0x8B8B8B8B] * count
    # For so few words: their distances p and q, and as many steps of each kind as there are words.
    p, q = 1, 2

    def step(k: int, factor: int, mix: int, more: int) -> tuple[int, int]:
        first = factor * (mix ^ mix >> 27) & _WORD
        return first, first + more & _WORD

    for k in range(count):
        mix = words[k] ^ words[(k + p) % count] ^ words[k - 1]
        first, second = step(k, 1664525, mix, 1 if k == 0 else k + seed if k == 1 else k)
        words[(k + p) % count] = words[(k + p) % count] + first & _WORD
        words[(k + q) % count] = words[(k + q) % count] + second & _WORD
        words[k] = second
    for k in range(count):
        mix = words[k] + words[(k + p) % count] + words[k - 1] & _WORD
        first, second = step(k, 1566083941, mix, -k)
        words[(k + p) % count] ^= first
        words[(k + q) % count] ^= second
        words[k] = second
    return [np.uint64(word) for word in words]
