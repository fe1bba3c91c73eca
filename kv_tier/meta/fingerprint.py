"""Fingerprints: which model and configuration wrote a KV page. Whatever is unknown must not match.

engine fingerprint = sha256 of canonical JSON of {weights, tokenizer, dtype, page and stretch size, ...}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from kv_tier.meta.errors import ConfigError
from kv_tier.meta.span_format import FORMAT_VERSION

REQUIRED_FIELDS = ("weights", "tokenizer", "dtype", "page_size", "stretch_tokens")
"""Fields without which two different engines could share KV."""

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
_CONFIG_PATTERNS = ("config.json", "*.index.json")
_TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.tiktoken",
)


def engine_fingerprint(fields: Mapping[str, str | int | None]) -> bytes:
    """Hash everything that decides the bytes of KV.

    Args:
        fields: names and values; ``weights``, ``tokenizer``, ``dtype``, ``page_size`` and
            ``stretch_tokens`` must be known, other fields may be None for "not used". The span format
            version is added.

    Returns:
        32 bytes, independent of the order of the fields.

    Raises:
        ConfigError: a required field is missing, None or empty, or a value is no str, int or None.
    """
    for name in REQUIRED_FIELDS:
        if fields.get(name) in (None, ""):
            raise ConfigError(f"fingerprint field {name!r} is unknown: pass it; unknown KV is never shared")
    for name, value in fields.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
            raise ConfigError(f"fingerprint field {name}={value!r}: pass a str, an int or None")
    canonical = json.dumps(
        {"kvdrive_format": FORMAT_VERSION, "fields": dict(fields)}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode("ascii")).digest()


def weights_identity(model_path: str | os.PathLike[str], revision: str | None = None) -> str:
    """Identify a model's weights and architecture.

    Args:
        model_path: directory of weight files and ``config.json``, one weight file, or with ``revision``
            the name of a model.
        revision: commit hash that stands for the contents, so that nothing is hashed.

    Returns:
        ``sha256:<hex>`` over names, sizes and contents, or ``commit:<name>@<hash>``. Contents are read once
        per process and file; that takes about a second per gigabyte.

    Raises:
        ConfigError: no weights there, or a revision that can move; the message tells what to pass.
    """
    if revision is not None:
        return _commit_identity(os.fspath(model_path), revision)
    path = Path(model_path)
    if path.is_file():
        return _identity([path])
    weights = _matching(path, _WEIGHT_PATTERNS)
    if not weights:
        raise ConfigError(
            f"model path {os.fspath(model_path)!r} holds no weight files ({', '.join(_WEIGHT_PATTERNS)}): "
            "pass a local directory, or the revision as a commit hash"
        )
    return _identity(weights | _matching(path, _CONFIG_PATTERNS))


def tokenizer_identity(tokenizer_path: str | os.PathLike[str], revision: str | None = None) -> str:
    """Identify a tokenizer; arguments, result and errors as ``weights_identity``."""
    if revision is not None:
        return _commit_identity(os.fspath(tokenizer_path), revision)
    path = Path(tokenizer_path)
    if path.is_file():
        return _identity([path])
    files = _matching(path, _TOKENIZER_PATTERNS)
    if not files:
        raise ConfigError(
            f"tokenizer path {os.fspath(tokenizer_path)!r} holds no tokenizer files "
            f"({', '.join(_TOKENIZER_PATTERNS)}): pass a local directory, or the revision as a commit hash"
        )
    return _identity(files)


def _commit_identity(name: str, revision: str) -> str:
    if not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"revision {revision!r} can move: pass the commit hash (40 or 64 hex digits), or a local directory"
        )
    return f"commit:{name}@{revision}"


def _matching(directory: Path, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}


def _identity(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        try:
            status = path.stat()
            content = _content_digest(str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}: check the path") from error
        digest.update(json.dumps([path.name, status.st_size, content]).encode("ascii") + b"\n")
    return f"sha256:{digest.hexdigest()}"


@lru_cache(maxsize=4096)
def _content_digest(path: str, inode: int, size: int, mtime_ns: int) -> str:
    """Hash a file's contents; a file that was replaced or written since has another key."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
