"""What a server counts, and its text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator, Mapping

SECONDS = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Upper bounds of the buckets of answers' times."""
ROUTES = re.compile(r"/sessions/[^/]+(?=/|$)")
KNOWN = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics", "/version"),
    *("/weight_info", "/weights"),
    *("/sessions/NAME", "/sessions/NAME/reward", "/sessions/NAME/v1/models"),
    *("/sessions/NAME/v1/completions", "/sessions/NAME/v1/chat/completions"),
)


def route_of(path: str) -> str:
    """A path as a label: one of few, whatever clients ask for."""
    route = ROUTES.sub("/sessions/NAME", path, count=1)
    return route if route in KNOWN else "other"


class Counts:
    """Counters of one server. All are changed by its event loop alone."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests that are being answered, without those that only look."""
        self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
        """Answers by route and status; status 0 where the client left before one."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._seconds: collections.Counter[float] = collections.Counter()
        self._total = 0.0

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        self.answers[route_of(path), status] += 1
        self._seconds[next((bound for bound in SECONDS if seconds <= bound), float("inf"))] += 1
        self._total += seconds

    def text(self, gauges: Mapping[str, float], infos: Mapping[str, Mapping[str, str]]) -> str:
        """The page /metrics. gauges: further values by name. infos: labels of series that are always 1, by name."""
        return "\n".join(self._lines(gauges, infos)) + "\n"

    def _lines(self, gauges: Mapping[str, float], infos: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
        for name, labels in infos.items():
            yield f"# TYPE rlhf_serve_{name} gauge"
            # JSON escapes quotes, backslashes and line breaks as the format does.
            yield f"rlhf_serve_{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}} 1"
        yield "# TYPE rlhf_serve_requests_total counter"
        for (route, status), count in sorted(self.answers.items()):
            yield f'rlhf_serve_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, value in (("prompt", self.prompt_tokens), ("completion", self.completion_tokens)):
            yield f"# TYPE rlhf_serve_{name}_tokens_total counter"
            yield f"rlhf_serve_{name}_tokens_total {value}"
        yield "# TYPE rlhf_serve_request_seconds histogram"
        below = 0
        for bound in SECONDS:
            below += self._seconds[bound]
            yield f'rlhf_serve_request_seconds_bucket{{le="{bound:g}"}} {below}'
        total = sum(self._seconds.values())
        yield f'rlhf_serve_request_seconds_bucket{{le="+Inf"}} {total}'
        yield f"rlhf_serve_request_seconds_sum {self._total:.6f}"
        yield f"rlhf_serve_request_seconds_count {total}"
        for name, gauge in {"requests_in_flight": float(self.in_flight), **gauges}.items():
            yield f"# TYPE rlhf_serve_{name} {'counter' if name.endswith('_total') else 'gauge'}"
            yield f"rlhf_serve_{name} {gauge:g}"
