"""What processes of environments say, as JSON."""

import numpy as np
import pytest

from tuning.agents.frames import state


class Board:
    pass


class Named:
    def __str__(self):
        return "x.o"


def test_a_state_is_equal_where_the_environment_is_in_an_equal_place():
    assert state({"at": np.int64(3), "cells": np.zeros(2), "seen": {2, 1}, "board": Named()}) == {
        "at": 3,
        "cells": [0.0, 0.0],
        "seen": [1, 2],
        "board": "x.o",
    }


def test_a_state_that_has_only_an_address_is_refused():
    """By its type's name all states would be the same one."""
    with pytest.raises(TypeError, match=r'info\["state"\] holds an object of type Board, which has no text'):
        state({"board": Board()})
