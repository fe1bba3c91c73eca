"""The index that was asked for, or page means and a warning that says why."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from kv_tier.index import MEANS
from kv_tier.sketch_index import SketchPlan
from kv_tier.two_level_index import TwoLevelPlan
from kvdrive_sglang import index_choice
from kvdrive_sglang.calibrate import MAPS_FILE
from kvdrive_sglang.index_choice import SHIPPED, SHIPPED_LAYERS, choose_index
from kvdrive_sglang.packaged_model import CONTEXT_LENGTH


@pytest.fixture(autouse=True)
def _fresh() -> None:
    choose_index.cache_clear()


def configure(model: Path, layers: int = SHIPPED_LAYERS) -> None:
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model have the packaged model's weights, the one at ``tmp_path`` its shape."""
    configure(tmp_path)
    with np.load(SHIPPED) as arrays:
        found = arrays["weights"].item()
        assert len(arrays["offset"]) == SHIPPED_LAYERS
    monkeypatch.setattr(index_choice, "attention_identity", lambda model: found)


def test_means_and_two_levels_need_nothing() -> None:
    assert choose_index("means", "nowhere", 10) is MEANS
    assert isinstance(choose_index("two_level", "nowhere", 10), TwoLevelPlan)


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("own", [False, True])
def test_constants_come_from_the_model_or_are_shipped(
    tmp_path: Path, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if own:
        shutil.copy(SHIPPED, tmp_path / MAPS_FILE)
    plan = choose_index("sketch", str(tmp_path), CONTEXT_LENGTH)
    assert isinstance(plan, SketchPlan) and plan.maps.num_directions == 32
    assert caplog.text == ""


@pytest.mark.usefixtures("weights")
def test_a_context_beyond_the_calibration_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_index("sketch", str(tmp_path), 33_000), SketchPlan)
    assert "8192" in caplog.text and "33000" in caplog.text


def test_without_constants_page_means_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_index("sketch", "somebody/on-a-hub", 10) is MEANS
        assert choose_index("sketch", str(tmp_path), 10) is MEANS  # no config.json
        configure(tmp_path, SHIPPED_LAYERS + 1)
        assert choose_index("sketch", str(tmp_path), 11) is MEANS
        configure(tmp_path)
        monkeypatch.setattr(index_choice, "attention_identity", lambda model: "other weights")
        assert choose_index("sketch", str(tmp_path), 12) is MEANS
        (tmp_path / MAPS_FILE).write_bytes(b"damaged")
        assert choose_index("sketch", str(tmp_path), 13) is MEANS
    assert caplog.text.count("kvdrive calibrate") >= 2 and "page means" not in caplog.text
