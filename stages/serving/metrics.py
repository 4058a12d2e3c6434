"""Prometheus metrics of one server."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram


class Metrics:
    """The counters of one server; their names begin with `rlhf_serve_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"namespace": "rlhf_serve", "registry": self.registry}
        buckets = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
        self.requests = Counter(
            "requests", "Answers; status 0 if the client left before.", ["route", "status"], **options
        )
        self.seconds = Histogram("request_seconds", "Time of an answer.", buckets=buckets, **options)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **options)
        self.completion_tokens = Counter("completion_tokens", "Sampled tokens.", **options)
