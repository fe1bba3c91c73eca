"""Which index an engine serves with, and where a model's constants of the key sketch are."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path

import kvdrive_sglang
from kv_tier.index import MEANS, IndexPlan
from kv_tier.meta.errors import ConfigError
from kv_tier.modes import IndexName
from kv_tier.sketch import SketchMaps, load_maps
from kv_tier.sketch_index import SketchPlan
from kv_tier.two_level_index import TwoLevelPlan
from kvdrive_sglang.calibrate import MAPS_FILE, attention_identity
from kvdrive_sglang.packaged_model import MODEL_NAME

SHIPPED = Path(kvdrive_sglang.__file__).parent / "data" / f"{MODEL_NAME}.npz"
SHIPPED_LAYERS = 30

logger = logging.getLogger(__name__)


@lru_cache(maxsize=4)
def choose_index(name: IndexName, model_path: str, context_tokens: int) -> IndexPlan:
    """Return the index that was asked for; page means, with a warning, where the sketch has no constants of the model.

    Args:
        model_path: directory of the model, or a name that SGLang resolves, for which there are no constants.
        context_tokens: positions that may be in use.
    """
    if name == "means":
        return MEANS
    if name == "two_level":
        return TwoLevelPlan()
    try:
        maps = find_maps(Path(model_path))
    except (ConfigError, OSError, ValueError) as error:
        logger.warning("index=sketch: %s; pages are ranked by their means", error)
        return MEANS
    if maps.num_positions < context_tokens:
        logger.warning(
            "index=sketch: the constants were measured up to position %d, the context reaches %d: beyond, selection is worse; "
            "run kvdrive calibrate with longer texts",
            maps.num_positions,
            context_tokens,
        )
    return SketchPlan(maps)


def find_maps(model: Path) -> SketchMaps:
    """Read the sketch's constants: of the model's directory, else those shipped for the packaged model.

    Raises:
        ConfigError: there are none of these weights, or the file is damaged.
        OSError, ValueError: the model cannot be read.
    """
    if not model.is_dir():
        raise ConfigError(
            f"{model} is no directory, which would hold {MAPS_FILE}: download it, run kvdrive calibrate"
        )
    own = model / MAPS_FILE
    if own.exists():
        return load_maps(own, attention_identity(model))
    config = json.loads((model / "config.json").read_text())
    # a model of another depth is told apart without reading its weights, tens of gigabytes perhaps
    if config.get("num_hidden_layers") == SHIPPED_LAYERS:
        try:
            return load_maps(SHIPPED, attention_identity(model))
        except ConfigError:
            pass
    raise ConfigError(f"{model} holds no {MAPS_FILE}: run kvdrive calibrate --model-path {model}")
