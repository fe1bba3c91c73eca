"""A real text of several thousand tokens that any machine has: licences."""

from __future__ import annotations

import contextlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kv_tier.meta.errors import ConfigError

DISTRIBUTION: Final = "kvdrive-sglang"
DEBIAN: Final = Path("/usr/share/common-licenses")
DEBIAN_NAMES: Final = ("Apache-2.0", "GPL-3", "MPL-2.0", "LGPL-2.1", "GFDL-1.3")
SMALLEST_BYTES: Final = 2000


@dataclass(frozen=True)
class DemoText:
    """A text and where it comes from.

    Args:
        names: its sources, for people.
        num_tokens: tokens of ``text``.
    """

    text: str
    names: list[str]
    num_tokens: int


def demo_text(tokenizer: Any, num_tokens: int, *, debian: Path = DEBIAN) -> DemoText:
    """Join licences, each text once, and cut behind token ``num_tokens``.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.

    Raises:
        ConfigError: this machine has too few licences.
    """
    parts: list[str] = []
    names: list[str] = []
    for name, path in licences(debian):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text().strip()
            if len(text) < SMALLEST_BYTES or text in parts:
                continue
            parts.append(text)
            names.append(name)
            encoded = tokenizer.encode("\n\n".join(parts), add_special_tokens=False)
            if len(encoded.ids) >= num_tokens:
                whole = "\n\n".join(parts)[: encoded.offsets[num_tokens - 1][1]]
                return DemoText(whole, names, len(tokenizer.encode(whole, add_special_tokens=False).ids))
    raise ConfigError(
        f"the licences on this machine ({', '.join(names) or 'none'}) have fewer than {num_tokens} tokens"
    )


def licences(debian: Path = DEBIAN) -> Iterator[tuple[str, Path]]:
    """List licences, this project's first: (name, file), the file existing or not."""
    yield "KVDrive", Path(__file__).parents[1] / "LICENSE"
    yield from _of_distribution(DISTRIBUTION)
    for name in DEBIAN_NAMES:
        yield name, debian / name
    yield "Python", Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    for name in ("torch", "numpy", "transformers", "typer"):
        yield from _of_distribution(name)


def _of_distribution(name: str) -> Iterator[tuple[str, Path]]:
    """List the licence files that an installed distribution brings."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(name) or ():
            if "LICEN" in file.name.upper() and file.suffix in ("", ".txt", ".md"):
                yield name, Path(str(file.locate()))
