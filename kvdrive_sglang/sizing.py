"""From bytes to frames and logical pages."""

from __future__ import annotations

from kv_tier.fetch import ROUND_BYTES
from kv_tier.geometry import Geometry
from kv_tier.index import MEANS, IndexPlan
from kv_tier.layer_stream import stream_bytes
from kv_tier.meta.errors import ConfigError
from kv_tier.staging import Staging
from kvdrive_sglang.config import KVDriveConfig

LOGICAL_OVER_FRAMES = 4  # what may run or stay in the tree at once, as a multiple of what DRAM holds
MAX_DEVICE_REQUESTS = 256  # running and paused
TABLE_BYTES_PER_PAGE = 8 * 6 + 2  # columns of the page table beside the page means
READ_MARK_BYTES = 8  # per KV head of a page: when it was last read (`Fetcher`)
SPAN_TABLE_BYTES_PER_PAIR = 10  # order, inverse order and cluster (2 each), checksum (4) of an attached page


def logical_pages_for(
    config: KVDriveConfig, geometry: Geometry, least_tokens: int, index: IndexPlan = MEANS
) -> int:
    """Return how many logical pages SGLang may hand out: ``logical_tokens``, or four times the frames.

    Args:
        least_tokens: the context length; a single request must always fit.
        index: what ranks pages.
    """
    if config.logical_tokens:
        return geometry.num_pages(config.logical_tokens)
    tables = LOGICAL_OVER_FRAMES * _table_bytes(geometry, index)
    frames = max(0, config.dram_bytes - buffer_bytes(geometry)) // (_frame_bytes(geometry) + tables)
    return max(LOGICAL_OVER_FRAMES * frames, geometry.num_pages(least_tokens))


def frames_for(config: KVDriveConfig, geometry: Geometry, num_pages: int, index: IndexPlan = MEANS) -> int:
    """Return how many frames ``dram_bytes`` holds beside the tables of ``num_pages`` logical pages and the buffers.

    Raises:
        ConfigError: tables and buffers alone do not fit.
    """
    beside = dram_bytes_for(0, num_pages, geometry, index)
    frames = (config.dram_bytes - beside) // _frame_bytes(geometry)
    if frames < 2:
        raise ConfigError(
            f"dram_bytes={config.dram_bytes} does not hold the index and tables of {num_pages} logical pages and "
            f"the read buffers ({beside} bytes): raise dram_bytes or lower logical_tokens"
        )
    return min(frames, num_pages + 1)


def device_requests_for(config: KVDriveConfig, request_bytes: int) -> int:
    """Return for how many requests ``device_bytes`` holds window caches and an index of ``request_bytes``.

    Raises:
        ConfigError: for none.
    """
    count = config.device_bytes // request_bytes
    if count == 0:
        raise ConfigError(
            f"device_bytes={config.device_bytes} does not hold the window caches and the index of one request: raise "
            f"device_bytes to {request_bytes}, or lower budget_tokens, window_multiple or --context-length"
        )
    return min(count, MAX_DEVICE_REQUESTS)


def dram_bytes_for(frames: int, num_pages: int, geometry: Geometry, index: IndexPlan = MEANS) -> int:
    """Return the ``dram_bytes`` that hold ``frames`` frames, the tables of ``num_pages`` pages and the buffers."""
    tables = num_pages * _table_bytes(geometry, index)
    return frames * _frame_bytes(geometry) + tables + buffer_bytes(geometry)


def buffer_bytes(geometry: Geometry) -> int:
    """Return what reading may hold at once: the tiles of one stream, a batch on demand and one ahead of it."""
    return stream_bytes(geometry) + 2 * ROUND_BYTES


def _frame_bytes(geometry: Geometry) -> int:
    return geometry.page_bytes + Staging.bytes_for(geometry, 0, 1)


def _table_bytes(geometry: Geometry, index: IndexPlan) -> int:
    pairs = geometry.num_layers * geometry.num_kv_heads
    marks = READ_MARK_BYTES * geometry.num_kv_heads
    tables = TABLE_BYTES_PER_PAGE + marks + SPAN_TABLE_BYTES_PER_PAIR * pairs
    return geometry.mean_bytes + index.table_bytes(geometry) + tables + Staging.bytes_for(geometry, 1, 0)
