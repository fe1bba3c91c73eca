"""Prometheus metrics of the service, `kvdrive_service_*`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_services.conversation import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """One service's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._calls = Counter(
            "kvdrive_service_calls", "Calls by method and gRPC status", ["method", "code"], registry=registry
        )
        self._turns = Counter(
            "kvdrive_service_turns", "Turns by why they ended", ["finish"], registry=registry
        )
        self._tokens = Counter(
            "kvdrive_service_prompt_tokens",
            "Prompt tokens by where their KV came from",
            ["source"],
            registry=registry,
        )
        self._answer = Counter("kvdrive_service_answer_tokens", "Generated tokens", registry=registry)
        self._read = Counter(
            "kvdrive_service_read_bytes", "Bytes the engine read from SSD", registry=registry
        )
        self._retries = Counter(
            "kvdrive_service_lost_page_retries", "Turns continued after a lost page", registry=registry
        )
        self._ttft = Histogram(
            "kvdrive_service_ttft_seconds", "Time to first token", buckets=_SECONDS, registry=registry
        )
        self._running = Gauge("kvdrive_service_turns_running", "Turns running now", registry=registry)
        self._healthy = Gauge(
            "kvdrive_service_healthy", "1 when engine and catalog answer", registry=registry
        )
        self._corrupt = Gauge(
            "kvdrive_service_corrupt_logs", "Damaged token logs found at start", registry=registry
        )

    def called(self, method: str, code: str) -> None:
        """Count a call."""
        self._calls.labels(method, code).inc()

    def turn_ended(self, finish: str, usage: Usage) -> None:
        """Count a turn that is in the log."""
        self._turns.labels(finish).inc()
        for source in ("device", "dram", "ssd"):
            self._tokens.labels(source).inc(getattr(usage, f"restored_{source}_tokens"))
        self._tokens.labels("computed").inc(usage.computed_tokens)
        self._answer.inc(usage.completion_tokens)
        self._read.inc(usage.read_bytes)
        self._retries.inc(usage.retries)
        self._ttft.observe(usage.ttft_ms / 1e3)

    def turns_running(self, number: int) -> None:
        """Set the number of running turns."""
        self._running.set(number)

    def healthy(self, healthy: bool) -> None:
        """Set whether engine and catalog answer."""
        self._healthy.set(healthy)

    def corrupt_logs(self, number: int) -> None:
        """Set how many logs are damaged."""
        self._corrupt.set(number)
