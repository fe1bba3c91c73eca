"""The one configuration of the plugin: a frozen value, validated once, from one JSON object."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kv_tier.meta.errors import ConfigError
from kv_tier.modes import DEFAULT_EVICTION, ColdEncoding, EvictionName, FetchMode, IndexName, RestoreMode

CONFIG_ENV = "KVDRIVE_CONFIG"
LINKER = {"linker": "KVDriveLinker", "linker_module_path": "kvdrive_sglang.linker"}
MIB = 1 << 20

Positive = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class KVDriveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say what the tiered sparse store may use and how it selects.

    Args:
        data_dir: directory of spans, control socket and locks; one engine owns it.
        budget_tokens: positions one (layer, KV head) attends per step, or "all" for full attention.
        index: what ranks pages: "sketch" (needs constants of the model, kvdrive calibrate; without them page means serve),
            "means" or "two_level" (docs/decode_step.md).
        window_multiple: window cache size as a multiple of the budget.
        fetch_mode: how decode reads pages that are on SSD: "blockwise", "hierarchical", "balanced" or "layerwise"
            (docs/decode_step.md); never changes an answer.
        micro_batch: decoding requests per micro-batch, whose selection, reads and attention overlap with the others'; 0 cuts
            batches that read much from SSD, into four at most; never changes an answer.
        pages_per_cluster: pages of a stretch for each of its centroids, which say what lies side by side in a span; never
            changes an answer (index=two_level has two pages for each in closed stretches).
        eviction: who leaves a window cache: "smoothed", "lookahead" (the paper's), "lru" or "lfu".
        window_profile: file of `kvdrive profile`; what uniform windows would take is shared among layers and KV heads.
        num_sink_tokens, local_window_tokens: always attended, inside the budget.
        stretch_tokens: positions per stretch (clustering, spans).
        append: "exact", "sparse" or "auto": how new tokens after a prefix attend.
        append_sparse_max_tokens, append_exact_max_prefix_tokens: the token counts "auto" and "sparse" decide by.
        cold_encoding: what the session service's suspend transcodes a session to: "none", "int8" or "fp8"; loses a little
            (docs/operations.md), and part of what approximate pages are filed under.
        encryption_key_file: encrypts spans at rest (docs/operations.md): a file of 64 hexadecimal digits that its owner alone can
            read, kept away from data_dir. None, the default, writes them plain.
        persist: "sessions" keeps files for requests with a session id only, "all" for every request.
        restore: "auto" computes the pages of a prefix again where that was measured to be faster than reading them, "always"
            reads them (docs/operations.md).
        device_bytes: window caches and indexes of requests, running or paused; who finds none waits.
        dram_bytes: frames, page means, the index, tables and read buffers.
        ssd_bytes: span files and quarantined ones; never more, the file being written included.
        ssd_high_watermark, ssd_low_watermark: fractions of ssd_bytes; a write that passes the high one first evicts spans that
            nobody uses, least recently used first, down to the low one.
        logical_tokens: positions that may run or stay in the tree at once; 0 takes four times the frames.
        monitor_every: the quality monitor repeats a decode step at twice the budget when the sequence length is a
            multiple of it; 0 is off.
        max_kl: nats; a request whose mean over 32 steps is above it gets twice the budget for the rest of its turn.
        trace_path: file that receives a trace of the decode steps, for Chrome's or Perfetto's viewer; None writes none.
        strict_data_dir: refuse a data directory with spans of another model or layout.
        model_revision: stands for the weights in the fingerprint instead of a digest of the files.
        http_host, http_port: where the engine listens, told to the session service.
    """

    data_dir: str
    budget_tokens: Positive | Literal["all"] = 1024
    index: IndexName = "sketch"
    window_multiple: Positive = 2
    fetch_mode: FetchMode = "blockwise"
    micro_batch: NotNegative = 0
    pages_per_cluster: Positive = 8
    eviction: EvictionName = DEFAULT_EVICTION
    window_profile: str | None = None
    num_sink_tokens: NotNegative = 4
    local_window_tokens: Positive = 64
    stretch_tokens: Positive = 1024
    append: Literal["auto", "exact", "sparse"] = "auto"
    append_sparse_max_tokens: Positive = 512
    append_exact_max_prefix_tokens: NotNegative = 32768
    cold_encoding: ColdEncoding = "none"
    encryption_key_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    persist: Literal["sessions", "all"] = "sessions"
    restore: RestoreMode = "auto"
    device_bytes: Positive = 2048 * MIB
    dram_bytes: Positive = 2048 * MIB
    ssd_bytes: Positive = 32 * 1024 * MIB
    ssd_high_watermark: Fraction = 0.95
    ssd_low_watermark: Fraction = 0.85
    logical_tokens: NotNegative = 0
    monitor_every: NotNegative = 0
    max_kl: Annotated[float, msgspec.Meta(gt=0)] | None = None
    trace_path: str | None = None
    strict_data_dir: bool = False
    model_revision: str | None = None
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 30000

    def __post_init__(self) -> None:
        if not self.data_dir:
            raise ConfigError("data_dir is empty: name a directory on a local disk")
        if self.max_kl is not None and not self.monitor_every:
            raise ConfigError(
                f"max_kl={self.max_kl} needs the quality monitor: set monitor_every, for example to 4"
            )
        if self.max_kl is not None and self.window_multiple < 2:
            raise ConfigError(
                f"max_kl={self.max_kl} may double a budget, window_multiple={self.window_multiple} has no room for it: "
                f"raise window_multiple to 2 or more"
            )
        if self.ssd_low_watermark > self.ssd_high_watermark:
            raise ConfigError(
                f"ssd_low_watermark={self.ssd_low_watermark} is above ssd_high_watermark={self.ssd_high_watermark}: lower it"
            )
        if self.window_profile is not None and (self.max_kl is not None or self.budget_tokens == "all"):
            other = f"max_kl={self.max_kl}" if self.max_kl is not None else "budget_tokens=all"
            raise ConfigError(
                f"window_profile={self.window_profile} goes with neither max_kl nor budget_tokens=all, whose window "
                f"caches have other sizes: drop it or {other}"
            )

    def selection_digest(self, selector: str) -> bytes:
        """Return 32 bytes over everything that decides what sparse attention attends.

        Args:
            selector: identity of the index that serves, its constants included (``IndexPlan.identity``).
        """
        fields: dict[str, Any] = {
            "selector": selector,
            "budget_tokens": self.budget_tokens,
            "num_sink_tokens": self.num_sink_tokens,
            "local_window_tokens": self.local_window_tokens,
            "append": self.append,
            "append_sparse_max_tokens": self.append_sparse_max_tokens,
            "append_exact_max_prefix_tokens": self.append_exact_max_prefix_tokens,
        }
        if self.max_kl is not None:
            fields |= {"max_kl": self.max_kl, "monitor_every": self.monitor_every}
        if self.cold_encoding != "none":
            fields["cold_encoding"] = f"{self.cold_encoding}/1"
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()

    def linker_config(self) -> dict[str, Any]:
        """Return the value of SGLang's --unified-cache-external-linker-config that carries this configuration."""
        return {**LINKER, "linker_extra_config": msgspec.to_builtins(self)}


