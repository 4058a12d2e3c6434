"""How hypothesis runs here."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase

# The same examples each time: a failure is one of the change at hand. The product outlives them all.
COMMONLY: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    # An example takes seconds: a smaller one is not worth a hundred of them.
    "phases": [Phase.generate],
}
