"""Prometheus metrics of the engine, beside SGLang's own on its ``/metrics`` (``--enable-metrics``)."""

from __future__ import annotations

from functools import cache

from prometheus_client import Histogram

KL_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@cache
def _step_kl() -> Histogram:
    # made on first use: SGLang names the directory of the metrics' files when it starts
    return Histogram(
        "kvdrive_step_kl_nats",
        "KL of a probed decode step at twice its budget from the step that was served",
        buckets=KL_BUCKETS,
    )


def observe_kl(kl: float) -> None:
    """Count one probed decode step, in nats."""
    _step_kl().observe(kl)