def parse_config(fields: dict[str, Any]) -> KVDriveConfig:
    """Build the configuration from a JSON object.

    Raises:
        ConfigError: an unknown name, a wrong type or a value out of range; the message names the field.
    """
    try:
        return msgspec.convert(fields, KVDriveConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"KVDrive configuration: {error}; known fields: {', '.join(KVDriveConfig.__struct_fields__)}"
        ) from error


def config_fields(text: str | None) -> dict[str, Any]:
    """Read the fields of a configuration, unchecked, from JSON text, from ``@file``, or from the environment when ``text``
    is None.

    Raises:
        ConfigError: not a JSON object, or an unreadable file.
    """
    source = text if text is not None else os.environ.get(CONFIG_ENV, "{}")
    if source.startswith("@"):
        try:
            source = Path(source[1:]).read_text()
        except OSError as error:
            raise ConfigError(f"cannot read the configuration file {source[1:]}: {error.strerror}") from error
    try:
        fields = json.loads(source)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the configuration is no JSON: {error}; got {source[:80]!r}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"the configuration must be a JSON object, got {type(fields).__name__}")
    return fields


def load_config(text: str | None, **overrides: Any) -> KVDriveConfig:
    """Read the configuration from where ``config_fields`` finds it.

    Args:
        overrides: fields set by single flags; None means unset.

    Raises:
        ConfigError: as ``config_fields``, or a value that ``parse_config`` refuses.
    """
    fields = config_fields(text)
    fields.update({name: value for name, value in overrides.items() if value is not None})
    return parse_config(fields)


def config_of_linker(linker_config: dict[str, Any] | None) -> KVDriveConfig:
    """Return the configuration that SGLang's linker flag carries, in whichever process asks.

    Raises:
        ConfigError: the flag is absent or names another linker.
    """
    if not linker_config or linker_config.get("linker") != LINKER["linker"]:
        raise ConfigError(
            "the kvdrive attention backend needs --unified-cache-external-linker-config with KVDriveLinker; start the "
            "engine with `kvdrive engine`, or pass the flags that `kvdrive engine --print-flags` shows"
        )
    return parse_config(linker_config.get("linker_extra_config", {}))
