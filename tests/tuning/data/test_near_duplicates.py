"""Near duplicates and contaminated records are found, and only those."""

import random

import numpy as np
import pytest

from rlhf.tuning.data import near_duplicates

rng = random.Random(0)
WORDS = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(500)]


def text(seed, words=120):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def changed(base, count, seed=1):
    words = base.split()
    for place in random.Random(seed).sample(range(len(words)), count):
        words[place] = "changed"
    return " ".join(words)


def jaccard(a, b):
    sets = [set(near_duplicates.ngrams(t, near_duplicates.SHINGLE_WORDS).tolist()) for t in (a, b)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_signatures_estimate_the_similarity():
    base = text(0)
    for count in (0, 1, 3, 6, 12):
        other = changed(base, count)
        estimate = np.mean(near_duplicates.signature(base) == near_duplicates.signature(other))
        assert estimate == pytest.approx(jaccard(base, other), abs=0.13)
    assert np.mean(near_duplicates.signature(base) == near_duplicates.signature(text(1))) == 0
    assert (near_duplicates.signature("") == 0).all()
    np.testing.assert_array_equal(near_duplicates.signature(base.upper()), near_duplicates.signature(base))


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.6, 0.7, 0.8, 0.95])
def test_pairs_of_the_threshold_are_found_whatever_it_is(threshold):
    """Of 400 pairs as similar as the threshold asks, nearly all are found, and none that is less similar."""
    draw = np.random.default_rng(3)
    bases = draw.integers(0, 2**32, (500, near_duplicates.PERMUTATIONS), dtype=np.uint32)
    others = bases.copy()
    # The share of equal positions is the estimate of the similarity: the first 400 reach the threshold.
    equal = int(np.ceil(threshold * near_duplicates.PERMUTATIONS)) - (np.arange(500) >= 400)
    for row, count in zip(others, equal, strict=True):
        row[draw.permutation(near_duplicates.PERMUTATIONS)[count:]] += np.uint32(1)
    gone = near_duplicates.near_duplicates(np.concatenate([bases, others]), np.arange(1000), threshold)
    assert len(set(gone) & set(range(500, 900))) >= 0.95 * 400
    assert set(gone) <= set(range(500, 900))


def test_similar_records_are_found_among_many_that_share_a_preamble():
    preamble = text(99, 30)
    texts = [f"{preamble} {text(seed)}" for seed in range(150)]
    others = [changed(t, 8, seed=i) for i, t in enumerate(texts[:50])]
    assert 0.09 < jaccard(texts[0], texts[1]) < 0.2 and min(map(jaccard, texts, others)) > 0.5
    signatures = np.stack([near_duplicates.signature(t) for t in [*texts, *others]])
    gone = near_duplicates.near_duplicates(signatures, np.arange(200), 0.45)
    assert list(gone) == list(range(150, 200))


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_what_is_left_out_is_what_comparing_all_pairs_leaves_out(threshold):
    """Sets of 1 to 60 copies with some positions changed: the components of the graph of similar pairs."""
    draw = np.random.default_rng(5)
    rows = []
    for size in [1] * 40 + [2] * 20 + [3, 5, 16, 17, 40, 60]:
        base = draw.integers(0, 2**32, near_duplicates.PERMUTATIONS, dtype=np.uint32)
        rows += [
            np.where(draw.random(near_duplicates.PERMUTATIONS) < 0.01, base + np.uint32(1), base) for _ in range(size)
        ]
    signatures = np.stack(rows)[draw.permutation(len(rows))]
    rank = draw.permutation(len(rows)) * 3
    near = (signatures[:, None] == signatures[None]).mean(axis=2) >= threshold
    stays = [rank[i] == min(rank[near[i]]) for i in range(len(rows))]
    gone = near_duplicates.near_duplicates(signatures, rank, threshold)
    assert sorted(gone) == [i for i, best in enumerate(stays) if not best]


def test_a_similarity_that_is_no_longer_found_is_refused():
    with pytest.raises(ValueError, match="near_duplicates is 0.1; expected a similarity from 0.3 to 1"):
        near_duplicates.bands_of(0.1)
    assert near_duplicates.bands_of(1.0) == (1, 128)


def test_contamination_by_word_runs():
    prompts = [text(1, 40), "What is the capital of France?"]
    known, lengths = near_duplicates.contamination(prompts, 13), near_duplicates.lengths_of(prompts, 13)
    assert lengths == [6, 13]
    part = " ".join(prompts[0].split()[5:18])
    assert near_duplicates.is_contaminated(f"Look: {part.upper()}!", known, lengths)
    assert near_duplicates.is_contaminated("so, what is the CAPITAL of france today", known, lengths)
    assert not near_duplicates.is_contaminated(" ".join(prompts[0].split()[5:17]), known, lengths)
    assert not near_duplicates.is_contaminated("What is the capital of Spain?", known, lengths)
    assert not any(near_duplicates.is_contaminated(text(seed), known, lengths) for seed in range(50, 60))
    assert not near_duplicates.is_contaminated("", known, lengths)
