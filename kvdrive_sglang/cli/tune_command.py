"""`kvdrive tune`: find window size, centroid count and micro-batch size on this machine, and write them down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.bench.report import write_whole
from kvdrive_sglang.cli.bench_command import check_writable, tell_written
from kvdrive_sglang.cli.engine_command import PACKAGED, cache_dir
from kvdrive_sglang.config import KVDriveConfig, config_fields, parse_config
from kvdrive_sglang.packaged_model import ensure_model

if TYPE_CHECKING:
    from kv_tier.geometry import Geometry
    from kvdrive_sglang.tuning import Search, Settings, Tuned

STRETCH_TOKENS: Final = 1024
MOST_WINDOWS: Final = 4
SEARCH_SHARE: Final = 0.75  # of the time; the rest is for start and best once more, in turn


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="tune")(tune)


def tune(
    output: Annotated[Path, typer.Argument(help="file to write, for `kvdrive engine --config @FILE`")],
    model_path: Annotated[
        str, typer.Option(help="model directory, or `packaged` for a small one from the package index")
    ] = PACKAGED,
    config: Annotated[
        str | None, typer.Option(help="configuration as JSON or @FILE, the start; its other fields are kept")
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="seconds that measuring may take")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="requests that decode at once")] = 4,
    context_tokens: Annotated[int, typer.Option(min=STRETCH_TOKENS, help="tokens of each")] = 16384,
    frame_share: Annotated[
        float, typer.Option(min=0, max=1, help="part of their KV that DRAM holds, the rest is on SSD")
    ] = 0.25,
    hit_rate: Annotated[
        float, typer.Option(min=0.5, max=0.99, help="of a window cache of twice a budget of 1024, about")
    ] = 0.9,
    page_size: Annotated[int, typer.Option(min=1, help="the engine's page size")] = 8,
) -> None:
    """Time decode steps of a made-up batch over a store on this disk, and write down what makes them fastest.

    Preparation (model, spans of the first centroid count) comes before the time that is limited. No answer changes.
    """
    from kvdrive_sglang.bench.engines import scratch
    from kvdrive_sglang.bench.made_up import Inputs
    from kvdrive_sglang.bench.tuning_cost import STEPS, StoreCost, shape_of
    from kvdrive_sglang.tuning import Settings, confirm, search

    check_writable(output, "FILE")
    fields = {} if config is None else config_fields(config)
    base = parse_config({"data_dir": ".", **fields})
    if base.budget_tokens == "all":
        raise ConfigError(
            "budget_tokens=all attends everything, without window caches: there is nothing to tune"
        )
    tokens = context_tokens // STRETCH_TOKENS * STRETCH_TOKENS
    if tokens < 2 * base.budget_tokens:
        raise ConfigError(
            f"context_tokens={context_tokens} is less than two budgets of {base.budget_tokens}, little is fetched: pass "
            f"--context-tokens {4 * base.budget_tokens} or more"
        )
    path = ensure_model(cache_dir()) if model_path == PACKAGED else Path(model_path)
    geometry, group, num_layers = shape_of(path, tokens, page_size)
    start = Settings(base.window_multiple, base.pages_per_cluster, base.micro_batch)
    with progress_bar(Console(stderr=True), limit_s) as bar, scratch() as directory:
        bar(f"making up {tokens:,} tokens in {geometry.num_layers} of {num_layers} layers")
        inputs = Inputs(geometry, group, tokens, STEPS, batch, hit_rate)
        with StoreCost(inputs, directory, batch, base.budget_tokens, frame_share, bar) as cost:
            cost.prepare(start)
            began = time.monotonic()
            values = values_for(start, batch, window_multiples(base, geometry, num_layers, tokens, batch))
            found = search(values, start, cost, time.monotonic, SEARCH_SHARE * limit_s)
            left = max(0.0, began + limit_s - time.monotonic())
            tuned = confirm(found, start, cost, time.monotonic, left)
    console = Console()
    scale = 1e3 * num_layers / geometry.num_layers
    console.print(settings_table(found, tuned, scale))
    console.print(verdict(found, tuned, start), highlight=False)
    write_whole(output, json.dumps({**fields, **asdict(tuned.best)}, indent=2) + "\n", "FILE")
    tell_written(console, output)


def window_multiples(
    config: KVDriveConfig, geometry: Geometry, num_layers: int, num_tokens: int, batch: int
) -> list[int]:
    """Return the window multiples that are tried: no window larger than a request, and together within ``device_bytes``.

    Args:
        geometry: the model's shape, whatever its number of layers.
    """
    import numpy as np

    from kv_tier.window import WindowCaches

    whole, num_pages = replace(geometry, num_layers=num_layers), geometry.num_pages(num_tokens)
    pages = int(config.budget_tokens) // geometry.page_size
    fitting = []
    for multiple in range(1 if config.max_kl is None else 2, MOST_WINDOWS + 1):
        slots = np.full((num_layers, geometry.num_kv_heads), multiple * pages)
        num_bytes = batch * WindowCaches.bytes_for(whole, slots, num_pages, config.eviction)
        if multiple * pages <= num_pages and num_bytes <= config.device_bytes:
            fitting.append(multiple)
    return fitting


def values_for(start: Settings, batch: int, windows: list[int]) -> dict[str, list[int]]:
    """Return what is tried for each setting."""
    return {
        "window_multiple": sorted({start.window_multiple, *windows}),
        "pages_per_cluster": sorted({start.pages_per_cluster, 2, 4, 8}, reverse=True),
        "micro_batch": sorted({start.micro_batch, 1, *(n for n in (2, -(-batch // 2), batch) if n <= batch)}),
    }


def settings_table(found: Search, tuned: Tuned, scale: float) -> Table:
    """List what was tried, in order; ``scale``: milliseconds of the whole model per second that was measured."""
    table = Table(title="a decode step's attention and fetching, all layers")
    for column in ("window multiple", "pages per cluster", "micro-batch", "ms", ""):
        table.add_column(column, justify="right")
    for settings, cost in found.tried.items():
        row = (settings.window_multiple, settings.pages_per_cluster, settings.micro_batch or "auto")
        table.add_row(*map(str, row), f"{scale * cost:.1f}", "chosen" if settings == tuned.best else "")
    return table


def verdict(found: Search, tuned: Tuned, start: Settings) -> str:
    """Say what tuning gained, and whether time sufficed."""
    gain = tuned.start_cost / tuned.best_cost
    said = (
        "nothing was better than the start"
        if tuned.best == start
        else f"{gain:.2f} times as fast as the start"
    )
    return (
        said if found.complete else f"{said}; time was up before everything was tried, --limit-s gives more"
    )


@contextmanager
def progress_bar(console: Console, limit_s: float) -> Iterator[Callable[[str], None]]:
    """Yield a function that says what is under way: a bar of the time that may be taken, or lines off a terminal."""
    if not console.is_terminal:
        yield lambda step: console.print(step, markup=False, highlight=False, soft_wrap=True)
        return
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=limit_s)
        began = time.monotonic()
        yield lambda step: progress.update(task, description=step, completed=time.monotonic() - began)
