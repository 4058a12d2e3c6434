"""Reading of conformance vectors and comparison with what the project computes.

A `Case` hands out inputs, parameters and expected values by name and remembers which ones were used: a case whose
parameters, own inputs or expected values were not all looked at fails, so no convention is passed over in silence.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

FOLDER = Path(os.environ.get("RLHF_VECTORS", Path(__file__).parent / "vectors"))
CASE_KEYS = {"id", "op", "batch", "inputs", "params", "expected", "compare", "precision", "tags", "notes", "source"}
TOLERANCES = {"f64": {"rtol": 1e-6, "atol": 1e-7}, "f32": {"rtol": 2e-5, "atol": 2e-6}}

Op = Callable[["Case"], dict[str, Any]]
OPS: dict[tuple[str, str], Op] = {}
_MISSING = object()


def op(family: str, name: str) -> Callable[[Op], Op]:
    """Register the function that computes every expected value of one op."""

    def register(function: Op) -> Op:
        OPS[family, name] = function
        return function

    return register


class Case:
    """One case: `case["name"]` is an input array, `case.param("name")` a parameter."""

    def __init__(self, family: str, raw: dict[str, Any], batches: dict[str, Any]) -> None:
        self.family, self.raw = family, raw
        self.id, self.op, self.tags = raw["id"], raw["op"], raw.get("tags") or []
        self.own = raw.get("inputs") or {}
        self._inputs = (batches[raw["batch"]] if raw.get("batch") else {}) | self.own
        self._params = raw["params"]
        self._used_params: set[str] = set()
        self._used_inputs: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def __getitem__(self, name: str) -> Any:
        self._used_inputs.add(name)
        return as_array(self._inputs[name])

    def get(self, name: str, default: Any = None) -> Any:
        """An input, or `default` where the case has none."""
        return self[name] if name in self else default  # noqa: SIM401 (this is `get`)

    def param(self, name: str, default: Any = None) -> Any:
        """The parameter, or `default` where the case does not have it."""
        self._used_params.add(name)
        return self._params.get(name, default)

    def known(self, name: str, *values: Any) -> Any:
        """A parameter that describes a convention in words; it must be absent or one of `values`."""
        value = self.param(name, _MISSING)
        if value is _MISSING:
            return None
        assert value in values, f"{self.id}: parameter {name} is {value!r}, of which only {values} are known"
        return value

    def wants(self, name: str) -> bool:
        return self.raw["expected"].get(name) is not None

    def check(self, got: dict[str, Any]) -> None:
        """Compare every expected value, and refuse anything that was not looked at."""
        unknown = set(self.raw) - CASE_KEYS
        assert not unknown, f"{self.id}: unknown keys {unknown}"
        unread = set(self._params) - self._used_params
        assert not unread, f"{self.id}: parameters the runner does not know: {sorted(unread)}"
        unread = set(self.own) - self._used_inputs
        assert not unread, f"{self.id}: inputs the runner does not know: {sorted(unread)}"
        tolerance = TOLERANCES[self.raw.get("precision", "f64")]
        for name, expected in self.raw["expected"].items():
            if expected is None:
                continue
            assert name in got, f"{self.id}: expected {name} is not computed"
            if name == "metrics":
                for metric, value in expected.items():
                    assert metric in got[name], f"{self.id}: unknown metric {metric}"
                    if got[name][metric] is not None:
                        self._compare(f"metrics[{metric}]", got[name][metric], value, tolerance)
            else:
                self._compare(name, got[name], expected, tolerance)

    def _compare(self, name: str, got: Any, expected: Any, tolerance: dict[str, float]) -> None:
        actual, desired = np.asarray(got), np.asarray(expected)
        rule = (self.raw.get("compare") or {}).get(name)
        if rule is not None:
            assert rule == "mask", f"{self.id}: unknown comparison {rule!r}"
            keep = np.asarray(self._inputs["mask"]) > 0
            actual, desired = np.where(keep, actual, 0), np.where(keep, desired, 0)
        assert actual.shape == desired.shape, f"{self.id} {name}: shape {actual.shape}, expected {desired.shape}"
        np.testing.assert_allclose(actual, desired, **tolerance, err_msg=f"{self.id}: {name}")


def as_array(value: Any) -> Any:
    """Lists become arrays, with NaN for null; scalars and null stay."""
    if not isinstance(value, list):
        return value
    array = np.array(value, dtype=object)
    if any(x is None for x in array.reshape(-1)):
        array = np.where(array == None, np.nan, array).astype(np.float64)  # noqa: E711
    else:
        array = np.array(value)
    return jnp.asarray(array)


def load() -> list[Case]:
    """All cases of the folder, in the order of the files."""
    cases = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        if content["format"] != 1:
            raise ValueError(f"{path}: format {content['format']} is not known")
        cases += [Case(path.stem, raw, content.get("batches") or {}) for raw in content["cases"]]
    return cases
