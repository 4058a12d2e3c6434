"""Growth that is faster than it should be is found, and other growth is none."""

import pytest

from tests.bench.growth import SERIES, Series, above, faults, power

SIZES = (10, 100, 1000, 10000)
TOKENS = Series("tokens", "tokens", SIZES, ("seconds",), ("requests",), ("memory_mb", "programs"), {"known": "why"})
LINEAR = {"seconds": lambda n: 5 + 2e-3 * n, "requests": lambda n: 3 + 2 * n, "memory_mb": lambda n: 100.0}
LINEAR |= {"programs": lambda n: 4, "known": lambda n: 1 + 1e-3 * n}


def rows(**other):
    """Rows of all sizes; `other` in place of what is linear."""
    return [{"tokens": n} | {name: of(n) for name, of in (LINEAR | other).items()} for n in SIZES]


def test_what_is_in_proportion_beside_what_any_size_takes_is_no_fault():
    assert faults(rows(), TOKENS) == [] and above(rows(), TOKENS) == {}
    assert power(rows(), "tokens", "seconds") == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", ["seconds", "requests"])
def test_a_square_is_found_also_behind_a_linear_part(name):
    square = rows(**{name: lambda n: 5 + 2e-3 * n + 1e-5 * n**2})
    assert [fault.split(":")[0] for fault in faults(square, TOKENS)] == [name] * len(faults(square, TOKENS)) != []


def test_what_is_counted_has_less_room_than_what_is_measured():
    slightly = {name: lambda n: n**1.1 for name in ("seconds", "requests")}
    assert {fault.split(":")[0] for fault in faults(rows(**slightly), TOKENS)} == {"requests"}


def test_programs_and_memory_that_grow_are_found():
    assert faults(rows(programs=lambda n: 4 + (n > 100)), TOKENS) == ["programs: 4 to 5 at 10000 tokens"]
    assert faults(rows(memory_mb=lambda n: 100.0 + n / 100), TOKENS) == ["memory_mb: 101.0 to 200.0 at 10000 tokens"]


def test_a_known_square_is_named_with_its_reason_and_a_cube_is_a_fault():
    square = rows(known=lambda n: n + 1e-1 * n**2)
    assert faults(square, TOKENS) == []
    assert above(square, TOKENS) == {"known": f"power {power(square, 'tokens', 'known')} of tokens: why"}
    assert [fault.split(":")[0] for fault in faults(rows(known=lambda n: n**3), TOKENS)] == ["known"] * 2


def test_every_series_has_two_decades():
    assert [name for name, one in SERIES.items() if one.sizes[-1] < 100 * one.sizes[0]] == []
