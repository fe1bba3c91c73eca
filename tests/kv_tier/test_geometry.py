from __future__ import annotations

import pytest
import torch

from kv_tier.geometry import Geometry
from kv_tier.meta.errors import ConfigError


def test_sizes_follow_from_the_dimensions() -> None:
    geometry = Geometry(num_layers=3, num_kv_heads=2, head_dim=16, page_size=8, stretch_tokens=64)
    assert geometry.pages_per_stretch == 8
    assert geometry.page_elements == 8 * 16
    assert geometry.page_head_bytes == 2 * 8 * 16 * 2
    assert geometry.page_bytes == geometry.page_head_bytes * 6
    assert geometry.token_bytes * 8 == geometry.page_bytes
    assert geometry.mean_bytes == 6 * 16 * 2


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (2000, 250)])
def test_pages_are_rounded_up(num_tokens: int, num_pages: int) -> None:
    assert Geometry(1, 1, 16).num_pages(num_tokens) == num_pages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: must be positive"),
        ({"page_size": -1}, "page_size=-1: must be positive"),
        ({"stretch_tokens": 1023}, "stretch_tokens=1023 is no multiple of page_size=8: use 1016"),
        ({"stretch_tokens": 5}, "stretch_tokens=5 is no multiple of page_size=8: use 8"),
        ({"dtype": torch.int8}, "dtype=torch.int8: must be one of bfloat16, float16, float32"),
    ],
)
def test_refusals_name_the_value(change: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, **change}
    with pytest.raises(ConfigError) as refusal:
        Geometry(**sizes)  # type: ignore[arg-type]
    assert message in str(refusal.value)
