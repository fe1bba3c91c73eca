"""`kvdrive profile`: measure which (layer, KV head) gains from a larger window cache, and write it down."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kv_tier.meta.errors import ConfigError
from kv_tier.modes import DEFAULT_EVICTION
from kvdrive_sglang.cli.bench_command import check_writable, progress_on
from kvdrive_sglang.cli.engine_command import PACKAGED, cache_dir
from kvdrive_sglang.packaged_model import ensure_model

if TYPE_CHECKING:
    from kv_tier.window_profile import WindowProfile
    from kvdrive_sglang.bench.texts import StudiedText, Tokenizer

BUILT_IN_TOKENS = 7168
SHOWN_MULTIPLES = (1.5, 2.0, 3.0, 4.0)


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="profile")(profile)


def profile(
    output: Annotated[Path, typer.Argument(help="file to write, for the engine's window_profile")],
    model_path: Annotated[
        str, typer.Option(help="model directory, or `packaged` for a small one from the package index")
    ] = PACKAGED,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text like those that will be served, repeatable; without it, built-in ones"),
    ] = None,
    budget_tokens: Annotated[int, typer.Option(min=1, help="the engine's budget_tokens")] = 1024,
    page_size: Annotated[int, typer.Option(min=1, help="the engine's page size")] = 8,
    num_steps: Annotated[int, typer.Option(min=2, help="decode steps per text")] = 128,
) -> None:
    """Decode texts and measure, for every layer and KV head, what each window size would have to fetch.

    The engine that is given the file shares the memory of its uniform windows accordingly; no token changes.
    """
    from kvdrive_sglang.bench.lab import LabModel
    from kvdrive_sglang.bench.locality import decode, profile_windows, score_steps
    from kvdrive_sglang.bench.texts import ModelTokenizer

    check_writable(output, "FILE")
    path = ensure_model(cache_dir()) if model_path == PACKAGED else Path(model_path)
    model = LabModel(path)
    texts = read_texts(ModelTokenizer(path), text or [], num_steps, model.max_positions)
    for one in texts:
        if len(one.prompt) < 2 * budget_tokens:
            raise ConfigError(
                f"{one.name} has {len(one.prompt) + num_steps} tokens: a budget of {budget_tokens} leaves nothing to "
                f"measure below {2 * budget_tokens + num_steps}; pass a longer text"
            )
    console = Console()
    with progress_on(Console(stderr=True)) as step:
        traces = []
        for one in texts:
            step(f"{one.name}: prefill and decode")
            traces.append(score_steps(model, decode(model, one), page_size))
        step("window sizes")
        made = profile_windows(traces, budget_tokens, DEFAULT_EVICTION, [one.name for one in texts])
    made.write(output)
    console.print(sizes_table(made))
    console.print(
        f"written to {output}; give it to the engine as window_profile", soft_wrap=True, highlight=False
    )


def read_texts(tokenizer: Tokenizer, paths: list[Path], num_steps: int, max_tokens: int) -> list[StudiedText]:
    """Return the texts, each with its last ``num_steps`` tokens as continuation.

    Raises:
        ConfigError: a file cannot be read as text.
    """
    from kvdrive_sglang.bench.texts import StudiedText, calibration_texts

    named = []
    for path in paths:
        try:
            named.append((path.name, tokenizer.encode(path.read_text())[:max_tokens]))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the text {path}: {error}") from error
    if not paths:
        built_in = calibration_texts(tokenizer, min(BUILT_IN_TOKENS, max_tokens))
        named = [(f"built-in {number}", tokens) for number, tokens in enumerate(built_in, 1)]
    return [StudiedText("profile", name, tokens[:-num_steps], tokens[-num_steps:]) for name, tokens in named]


def sizes_table(made: WindowProfile) -> Table:
    """Compare uniform windows with those that follow from the profile, by its own figures."""
    import numpy as np

    table = Table(title="pages fetched per step, all layers and KV heads")
    for column in ("window", "uniform", "by profile", "smallest", "largest"):
        table.add_column(column, justify="right")
    pages = made.budget_tokens // made.geometry.page_size
    for multiple in SHOWN_MULTIPLES:
        slots = made.slots(multiple)
        even = np.full_like(slots, int(multiple * pages))
        row = (made.fetched(even), made.fetched(slots))
        smallest, largest = slots.min() / pages, slots.max() / pages
        table.add_row(f"x{multiple:g}", *(f"{n:.1f}" for n in row), f"x{smallest:g}", f"x{largest:g}")
    return table
