"""Every index on the synthetic engine's geometry."""

from __future__ import annotations

from functools import lru_cache

from kv_tier.index import MEANS, IndexPlan
from kv_tier.modes import IndexName
from kv_tier.sketch import SketchMaps, moments_of, solve_maps
from kv_tier.sketch_index import SketchPlan
from kv_tier.two_level_index import TwoLevelPlan
from tests.models.synthetic_engine import make_script


@lru_cache
def sketch_maps(seed: int = 99, *, directions: int = 6, entry_tokens: int = 1) -> SketchMaps:
    """Solve the constants on a sequence of their own."""
    script = make_script(400, seed=seed)
    moments = [
        moments_of(query.permute(1, 2, 0, 3).flatten(1, 2), k.transpose(0, 1))
        for query, k in zip(script.query, script.k, strict=True)
    ]
    return solve_maps(moments, directions, num_positions=400, entry_tokens=entry_tokens)


def plan_of(name: IndexName) -> IndexPlan:
    if name == "means":
        return MEANS
    return TwoLevelPlan() if name == "two_level" else SketchPlan(sketch_maps())
