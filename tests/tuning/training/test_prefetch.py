"""The host makes the next item while the caller has one: in order, no more than that, and errors in their place."""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.training.prefetch import one_ahead


class Item:
    def __init__(self, number):
        self.number = number


def test_the_next_item_is_made_while_this_one_is_used():
    made = [threading.Event() for _ in range(4)]

    def source():
        for event in made:
            event.set()
            yield event

    for number, _ in enumerate(one_ahead(source())):
        # The caller is still at its item. A failure is a wait without end: so there is one.
        assert number == 3 or made[number + 1].wait(60)
        assert not any(event.is_set() for event in made[number + 2 :])


def test_items_come_in_their_order_and_two_are_held():
    living = weakref.WeakSet()

    def source():
        for number in range(6):
            item = Item(number)
            living.add(item)
            yield item
            del item

    seen = []
    for item in one_ahead(source()):
        seen.append(item.number)
        assert len(living) <= 2 + 1  # The one that the thread hands over.
        del item
    assert seen == list(range(6))


def test_an_error_is_raised_where_its_item_would_be():
    def source():
        yield 1
        yield 2
        raise OSError("third")

    seen = []
    with pytest.raises(OSError, match="third"):
        for item in one_ahead(source()):
            seen.append(item)
    assert seen == [1, 2]


def test_nothing_is_made_after_a_caller_that_stops():
    made = []
    items = one_ahead(made.append(number) or number for number in range(9))
    assert next(items) == 0
    items.close()
    assert made in ([0], [0, 1]) and not [t for t in threading.enumerate() if t.name.startswith("one-ahead")]


def test_it_computes_in_the_type_of_the_caller():
    with jax.enable_x64(True):
        assert [x.dtype for x in one_ahead(jnp.ones(2) for _ in range(2))] == [np.float64] * 2
