"""Modes and policies by name; imports nothing, so that configuration stays light."""

from typing import Literal, get_args

FetchMode = Literal["layerwise", "blockwise", "hierarchical", "balanced"]
FETCH_MODES: tuple[FetchMode, ...] = get_args(FetchMode)

RestoreMode = Literal["auto", "always"]

EvictionName = Literal["smoothed", "lookahead", "lru", "lfu"]
EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
DEFAULT_EVICTION: EvictionName = "smoothed"

ColdEncoding = Literal["none", "int8", "fp8"]
COLD_ENCODINGS: tuple[ColdEncoding, ...] = get_args(ColdEncoding)

IndexName = Literal["means", "sketch", "two_level"]
INDEXES: tuple[IndexName, ...] = get_args(IndexName)
