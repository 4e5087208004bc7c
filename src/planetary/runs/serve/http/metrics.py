"""Numbers of the endpoint for Prometheus, under the names that dashboards of vLLM know."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from planetary.runs.serve.http.service import Service

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServingMetrics:
    """Of one endpoint.

    Attributes:
        prompt_tokens, generated_tokens: counters.
        first_token_s, between_tokens_s, whole_s: histograms, in seconds.
        finished: counter by reason.
    """

    def __init__(self, services: Sequence[Service]) -> None:
        """Begin at 0; gauges are read from the services when they are asked for."""
        registry = self._registry = CollectorRegistry()
        caches = len(services)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Tokens of prompts", registry=registry)
        self.generated_tokens = Counter("vllm:generation_tokens", "Generated tokens", registry=registry)
        self.first_token_s = Histogram(
            "vllm:time_to_first_token_seconds", "Until the first token", buckets=_LONG, registry=registry
        )
        self.between_tokens_s = Histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a text", buckets=_SHORT, registry=registry
        )
        self.whole_s = Histogram(
            "vllm:e2e_request_latency_seconds", "Of a whole request", buckets=_LONG, registry=registry
        )
        self.finished = Counter(
            "vllm:request_success", "Finished texts by reason", ["finished_reason"], registry=registry
        )
        gauges = {
            "vllm:num_requests_running": ("Texts that a worker computes", lambda: sum(one.running for one in services)),
            "vllm:num_requests_waiting": ("Texts without a worker", lambda: sum(one.waiting for one in services)),
            "vllm:kv_cache_usage_perc": (
                "Used part of the cache, 0 to 1",
                lambda: sum(one.cache_used for one in services) / caches,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=registry).set_function(read)

    def text(self) -> bytes:
        """Return them in Prometheus' text format."""
        return generate_latest(self._registry)
