"""From bytes to frames and logical pages."""

from __future__ import annotations

from kv_tier.geometry import Geometry
from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.config import KVDriveConfig

LOGICAL_OVER_FRAMES = 4  # what may run or stay in the tree at once, as a multiple of what DRAM holds
TABLE_BYTES_PER_PAGE = 8 * 6 + 2  # columns of the page table beside the page means


def logical_pages_for(config: KVDriveConfig, geometry: Geometry, least_tokens: int) -> int:
    """Return how many logical pages SGLang may hand out: ``logical_tokens``, or four times the frames.

    Args:
        least_tokens: the context length; a single request must always fit.
    """
    if config.logical_tokens:
        return geometry.num_pages(config.logical_tokens)
    frames = config.dram_bytes // (geometry.page_bytes + LOGICAL_OVER_FRAMES * _table_bytes(geometry))
    return max(LOGICAL_OVER_FRAMES * frames, geometry.num_pages(least_tokens))


def frames_for(config: KVDriveConfig, geometry: Geometry, num_pages: int) -> int:
    """Return how many frames ``dram_bytes`` holds beside the page means and tables of ``num_pages`` logical pages.

    Raises:
        ConfigError: the tables alone do not fit.
    """
    tables = num_pages * _table_bytes(geometry)
    frames = (config.dram_bytes - tables) // geometry.page_bytes
    if frames < 2:
        raise ConfigError(
            f"dram_bytes={config.dram_bytes} does not hold the page means and tables of {num_pages} logical pages "
            f"({tables} bytes): raise dram_bytes or lower logical_tokens"
        )
    return min(frames, num_pages + 1)


def _table_bytes(geometry: Geometry) -> int:
    return geometry.mean_bytes + TABLE_BYTES_PER_PAGE
