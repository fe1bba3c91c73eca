"""`kvdrive calibrate`: compute the key sketch's constants of a model from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.cli.bench_command import check_writable, progress_on
from kvdrive_sglang.cli.engine_command import PACKAGED, cache_dir
from kvdrive_sglang.packaged_model import ensure_model


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="calibrate")(calibrate)


def calibrate(
    model_path: Annotated[str, typer.Option(help="model directory, or `packaged`")] = PACKAGED,
    out: Annotated[
        Path | None,
        typer.Option(help="file to write; default: where the engine looks, in the model directory"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text files, as unlike each other as what will be served; default: Python's own"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="tokens per text, as many as positions will be in use; default: the context"),
    ] = None,
    directions: Annotated[int, typer.Option(help="directions kept per head; default half of 64")] = 32,
) -> None:
    """Measure a model's queries and keys on text and write the constants of its key sketch."""
    import torch

    from kv_tier.sketch import save_maps, solve_maps
    from kvdrive_sglang.bench.lab import LabModel
    from kvdrive_sglang.bench.texts import ModelTokenizer, calibration_texts
    from kvdrive_sglang.calibrate import MAPS_FILE, attention_identity, measure

    path = ensure_model(cache_dir()) if model_path == PACKAGED else Path(model_path)
    target = out or path / MAPS_FILE
    check_writable(target, "--out")
    torch.set_grad_enabled(False)
    model = LabModel(path)
    length = tokens or model.max_positions
    tokenizer = ModelTokenizer(path)
    if text:
        texts = [read_tokens(file, tokenizer, length) for file in text]
    else:
        texts = calibration_texts(tokenizer, length)
    with progress_on(Console(stderr=True)) as step:
        moments = measure(model, texts, (1,), step)[1]
        step("solving")
        maps = solve_maps(moments, directions, num_positions=min(map(len, texts)))
    save_maps(maps, attention_identity(path), target)
    Console().print(
        f"{target}: {directions} directions of {model.head_dim}, {model.num_layers} layers, "
        f"{model.num_kv_heads} KV heads, {target.stat().st_size:,} bytes, digest {maps.digest()[:16]}",
        soft_wrap=True,
        highlight=False,
    )


def read_tokens(file: Path, tokenizer: object, length: int) -> list[int]:
    """Return the first ``length`` tokens of a text file.

    Raises:
        ConfigError: the file cannot be read, or is shorter.
    """
    from kvdrive_sglang.bench.texts import ModelTokenizer

    assert isinstance(tokenizer, ModelTokenizer)
    try:
        tokens = tokenizer.encode(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}: name a UTF-8 text file") from error
    if len(tokens) < length:
        raise ConfigError(
            f"{file} holds {len(tokens)} tokens, {length} are asked for: give a longer text or pass --tokens"
        )
    return tokens[:length]
