"""Similar texts: word n-grams, contamination with evaluation prompts, and MinHash.

MinHash and its bands as in Broder, "On the resemblance and containment of documents" (1997) and Leskovec, Rajaraman and
Ullman, "Mining of Massive Datasets", chapter 3; decontamination by n-grams as in Brown et al. (2020), appendix C.

Axes: G n-grams of a text, P permutations, N records.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from rlhf.tuning.texts import words

PERMUTATIONS = 128
MIN_RECALL = 0.98
"""Share of the pairs at the threshold that are compared; pairs above it are compared more often."""
LOWEST_THRESHOLD = 0.3
"""Below it nearly all records would be compared with each other."""
SHINGLE_WORDS = 5
_PRIME = np.uint64(0x100000001B3)
# In buckets up to this size all pairs are compared; in larger ones each record with the first and with the one before.
_ALL_PAIRS = 16
_PAIRS_AT_A_TIME = 1 << 14


@functools.lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _hashes(text: str) -> np.ndarray:
    """Return hashes uint64 of the text's words (`rlhf.tuning.texts.words`)."""
    return np.array([_word_hash(word) for word in words(text)], np.uint64)


def ngrams(text: str, length: int) -> np.ndarray:
    """Return hashes [G] uint64 of all runs of `length` words; a shorter text is one run."""
    return _runs(_hashes(text), length)


def _runs(hashes: np.ndarray, length: int) -> np.ndarray:
    length = min(length, len(hashes))
    if not length:
        return hashes
    count = len(hashes) - length + 1
    total = np.zeros(count, np.uint64)
    for i in range(length):
        # A polynomial hash of each window, modulo 2**64 by overflow; computed for all windows at once.
        total = total * _PRIME + hashes[i : i + count]
    # Mixes high and low bits (Fibonacci hashing), since MinHash reads the high ones.
    return np.asarray(total * np.uint64(0x9E3779B97F4A7C15) ^ (total >> np.uint64(29)))


def contamination(texts: Iterable[str], length: int) -> np.ndarray:
    """Return the sorted hashes of all n-grams of the evaluation texts; a shorter text is one n-gram."""
    grams = [ngrams(text, length) for text in texts]
    return np.unique(np.concatenate(grams)) if grams else np.zeros(0, np.uint64)


def lengths_of(texts: Iterable[str], length: int) -> list[int]:
    """Return the lengths of n-grams in `contamination`: `length`, and those of shorter texts."""
    return sorted({min(length, len(words(text))) for text in texts} - {0})


def is_contaminated(text: str, known: np.ndarray, lengths: Iterable[int]) -> bool:
    """Return whether any n-gram of `text`, of any of the lengths, is in `known` (sorted)."""
    hashes = _hashes(text)
    for length in lengths:
        if len(hashes) < length:
            continue
        grams = _runs(hashes, length)
        # searchsorted returns len(known) for values above the last one.
        at = np.searchsorted(known, grams)
        if np.any(known[np.minimum(at, len(known) - 1)] == grams):
            return True
    return False


@functools.lru_cache(maxsize=1)
def _permutations() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(20240229))
    # A product with an odd number is a permutation of the integers modulo 2**64.
    odd = rng.integers(0, 1 << 63, PERMUTATIONS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return odd, rng.integers(0, 1 << 63, PERMUTATIONS, dtype=np.uint64)


def signature(text: str) -> np.ndarray:
    """Return the MinHash signature [P] uint32 of the text's 5-word shingles.

    The share of equal positions of two signatures estimates the Jaccard similarity of their texts.
    """
    grams = np.unique(ngrams(text, SHINGLE_WORDS))
    if not len(grams):
        return np.zeros(PERMUTATIONS, np.uint32)
    multiply, add = _permutations()
    # The high half is the better mixed one of a product modulo 2**64.
    return np.asarray(((grams[:, None] * multiply + add) >> np.uint64(32)).min(axis=0)).astype(np.uint32)


def bands_of(threshold: float) -> tuple[int, int]:
    """Return (bands, rows of each) with the fewest pairs that compare `MIN_RECALL` of the pairs at `threshold`.

    Records of similarity s share one of b bands of r rows with probability 1 - (1 - s^r)^b (Leskovec et al., 3.4.2).
    Raises ValueError below `LOWEST_THRESHOLD`.
    """
    if not LOWEST_THRESHOLD <= threshold <= 1:
        raise ValueError(f"near_duplicates is {threshold}; expected a similarity from {LOWEST_THRESHOLD} to 1")
    shapes = ((PERMUTATIONS // rows, rows) for rows in range(PERMUTATIONS, 0, -1))
    return next((b, r) for b, r in shapes if 1 - (1 - threshold**r) ** b >= MIN_RECALL)


def near_duplicates(signatures_NP: np.ndarray, rank_N: np.ndarray, threshold: float) -> np.ndarray:
    """Return the numbers of the records to leave out: all but the best-ranked of each set of linked records.

    Records that share a band are compared and linked if their similarity is at least `threshold`. The result does not
    depend on the order of the rows. Signatures may be a mapped file.

    Args:
        signatures_NP: [N, P] uint32. rank_N: [N], the smallest stays.
    """
    parent = np.arange(len(rank_N))

    def root(i: int) -> int:
        while parent[i] != i:
            # Union-find with path halving.
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    bands, rows = bands_of(threshold)
    for band in range(bands):
        keys = np.zeros(len(rank_N), np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            keys = keys * _PRIME + signatures_NP[:, column].astype(np.uint64)
        # By key, and by rank among equal keys.
        order = np.lexsort((rank_N, keys))
        ordered = keys[order]
        same = ordered[1:] == ordered[:-1]
        # Runs of equal keys: `same` 0 1 1 0 1 -> edges 1 3 4 5 -> buckets order[1:4] and order[4:6].
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for first, second in _pairs(order, edges[::2], edges[1::2] + 1):
            # Most are linked by an earlier band.
            apart = parent[first] != parent[second]
            first, second = first[apart], second[apart]
            near = np.mean(signatures_NP[first] == signatures_NP[second], axis=1) >= threshold
            for a, b in zip(first[near].tolist(), second[near].tolist(), strict=True):
                i, j = root(a), root(b)
                if i != j:
                    # The root of a set is its member of the smallest rank.
                    best, other = (i, j) if rank_N[i] < rank_N[j] else (j, i)
                    parent[other] = best
    return np.flatnonzero(parent != np.arange(len(parent)))


def _pairs(order: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs to compare of buckets `order[start:stop]`, many at a time.

    These are all pairs of a small bucket, and a number of pairs linear in the size of a large one.
    """
    sizes = stops - starts
    for size in range(2, _ALL_PAIRS + 1):
        one, two = np.triu_indices(size, 1)
        found = starts[sizes == size]
        step = max(1, _PAIRS_AT_A_TIME // len(one))
        for at in range(0, len(found), step):
            members = order[found[at : at + step, None] + np.arange(size)]
            yield members[:, one].reshape(-1), members[:, two].reshape(-1)
    for start, stop in zip(starts[sizes > _ALL_PAIRS], stops[sizes > _ALL_PAIRS], strict=True):
        for at in range(start + 1, stop, _PAIRS_AT_A_TIME):
            later = order[at : min(at + _PAIRS_AT_A_TIME, stop)]
            yield order[at - 1 : at - 1 + len(later)], later
            yield np.full(len(later), order[start]), later
