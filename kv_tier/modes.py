"""The fetch modes by name; imports nothing, so that configuration stays light."""

from typing import Literal, get_args

FetchMode = Literal["layerwise", "blockwise", "hierarchical", "balanced"]
FETCH_MODES: tuple[FetchMode, ...] = get_args(FetchMode)
