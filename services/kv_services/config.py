"""Configuration of the service: built once at the edge, every value checked there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kv_tier.meta.errors import ConfigError


@dataclass(frozen=True)
class ServiceConfig:
    """What the service needs to know.

    Args:
        data_dir: shared with the engine.
        host, port: where gRPC listens; port 0 takes a free one.
        redis_url: redis://, rediss:// or unix:// URL; empty starts an embedded Valkey in the data directory.
        metrics_port: where Prometheus finds `/metrics`; None has none, 0 takes a free one.
        max_concurrent_turns: turns running at once; more answer RESOURCE_EXHAUSTED.
        default_max_new_tokens: for requests that name none.
        suspend_timeout_s: how long a suspend waits for pages to become durable.
        request_ttl_s: how long results of repeated request_ids are kept.
        tenant_quota_bytes: what one tenant's sessions and documents may take, see `retention`; 0 sets no limit.
        session_ttl_s: sessions that nobody changed for so long are deleted; 0 keeps them.
        sweep_interval_s: between two looks for expired sessions.
        health_interval_s: between two looks at engine and catalog.
        stop_grace_s: how long running turns may go on when the service stops.

    Raises:
        ConfigError: a value outside its range.
    """

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 50051
    redis_url: str = ""
    metrics_port: int | None = None
    max_concurrent_turns: int = 64
    default_max_new_tokens: int = 512
    suspend_timeout_s: float = 60.0
    request_ttl_s: int = 86_400
    tenant_quota_bytes: int = 0
    session_ttl_s: int = 0
    sweep_interval_s: float = 60.0
    health_interval_s: float = 2.0
    stop_grace_s: float = 10.0

    def __post_init__(self) -> None:
        ports = {"port": self.port, "metrics_port": self.metrics_port or 0}
        for name, port in ports.items():
            _check(0 <= port <= 65_535, name, port, "0 to 65535")
        _check(self.host != "", "host", self.host, "a name or an address")
        schemes = ("", "redis://", "rediss://", "unix://")
        good = not self.redis_url or self.redis_url.startswith(schemes[1:])
        _check(
            good,
            "redis_url",
            self.redis_url.partition("@")[2] or self.redis_url,
            "redis://, rediss:// or unix://",
        )
        for name in ("max_concurrent_turns", "default_max_new_tokens", "request_ttl_s"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("tenant_quota_bytes", "session_ttl_s"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("suspend_timeout_s", "sweep_interval_s", "health_interval_s"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _check(self.stop_grace_s >= 0, "stop_grace_s", self.stop_grace_s, "at least 0")


def _check(good: bool, name: str, value: object, limit: str) -> None:
    if not good:
        raise ConfigError(f"{name} is {value!r}; it must be {limit}: change --{name.replace('_', '-')}")
