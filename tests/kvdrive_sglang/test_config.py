"""One configuration, every value validated, the field named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_tier.meta.errors import ConfigError
from kv_tier.modes import INDEXES
from kvdrive_sglang.config import CONFIG_ENV, config_of_linker, load_config, parse_config


def test_defaults_and_round_trip_through_the_linker_flag() -> None:
    config = parse_config({"data_dir": "d", "budget_tokens": "all"})
    assert config_of_linker(config.linker_config()) == config
    assert config.budget_tokens == "all" and config.window_multiple == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget_tokens", 0),
        ("budget_tokens", "some"),
        ("window_multiple", 0),
        ("micro_batch", -1),
        ("num_sink_tokens", -1),
        ("local_window_tokens", 0),
        ("eviction", "random"),
        ("append", "maybe"),
        ("cold_encoding", "int4"),
        ("encryption_key_file", ""),
        ("persist", "never"),
        ("device_bytes", -5),
        ("dram_bytes", "2G"),
        ("http_port", 70000),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        parse_config({"data_dir": "d", field: value})


def test_unknown_fields_and_missing_directory() -> None:
    with pytest.raises(ConfigError, match="budget_tokenz"):
        parse_config({"data_dir": "d", "budget_tokenz": 5})
    with pytest.raises(ConfigError, match="data_dir"):
        parse_config({})
    with pytest.raises(ConfigError, match="data_dir"):
        parse_config({"data_dir": ""})


def test_sources_file_text_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvdrive.json"
    file.write_text(json.dumps({"data_dir": "d", "budget_tokens": 512}))
    assert load_config(f"@{file}").budget_tokens == 512
    assert load_config(f"@{file}", budget_tokens=256, append=None).budget_tokens == 256
    monkeypatch.setenv(CONFIG_ENV, json.dumps({"data_dir": "from-env"}))
    assert load_config(None).data_dir == "from-env"
    with pytest.raises(ConfigError, match=r"missing\.json"):
        load_config("@missing.json")
    with pytest.raises(ConfigError, match="no JSON"):
        load_config("{")
    with pytest.raises(ConfigError, match="object"):
        load_config("[]")


def test_another_linker_is_refused() -> None:
    with pytest.raises(ConfigError, match="kvdrive engine"):
        config_of_linker(None)
    with pytest.raises(ConfigError, match="kvdrive engine"):
        config_of_linker({"linker": "Other"})


@pytest.mark.parametrize(
    "other", [{"budget_tokens": "all"}, {"max_kl": 0.1, "monitor_every": 4}], ids=["all", "max_kl"]
)
def test_a_window_profile_goes_with_one_budget_only(other: dict[str, Any]) -> None:
    assert parse_config({"data_dir": "d", "window_profile": "p.json"}).window_profile == "p.json"
    with pytest.raises(ConfigError, match=r"window_profile=p\.json"):
        parse_config({"data_dir": "d", "window_profile": "p.json", **other})


def test_selection_digest_follows_what_selects() -> None:
    def digest(selector: str = "page_means/1", **fields: Any) -> bytes:
        return parse_config({"data_dir": "d", **fields}).selection_digest(selector)

    base = digest()
    assert base == digest(data_dir="e", window_multiple=3, eviction="lru", device_bytes=1)
    assert base == digest(window_profile="p.json")
    changes: tuple[dict[str, Any], ...] = (
        {"budget_tokens": 512},
        {"append": "exact"},
        {"num_sink_tokens": 8},
        {"local_window_tokens": 32},
        {"cold_encoding": "int8"},
        {"cold_encoding": "fp8"},
        {"selector": "key_sketch/1/aa"},
    )
    assert all(digest(**change) != base for change in changes)


def test_every_index_can_be_asked_for() -> None:
    assert parse_config({"data_dir": "d"}).index == "sketch"
    assert [parse_config({"data_dir": "d", "index": name}).index for name in INDEXES] == list(INDEXES)
    with pytest.raises(ConfigError, match="index"):
        parse_config({"data_dir": "d", "index": "quest"})
