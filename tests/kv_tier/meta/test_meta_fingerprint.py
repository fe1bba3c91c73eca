"""Fingerprints: equal only for equal engines, and never made of unknowns."""

import hashlib
import os
from pathlib import Path

import pytest

from kv_tier.meta.errors import ConfigError
from kv_tier.meta.fingerprint import (
    REQUIRED_FIELDS,
    engine_fingerprint,
    tokenizer_identity,
    weights_identity,
)

FIELDS: dict[str, str | int | None] = {
    "weights": "sha256:aa",
    "tokenizer": "sha256:bb",
    "dtype": "bfloat16",
    "page_size": 8,
    "stretch_tokens": 1024,
    "rope_scaling": None,
}


def test_pinned_and_independent_of_order() -> None:
    canonical = (
        b'{"fields":{"dtype":"bfloat16","page_size":8,"rope_scaling":null,"stretch_tokens":1024,'
        b'"tokenizer":"sha256:bb","weights":"sha256:aa"},"kvdrive_format":1}'
    )
    assert engine_fingerprint(FIELDS) == hashlib.sha256(canonical).digest()
    assert engine_fingerprint(dict(reversed(FIELDS.items()))) == engine_fingerprint(FIELDS)


@pytest.mark.parametrize(
    "change",
    [{"page_size": 16}, {"page_size": "8"}, {"dtype": "float16"}, {"rope_scaling": "x"}, {"more": 1}],
)
def test_any_change_changes_it(change: dict[str, str | int | None]) -> None:
    assert engine_fingerprint(FIELDS | change) != engine_fingerprint(FIELDS)


@pytest.mark.parametrize("name", REQUIRED_FIELDS)
@pytest.mark.parametrize("value", [None, ""])
def test_required_fields(name: str, value: str | None) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is unknown: pass it"):
        engine_fingerprint(FIELDS | {name: value})
    with pytest.raises(ConfigError, match=f"'{name}' is unknown"):
        engine_fingerprint({key: kept for key, kept in FIELDS.items() if key != name})


@pytest.mark.parametrize("value", [1.5, True, b"x", ["x"]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="pass a str, an int or None"):
        engine_fingerprint(FIELDS | {"extra": value})  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 1000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("{}")
    return tmp_path


def test_weights_identity_follows_contents(model: Path) -> None:
    first = weights_identity(model)
    assert first.startswith("sha256:")
    assert weights_identity(str(model)) == first
    (model / "generation_config.json").write_text('{"temperature": 1}')
    (model / "README.md").write_text("x")
    assert weights_identity(model) == first
    for name, data in (
        ("config.json", b"{ }"),
        ("model.safetensors", b"WEIGHTS" * 1000),
        ("b.safetensors", b""),
    ):
        (model / name).write_bytes(data)
        changed = weights_identity(model)
        assert changed != first, name
        first = changed


def test_a_renamed_or_moved_model(model: Path) -> None:
    first = weights_identity(model)
    moved = model.rename(model.parent / "elsewhere")
    assert weights_identity(moved) == first
    (moved / "model.safetensors").rename(moved / "other.safetensors")
    assert weights_identity(moved) != first


def test_contents_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_identity(model)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert weights_identity(model) == first


def test_a_single_file(model: Path) -> None:
    assert weights_identity(model / "model.safetensors") == weights_identity(model / "model.safetensors")
    assert tokenizer_identity(model / "tokenizer.json") != weights_identity(model / "model.safetensors")


def test_tokenizer_identity(model: Path) -> None:
    first = tokenizer_identity(model)
    (model / "config.json").write_text('{"x": 1}')
    assert tokenizer_identity(model) == first
    (model / "tokenizer.json").write_text('{"x": 1}')
    assert tokenizer_identity(model) != first


def test_revisions() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert weights_identity("org/model", commit) == f"commit:org/model@{commit}"
    assert tokenizer_identity("org/model", commit) != tokenizer_identity("org/other", commit)
    for revision in ("main", "", "v1.0", commit[:-1], commit.upper()):
        with pytest.raises(ConfigError, match="can move: pass the commit hash"):
            weights_identity("org/model", revision)


def test_unknown_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'org/model' holds no weight files.*commit hash"):
        weights_identity("org/model")
    with pytest.raises(ConfigError, match=r"holds no tokenizer files.*commit hash"):
        tokenizer_identity(tmp_path)


def test_an_unreadable_file_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(model / "config.json", ns=(1, 1))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(ConfigError, match=r"cannot read .*config.json: Input/output error"):
        weights_identity(model)
