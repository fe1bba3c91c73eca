"""Tuning: the search as a pure function with made-up costs and a clock of ours, and one small real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kv_tier.geometry import Geometry
from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.bench.tuning_cost import MOST_BYTES, shape_of
from kvdrive_sglang.cli import tune_command
from kvdrive_sglang.cli.main import build_app
from kvdrive_sglang.config import load_config, parse_config
from kvdrive_sglang.tuning import LEAST_GAIN, Search, Settings, confirm, search

START = Settings(window_multiple=2, pages_per_cluster=8, micro_batch=0)
VALUES = {"window_multiple": [1, 2, 3, 4], "pages_per_cluster": [8, 4, 2], "micro_batch": [0, 1, 2, 4]}
FOREVER = float("inf")


class Bench:
    """Cost by a formula; every measurement takes ``step_s`` of a clock that nothing else moves."""

    def __init__(self, formula: Callable[[Settings], float], step_s: float = 1.0) -> None:
        self.formula, self.step_s = formula, step_s
        self.now, self.asked = 100.0, list[Settings]()

    def cost(self, settings: Settings) -> float:
        self.now += self.step_s
        self.asked.append(settings)
        return self.formula(settings)

    def clock(self) -> float:
        return self.now

    def search(self, limit_s: float = FOREVER, start: Settings = START) -> Search:
        return search(VALUES, start, self.cost, self.clock, limit_s)


def bowl(settings: Settings) -> float:
    """Least at windows x3, micro-batches of 2, 4 pages per cluster; the fields do not depend on each other."""
    return (
        1
        + abs(settings.window_multiple - 3)
        + abs(settings.micro_batch - 2)
        + abs(settings.pages_per_cluster - 4)
    )


def test_each_field_finds_its_best_value_and_nothing_is_measured_twice() -> None:
    bench = Bench(bowl)
    found = bench.search()
    assert found.best == Settings(window_multiple=3, pages_per_cluster=4, micro_batch=2)
    assert found.complete and found.tried[found.best] == 1
    assert len(bench.asked) == len(set(bench.asked)) == len(found.tried)
    assert bench.asked[0] == START


def test_a_field_is_tried_again_when_another_changed() -> None:
    """Small windows pay only with micro-batches of one: a second round finds them."""

    def formula(settings: Settings) -> float:
        if settings.micro_batch == 1:
            return 5.0 + settings.window_multiple
        return 10.0 if settings.window_multiple == 2 else 11.0

    assert Bench(formula).search().best == Settings(window_multiple=1, pages_per_cluster=8, micro_batch=1)


def test_noise_does_not_move_it() -> None:
    found = Bench(lambda settings: 1.0 if settings == START else 1.0 - LEAST_GAIN / 2).search()
    assert found.best == START and found.complete


@pytest.mark.parametrize("limit_s", [0.5, 1, 3.5, 5, 8, 100])
def test_it_ends_in_time(limit_s: float) -> None:
    bench = Bench(bowl)
    found = bench.search(limit_s)
    assert bench.now - 100 <= max(limit_s, bench.step_s)
    assert found.tried[found.best] == min(found.tried.values()) or found.best == START
    assert found.complete == (len(found.tried) == len(Bench(bowl).search().tried))


@given(st.lists(st.floats(0.1, 10), min_size=48, max_size=48), st.floats(0, 60))
def test_whatever_things_cost_it_never_ends_worse_than_it_began(costs: list[float], limit_s: float) -> None:
    every = [
        Settings(window, cluster, micro)
        for window, cluster, micro in product(
            *(VALUES[n] for n in ("window_multiple", "pages_per_cluster", "micro_batch"))
        )
    ]
    table = dict(zip(every, costs, strict=True))
    found = Bench(table.__getitem__).search(limit_s)
    assert table[found.best] <= table[START]
    assert found.tried.items() <= table.items()


def test_what_did_not_prove_better_is_not_taken() -> None:
    lucky = Settings(window_multiple=4, pages_per_cluster=8, micro_batch=0)
    found = Search(lucky, {START: 1.0, lucky: 0.5}, True)
    bench = Bench(lambda settings: 1.0)
    tuned = confirm(found, START, bench.cost, bench.clock, FOREVER)
    assert (tuned.best, tuned.start_cost, tuned.best_cost) == (START, 1.0, 1.0)
    bench = Bench(lambda settings: 0.5 if settings == lucky else 1.0)
    tuned = confirm(found, START, bench.cost, bench.clock, FOREVER)
    assert (tuned.best, tuned.start_cost, tuned.best_cost) == (lucky, 1.0, 0.5)
    assert bench.asked == [START, lucky] * 3
    bench.asked.clear()
    confirm(found, START, bench.cost, bench.clock, 1.0)
    assert bench.asked == [START, lucky]  # once, even where time is up


# ---- the command ------------------------------------------------------------------------------------------------

MODEL = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


def kvdrive(tmp_path: Path, *arguments: object) -> Result:
    env = {"COLUMNS": "160", "KVDRIVE_CACHE": str(tmp_path / "cache")}
    return CliRunner().invoke(build_app(), ["tune", *map(str, arguments)], env=env)


def test_a_small_real_run_writes_what_the_engine_accepts(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "tuned.json"
    base = json.dumps({"budget_tokens": 256, "persist": "all"})
    ended = kvdrive(
        *(tmp_path, file, "--model-path", model, "--config", base),
        *("--context-tokens", 2048, "--batch", 2, "--limit-s", 2),
    )
    assert ended.exit_code == 0, ended.output
    assert "3 of 3 layers" in ended.stderr and "window multiple" in ended.stdout and "chosen" in ended.stdout
    written = json.loads(file.read_text())
    assert written.keys() == {
        "budget_tokens",
        "persist",
        "window_multiple",
        "pages_per_cluster",
        "micro_batch",
    }
    config = load_config(f"@{file}", data_dir="d")
    assert (config.budget_tokens, config.persist) == (256, "all")
    assert config.window_multiple in (1, 2, 3, 4) and config.micro_batch in (0, 1, 2)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", '{"budget_tokens": "all"}'], "nothing to tune"),
        (["--context-tokens", "1024"], "--context-tokens 4096"),
        (["--config", '{"window_multiple": 0}'], "window_multiple"),
        (["--model-path", "missing"], "missing/config.json"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    tmp_path: Path, model: Path, arguments: list[str], message: str
) -> None:
    ended = kvdrive(tmp_path, tmp_path / "tuned.json", "--model-path", model, *arguments)
    assert ended.exit_code == 1 and message in ended.stderr
    assert not (tmp_path / "tuned.json").exists()


def test_windows_stay_within_device_memory_and_the_request() -> None:
    geometry = Geometry(num_layers=1, num_kv_heads=2, head_dim=16)

    def tried(**fields: Any) -> list[int]:
        config = parse_config({"data_dir": "d", "budget_tokens": 256, **fields})
        return tune_command.window_multiples(config, geometry, 3, 768, 2)

    assert tried() == [1, 2, 3]
    assert tried(device_bytes=1) == []
    pair_bytes = 2 * 16 * 8 * 2 + 4
    assert tried(device_bytes=2 * 3 * 2 * (2 * 32 * pair_bytes + 12 * 96)) == [1, 2]
    assert tried(monitor_every=4, max_kl=0.1) == [2, 3]
    assert tune_command.values_for(Settings(5, 16, 3), 1, [1, 2]) == {
        "window_multiple": [1, 2, 5],
        "pages_per_cluster": [16, 8, 4, 2],
        "micro_batch": [1, 3],
    }


def test_the_shape_of_a_model(tmp_path: Path, model: Path) -> None:
    geometry, group, layers = shape_of(model, 2048, 8)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, group, layers) == (3, 2, 16, 2, 3)
    long = MOST_BYTES // (2 * 2 * 16 * 2)  # tokens of one layer
    assert shape_of(model, long, 8)[0].num_layers == 1
    (model / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shape_of(model, 2048, 8)
