"""Bytes become frames and logical pages, or a refusal that names the flag."""

from __future__ import annotations

import pytest

from kv_tier.geometry import Geometry
from kv_tier.meta.errors import CapacityError, ConfigError
from kv_tier.store import StoreLimits, require_capacity
from kv_tier.two_level_index import TwoLevelPlan
from kvdrive_sglang.config import parse_config
from kvdrive_sglang.sizing import (
    buffer_bytes,
    device_requests_for,
    dram_bytes_for,
    frames_for,
    logical_pages_for,
)

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16)


def test_frames_and_tables_stay_within_dram_bytes() -> None:
    config = parse_config({"data_dir": "d", "dram_bytes": 40_000_000})
    pages = logical_pages_for(config, GEOMETRY, least_tokens=64)
    frames = frames_for(config, GEOMETRY, pages)
    tables = pages * (GEOMETRY.mean_bytes + 50)
    assert frames * GEOMETRY.page_bytes + tables + buffer_bytes(GEOMETRY) <= config.dram_bytes
    assert dram_bytes_for(frames, pages, GEOMETRY) <= config.dram_bytes
    assert pages >= 3 * frames


def test_one_request_always_fits_the_logical_pages() -> None:
    config = parse_config({"data_dir": "d", "dram_bytes": 100_000})
    assert logical_pages_for(config, GEOMETRY, least_tokens=100_000) == 12_500
    explicit = parse_config({"data_dir": "d", "logical_tokens": 801})
    assert logical_pages_for(explicit, GEOMETRY, least_tokens=8) == 101


def test_tables_that_do_not_fit_are_refused() -> None:
    config = parse_config({"data_dir": "d", "dram_bytes": 1000})
    with pytest.raises(ConfigError, match="dram_bytes=1000"):
        frames_for(config, GEOMETRY, 500)


def test_two_chunks_and_the_decode_tails_must_fit() -> None:
    limits = StoreLimits(100, 40, 50, 2, max_requests=4)
    require_capacity(limits, GEOMETRY, chunk_tokens=136)
    with pytest.raises(CapacityError, match=r"dram_bytes.*--chunked-prefill-size"):
        require_capacity(limits, GEOMETRY, chunk_tokens=160)


def test_device_bytes_hold_whole_requests_or_are_refused() -> None:
    config = parse_config({"data_dir": "d", "device_bytes": 1000})
    assert device_requests_for(config, 300) == 3
    assert device_requests_for(config, 1) == 256
    with pytest.raises(ConfigError, match=r"device_bytes=1000 .* raise device_bytes to 1001"):
        device_requests_for(config, 1001)


def test_the_index_is_counted_in_dram() -> None:
    config = parse_config({"data_dir": "d", "dram_bytes": 40_000_000})
    plan = TwoLevelPlan()
    pages = logical_pages_for(config, GEOMETRY, 64, plan)
    assert pages < logical_pages_for(config, GEOMETRY, 64)
    frames = frames_for(config, GEOMETRY, pages, plan)
    tables = pages * (GEOMETRY.mean_bytes + plan.table_bytes(GEOMETRY) + 50)
    assert frames * GEOMETRY.page_bytes + tables + buffer_bytes(GEOMETRY) <= config.dram_bytes
