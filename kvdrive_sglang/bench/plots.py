"""Plots of what benchmarks measured: one function per benchmark, rows in, plots out.

Rows that lack a plot's keys give no plot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, Final

from matplotlib.axes import Axes

from kvdrive_sglang.bench.plotting import (
    GRID,
    INK,
    SERIES,
    Plot,
    Row,
    Rows,
    bars,
    by_context,
    coloured,
    context_axis,
    distinct,
    dots,
    errors,
    having,
    is_number,
    legend_above,
    lines,
    logarithmic,
    mean,
    note,
    plain_log,
    plot,
    show_size,
    tokens_of,
    words,
)
from kvdrive_sglang.bench.report import show

# ---- exactness ----------------------------------------------------------------------------------------------------

OUTCOMES: Final = {"equal": (SERIES[2], "o"), "tie": (SERIES[1], "s"), "mismatch": (SERIES[3], "X")}


def exactness(rows: Rows) -> Iterator[Plot]:
    """Draw the outcomes as two grids: case by prompt length, and budget by residency."""
    prompts = having(rows, ["case", "outcome"], ["prompt_tokens"])
    if prompts:
        cells = [(f"{row['prompt_tokens']:,}", row["case"], row["outcome"]) for row in prompts]
        yield _grid("Greedy tokens against SGLang's own attention", "prompt (tokens)", cells)
    resident = [
        row
        for row in having(rows, ["case", "outcome"])
        if "prompt_tokens" not in row and ", " in str(row["case"])
    ]
    if resident:
        split = [(*str(row["case"]).split(", ", 1), row["outcome"]) for row in resident]
        cells = [(rest.replace(", ", "\n"), first, outcome) for first, rest, outcome in split]
        yield _grid(
            "Bits moved by residency: none is expected",
            "size of the window cache, share of the KV in frames",
            cells,
        )


def _grid(title: str, xlabel: str, cells: Sequence[tuple[str, str, str]]) -> Plot:
    columns = list(dict.fromkeys(column for column, _, _ in cells))
    names = list(dict.fromkeys(name for _, name, _ in cells))

    def paint(axes: Axes) -> None:
        for outcome in dict.fromkeys(cell[2] for cell in cells):
            own = [cell for cell in cells if cell[2] == outcome]
            colour, marker = OUTCOMES.get(outcome, (SERIES[3], "X"))
            axes.plot(
                [columns.index(column) for column, _, _ in own],
                [names.index(name) for _, name, _ in own],
                marker,
                color=colour,
                markersize=8,
                label=outcome,
            )
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xlim(-0.6, len(columns) - 0.4)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(xlabel)
        legend_above(axes)

    counted = {outcome: sum(cell[2] == outcome for cell in cells) for outcome in OUTCOMES}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in counted.items())
    return plot(title, f"Grid of {len(cells)} comparisons: {counts}.", paint)


# ---- decode -------------------------------------------------------------------------------------------------------

FULL_ATTENTION: Final = "dense"


def decode(rows: Rows) -> Iterator[Plot]:
    """Draw time by context, its growth, the machine's roofs, batches, and fidelity."""
    timed = having(rows, ["context", "backend"], positive=["ms_per_token"])
    roofs = having(rows, positive=["memory_gb_per_s", "product_gflop_per_s"])
    alone = by_context(timed)
    if alone:
        yield _time_by_context(alone)
        yield from _growth(alone)
    attended = having(alone, positive=["attention_us"])
    if attended:
        yield _attention(attended, roofs[0] if roofs else None)
    worked = having(attended, positive=["kv_bytes", "attention_flop"])
    if worked and roofs:
        yield _roofline(worked, roofs[0])
    yield from _batches(timed)
    yield from _decode_fidelity(having(rows, ["text", "backend"], ["agreement", "kl"]))


def _time_by_context(rows: Rows) -> Plot:
    def paint(axes: Axes) -> None:
        lines(axes, rows, "backend", lambda row: tokens_of(row["context"]), lambda row: row["ms_per_token"])
        context_axis(axes, rows)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms per token")

    last = [row for row in rows if row["context"] == rows[-1]["context"]]
    return plot(
        "Time per token as the context grows",
        f"Lines of ms per token by context. At {rows[-1]['context']}: {words(last, 'backend', 'ms_per_token', 'ms')}.",
        paint,
    )


def _growth(rows: Rows) -> Iterator[Plot]:
    first = {row["backend"]: row["ms_per_token"] for row in rows if row["context"] == rows[0]["context"]}
    grown = [
        {**row, "growth": row["ms_per_token"] / first[row["backend"]]}
        for row in rows
        if row["backend"] in first
    ]
    if len(distinct(grown, "context")) < 2:
        return

    def paint(axes: Axes) -> None:
        lines(axes, grown, "backend", lambda row: tokens_of(row["context"]), lambda row: row["growth"])
        context_axis(axes, grown)
        axes.set_ylabel(f"times the time at {rows[0]['context']}")

    last = [row for row in grown if row["context"] == rows[-1]["context"]]
    yield plot(
        f"Growth of the time per token from {rows[0]['context']} on",
        f"Lines of growth. At {rows[-1]['context']}: {words(last, 'backend', 'growth', 'times')}.",
        paint,
    )


def _attention(rows: Rows, roof: Row | None) -> Plot:
    def paint(axes: Axes) -> None:
        lines(axes, rows, "backend", lambda row: tokens_of(row["context"]), lambda row: row["attention_us"])
        if roof is not None:
            for backend, style in ((FULL_ATTENTION, "--"), ("sparse", ":")):
                own = having([row for row in rows if row["backend"] == backend], (), ["kv_bytes"])
                floor = [row["kv_bytes"] / roof["memory_gb_per_s"] / 1e3 for row in own]
                if own:
                    name = "all KV" if backend == FULL_ATTENTION else "the budget's KV"
                    xs = [tokens_of(row["context"]) for row in own]
                    axes.plot(xs, floor, style, color=INK, linewidth=1, label=f"memory reads {name}")
        context_axis(axes, rows)
        plain_log(axes, "y")
        axes.set_ylabel("microseconds per layer")
        axes.legend(fontsize=7)

    last = [row for row in rows if row["context"] == rows[-1]["context"]]
    return plot(
        "Attention alone, and what reading the KV from memory would take",
        f"Lines of microseconds per layer by context. At {rows[-1]['context']}: "
        f"{words(last, 'backend', 'attention_us', 'microseconds')}.",
        paint,
    )


def _roofline(rows: Rows, roof: Row) -> Plot:
    memory, peak = roof["memory_gb_per_s"], roof["product_gflop_per_s"]
    points = [
        {
            **row,
            "intensity": row["attention_flop"] / row["kv_bytes"],
            "gflop_per_s": row["attention_flop"] / row["attention_us"] / 1e3,
        }
        for row in rows
    ]

    def paint(axes: Axes) -> None:
        ridge = peak / memory
        right = 4 * max(ridge, *(point["intensity"] for point in points))
        left = min(point["intensity"] for point in points) / 4
        axes.plot([left, ridge, right], [left * memory, peak, peak], color=INK, linewidth=1.2)
        note(axes, f"memory {memory:.1f} GB/s", (ridge / 3, peak / 3), (6, -8))
        note(axes, f"bf16 products {show(peak)} GFLOP/s", (right, peak), (0, 4), ha="right")
        for i, (backend, colour, marker) in enumerate(coloured(points, "backend")):
            own = [point for point in points if point["backend"] == backend]
            xs = [
                point["intensity"] * 1.12 ** (i - 1) for point in own
            ]  # side by side: all have one intensity
            axes.plot(xs, [point["gflop_per_s"] for point in own], marker, color=colour, label=str(backend))
        plain_log(axes, "x")
        plain_log(axes, "y")
        axes.margins(y=0.15)
        axes.set_xlabel("operations per byte of KV")
        axes.set_ylabel("GFLOP per second")
        axes.legend(loc="lower right")

    best = max(points, key=lambda point: point["gflop_per_s"])
    return plot(
        "Decode attention under this machine's roofline",
        f"Memory roof {memory:.1f} GB/s, product roof {show(peak)} GFLOP/s. Decode attention does "
        f"{show(best['intensity'])} operations per byte; the fastest point is {best['backend']} at {best['context']} with "
        f"{show(best['gflop_per_s'])} GFLOP/s.",
        paint,
    )


def _batches(rows: Rows) -> Iterator[Plot]:
    batched = [row for row in rows if re.fullmatch(r".+ x \d+", str(row["context"]))]
    alone = {str(row["context"]).partition(" x ")[0] for row in batched}
    rates = [
        {**row, "rate": 1e3 / row["ms_per_token"]}
        for row in rows
        if str(row["context"]) in alone or row in batched
    ]
    if not batched:
        return

    def paint(axes: Axes) -> None:
        bars(axes, rates, "context", "backend", "rate")
        axes.set_ylabel("tokens per second, all requests")
        axes.set_xlabel("context (tokens) x requests")

    last = [row for row in rates if row["context"] == batched[-1]["context"]]
    yield plot(
        "Throughput of a batch",
        f"Bars. At {batched[-1]['context']} requests: {words(last, 'backend', 'rate', 'tokens/s')}.",
        paint,
    )


def _decode_fidelity(rows: Rows) -> Iterator[Plot]:
    for key, title, unit in (
        ("agreement", "Next-token agreement with full attention", "share of steps"),
        ("kl", "Divergence from full attention", "mean KL (nats)"),
    ):
        if not rows:
            return

        def paint(axes: Axes, key: str = key, unit: str = unit) -> None:
            bars(axes, rows, "text", "backend", key)
            axes.set_ylabel(unit)

        averages = [
            {"backend": backend, key: mean(row[key] for row in rows if row["backend"] == backend)}
            for backend in distinct(rows, "backend")
        ]
        yield plot(title, f"Bars by text. Means: {words(averages, 'backend', key, '')}.", paint)


# ---- resume -------------------------------------------------------------------------------------------------------

TURNS: Final = {
    "reprefill_native_ttft_s": "re-prefill,\ntorch_native",
    "reprefill_ttft_s": "re-prefill",
    "resumed_ttft_s": "resumed\nfrom disk",
    "warm_ttft_s": "never\nstopped",
}


def resume(rows: Rows) -> Iterator[Plot]:
    """Draw the medians of the times to first token as bars, the repeats as points on them."""
    found = {key: [row[key] for row in having(rows, (), [key])] for key in TURNS}
    shown = [(TURNS[key], sorted(values)) for key, values in found.items() if values]
    if not shown:
        return
    medians = [values[len(values) // 2] for _, values in shown]

    def paint(axes: Axes) -> None:
        for i, (_, values) in enumerate(shown):
            axes.barh(i, medians[i], 0.6, color=SERIES[0] if "disk" in shown[i][0] else SERIES[6])
            axes.plot(values, [i] * len(values), "o", color=INK, markersize=2.5, clip_on=False)
            note(axes, f"{medians[i]:.2f} s", (max(values), i), (6, 0), va="center", fontsize=9)
        axes.set_yticks(range(len(shown)), [name for name, _ in shown])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.18 * max(values[-1] for _, values in shown))
        axes.set_xlabel("seconds to the first token")

    told = "; ".join(
        f"{name} {median:.2f} s".replace("\n", " ") for (name, _), median in zip(shown, medians, strict=True)
    )
    yield plot("First token of a turn after a long session", f"Bars of medians: {told}.", paint)


# ---- prefill ------------------------------------------------------------------------------------------------------


def prefill(rows: Rows) -> Iterator[Plot]:
    """Draw the time to the first token of one prompt, with and without index and seals."""
    found = having(rows, ["prefill"], positive=["ttft_s"])
    if not found:
        return

    def paint(axes: Axes) -> None:
        for i, row in enumerate(found):
            axes.barh(i, row["ttft_s"], 0.6, color=SERIES[6 if row["prefill"] == "torch_native" else 0])
            note(axes, f"{row['ttft_s']:.2f} s", (row["ttft_s"], i), (6, 0), va="center", fontsize=9)
        axes.set_yticks(range(len(found)), [row["prefill"] for row in found])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.18 * max(row["ttft_s"] for row in found))
        axes.set_xlabel("seconds to the first token")

    yield plot(
        "Prefill without index, with it, and sealed meanwhile",
        f"Bars of medians: {words(found, 'prefill', 'ttft_s', 's')}.",
        paint,
    )


# ---- fidelity -----------------------------------------------------------------------------------------------------


def fidelity(rows: Rows) -> Iterator[Plot]:
    """Draw KL against index bytes at the middle budget, and KL and agreement against budget."""
    found = [
        {**row, "index_bytes": row["index_bytes"] if is_number(row.get("index_bytes")) else 0}
        for row in having(rows, ["selection"], positive=["budget", "kl"])
    ]
    if not found:
        return
    budgets = sorted({row["budget"] for row in found})
    most = max(budgets, key=lambda budget: (sum(row["budget"] == budget for row in found), -budget))
    yield _kl_by_bytes([row for row in found if row["budget"] == most])
    main = [
        row
        for row in found
        if sum(other["selection"] == row["selection"] for other in found) > 1 or len(budgets) == 1
    ]
    few = distinct(main, "selection")[: len(SERIES)]
    main = [row for row in main if row["selection"] in few]
    if len(budgets) < 2 or not main:
        return
    yield _by_budget(main, "kl", "KL from full attention by budget", "mean KL (nats)")
    agreed = having(main, (), ["agreement"])
    if agreed:
        yield _by_budget(agreed, "agreement", "Next-token agreement by budget", "share of steps")


def family(selection: str) -> str:
    """Return the first word of a selection, the kind of index it uses."""
    return re.split(r"[\s,]", selection, maxsplit=1)[0]


def frontier(rows: Rows, closer: float = 0.7) -> list[Row]:
    """Keep the rows that come much closer (``closer`` times the KL) than all with a smaller index, the smallest first."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["index_bytes"], row["kl"])):
        if not kept or row["kl"] < closer * kept[-1]["kl"]:
            kept.append(row)
    return kept


def _kl_by_bytes(rows: Rows) -> Plot:
    sized = [{**row, "family": family(str(row["selection"]))} for row in rows if row["index_bytes"] > 0]
    without = [row for row in rows if row["index_bytes"] <= 0]
    best = frontier(sized)

    def paint(axes: Axes) -> None:
        for kind, colour, marker in coloured(sized, "family"):
            own = [row for row in sized if row["family"] == kind]
            xs, ys = [row["index_bytes"] for row in own], [row["kl"] for row in own]
            axes.plot(xs, ys, marker, color=colour, label=kind)
            errors(axes, own, xs, ys, "kl_se", colour)
        edge = [(row["index_bytes"], row["kl"]) for row in best]
        axes.plot(*zip(*edge, strict=True), color=INK, linewidth=0.8, zorder=1)
        for row, at in zip(best, edge, strict=True):
            note(axes, str(row["selection"]), at, (-5, -5), ha="right", fontsize=6.5)
        for row in without:
            axes.axhline(row["kl"], color=INK, linestyle=":", linewidth=1)
            at = (0.01, row["kl"])
            note(axes, str(row["selection"]), at, (0, 2), xycoords=("axes fraction", "data"), fontsize=6.5)
        if sized:
            axes.set_xlim(best[0]["index_bytes"] / 30, 2 * max(row["index_bytes"] for row in sized))
            plain_log(axes, "x")
            legend_above(axes, columns=6, columnspacing=1, handletextpad=0, fontsize=7)
        plain_log(axes, "y")
        axes.set_xlabel("index on the device (bytes per token, layer and KV head)")
        axes.set_ylabel("mean KL (nats)")

    return plot(
        f"What an index of a given size buys, budget {show(rows[0]['budget'])} tokens",
        "KL from full attention against index bytes, both logarithmic. Each much closer than any smaller index: "
        f"{words(best, 'selection', 'kl', 'nats')}.",
        paint,
    )


def _by_budget(rows: Rows, key: str, title: str, unit: str) -> Plot:
    def paint(axes: Axes) -> None:
        lines(axes, rows, "selection", lambda row: row["budget"], lambda row: row[key], error=f"{key}_se")
        logarithmic(axes, "x", [row["budget"] for row in rows])
        if key == "kl":
            plain_log(axes, "y")
        axes.set_xlabel("budget (tokens)")
        axes.set_ylabel(unit)
        legend_above(axes, columns=3, columnspacing=1, handlelength=1.2, fontsize=6.5)

    last = max(row["budget"] for row in rows)
    told = words([row for row in rows if row["budget"] == last], "selection", key, "")
    return plot(
        title, f"Lines by selection with standard errors over texts. At budget {show(last)}: {told}.", paint
    )


# ---- cache --------------------------------------------------------------------------------------------------------

STAGES: Final = {
    "figure 16": ("window", "window cache (budgets)", "Where a layer's time goes, by window cache"),
    "figure 17": ("page_size", "page (tokens)", "Where a layer's time goes, by page size"),
    "figure 18": (
        "pages_per_centroid",
        "pages per centroid",
        "Where a layer's time goes, by number of centroids",
    ),
    "cost": ("policy", "eviction policy", "What an eviction policy costs of a layer's time"),
}
OWN_POLICY: Final = "smoothed"


def cache(rows: Rows) -> Iterator[Plot]:
    """Draw hit rates by window and policy, bytes per step, overlap, sized windows, and the stages of a layer."""
    sized = having(rows, (), ["budget_tokens", "window"])
    hits = [row for row in sized if any(key.startswith("hit_") for key in row)]
    for budget in sorted({row["budget_tokens"] for row in hits}):
        yield from _hit_rates([row for row in hits if row["budget_tokens"] == budget])
    yield from _bytes_over_lru(hits)
    yield from _bytes_per_step(hits)
    yield from _overlap(having(rows, (), ["budget_tokens", "pool", "overlap"]))
    yield from _two_dimensional(having(sized, positive=["bytes_uniform", "bytes_2d"]))
    for figure, (key, xlabel, title) in STAGES.items():
        yield from _stages(
            [row for row in having(rows, [key]) if row.get("figure") == figure], key, xlabel, title
        )


def melted(rows: Rows, prefix: str) -> list[dict[str, Any]]:
    """Turn columns ``prefix + policy`` into rows with ``policy`` and ``value``, means over texts."""
    gathered: dict[tuple[Any, Any, str], list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(prefix) and is_number(value):
                place = (row["budget_tokens"], row["window"], key.removeprefix(prefix))
                gathered.setdefault(place, []).append(value)
    return [
        {"budget_tokens": budget, "window": window, "policy": policy, "value": mean(values)}
        for (budget, window, policy), values in gathered.items()
    ]


def window_axis(axes: Axes, rows: Rows) -> None:
    places = sorted({row["window"] for row in rows})
    axes.set_xticks(places, [f"x{place:g}" for place in places])
    axes.set_xlabel("window cache (multiples of the budget)")


def _hit_rates(rows: Rows) -> Iterator[Plot]:
    means = melted(rows, "hit_")
    if not means:
        return

    def paint(axes: Axes) -> None:
        lines(axes, means, "policy", lambda row: row["window"], lambda row: 100 * row["value"])
        window_axis(axes, means)
        axes.set_ylabel("hit rate (%), mean over texts")

    at = min((row["window"] for row in means), key=lambda window: abs(window - 2))
    told = "; ".join(f"{row['policy']} {100 * row['value']:.1f}%" for row in means if row["window"] == at)
    yield plot(
        f"Hit rate of the window cache, budget {show(rows[0]['budget_tokens'])} tokens",
        f"Lines by eviction policy over the window's size. At x{at:g}: {told}.",
        paint,
    )


def _bytes_over_lru(rows: Rows) -> Iterator[Plot]:
    compared = [row for row in having(rows, positive=["bytes_lru"]) if row["window"] > 1]
    ratios = melted(
        [
            {
                "budget_tokens": "all",
                "window": row["window"],
                **{
                    key: row[key] / row["bytes_lru"]
                    for key in row
                    if key.startswith("bytes_") and is_number(row[key])
                },
            }
            for row in compared
        ],
        "bytes_",
    )
    if not ratios:
        return

    def paint(axes: Axes) -> None:
        lines(axes, ratios, "policy", lambda row: row["window"], lambda row: row["value"])
        window_axis(axes, ratios)
        axes.set_ylabel("bytes fetched over LRU's")

    at = min((row["window"] for row in ratios), key=lambda window: abs(window - 2))
    told = "; ".join(f"{row['policy']} {row['value']:.2f}" for row in ratios if row["window"] == at)
    yield plot(
        "What a policy fetches, as a share of what LRU fetches",
        f"Lines by policy over the window's size, means over texts and budgets. At x{at:g}: {told}.",
        paint,
    )


def _bytes_per_step(rows: Rows) -> Iterator[Plot]:
    means = [row for row in melted(rows, "bytes_") if row["value"] > 0]
    if not means:
        return
    policies = distinct(means, "policy")
    policy = OWN_POLICY if OWN_POLICY in policies else policies[0]
    own = [{**row, "budget": f"budget {row['budget_tokens']}"} for row in means if row["policy"] == policy]

    def paint(axes: Axes) -> None:
        lines(axes, own, "budget", lambda row: row["window"], lambda row: row["value"])
        window_axis(axes, own)
        plain_log(axes, "y", show_size)
        axes.set_ylabel("bytes per step, all layers")

    largest = [row for row in own if row["budget_tokens"] == own[-1]["budget_tokens"]]
    told = ", ".join(f"{show_size(row['value'])} at x{row['window']:g}" for row in largest)
    yield plot(
        f"Bytes fetched per step fall with the window's size ({policy})",
        f"Lines by budget, logarithmic. {own[-1]['budget']}: {told}.",
        paint,
    )


def _overlap(rows: Rows) -> Iterator[Plot]:
    if not rows:
        return
    pools = sorted({row["pool"] for row in rows})
    means = [
        {"name": "mean", "pool": pool, "overlap": mean(row["overlap"] for row in rows if row["pool"] == pool)}
        for pool in pools
    ]

    def paint(axes: Axes) -> None:
        for text in {str(row.get("text")) for row in rows}:
            own = sorted((row for row in rows if str(row.get("text")) == text), key=lambda row: row["pool"])
            axes.plot([r["pool"] for r in own], [100 * r["overlap"] for r in own], color=GRID, linewidth=1)
        lines(axes, means, "name", lambda row: row["pool"], lambda row: 100 * row["overlap"])
        axes.set_xlabel("candidates M (multiples of the budget K)")
        axes.set_ylabel("of the next top K, % found")

    yield plot(
        "How much of the next step's selection is in this step's top M",
        f"Line of the mean over texts, thin lines per text: {show(100 * means[0]['overlap'])}% at M = {pools[0]:g} K, "
        f"{show(100 * means[-1]['overlap'])}% at M = {pools[-1]:g} K.",
        paint,
    )


def _two_dimensional(rows: Rows) -> Iterator[Plot]:
    if not rows:
        return
    cases = sorted({(row["budget_tokens"], row["window"]) for row in rows})
    long = [
        {"case": f"{budget}\nx{window:g}", "windows": name, "value": row[key]}
        for budget, window in cases
        for row in rows
        if (row["budget_tokens"], row["window"]) == (budget, window)
        for name, key in (("uniform", "bytes_uniform"), ("per layer and head", "bytes_2d"))
    ]
    saved = mean(row["bytes_uniform"] / row["bytes_2d"] for row in rows)

    def paint(axes: Axes) -> None:
        bars(axes, long, "case", "windows", "value", show_size)
        axes.yaxis.set_major_formatter(lambda value, _: show_size(value))
        axes.set_xlabel("budget (tokens) and window")
        axes.set_ylabel("bytes per step")

    yield plot(
        "Windows sized per layer and KV head against uniform ones of the same memory",
        f"Pairs of bars by budget and window; uniform windows fetch {saved:.2f} times the bytes in the mean.",
        paint,
    )


def _stages(rows: Rows, key: str, xlabel: str, title: str) -> Iterator[Plot]:
    names = [name for name in (rows[0] if rows else ()) if name.endswith("_us")]
    complete = having(rows, (), names)
    if not names or not complete:
        return

    def paint(axes: Axes) -> None:
        base = [0.0] * len(complete)
        for name, colour in zip(names, cycle(SERIES), strict=False):
            heights = [row[name] for row in complete]
            axes.bar(range(len(complete)), heights, 0.6, base, color=colour, label=name.removesuffix("_us"))
            base = [below + height for below, height in zip(base, heights, strict=True)]
        axes.set_xticks(range(len(complete)), [show(row[key]) for row in complete])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(xlabel)
        axes.set_ylabel("microseconds per layer")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)

    told = "; ".join(f"{show(row[key])} {sum(row[name] for name in names):.0f}" for row in complete)
    yield plot(title, f"Stacked bars of stages. Microseconds per layer: {told}.", paint)


# ---- tiers --------------------------------------------------------------------------------------------------------

COSTS: Final = {
    "ms_per_token": ("Time per token, by fetch mode", "ms per token"),
    "attention_ms": ("Time of attention per token, by fetch mode", "ms per token"),
    "fetch_ms": ("Time that a step waits for KV, by fetch mode", "ms per token"),
    "first_fetch_ms": ("Waiting in the first steps: with and without warm-up", "ms per token"),
    "kib_per_token": ("KV read per token, by fetch mode", "KiB per token"),
    "kib_per_read": ("Mean size of a read, by fetch mode", "KiB per read"),
}


def tiers(rows: Rows) -> Iterator[Plot]:
    """Draw time, waiting, bytes and read size by configuration, a dot for each of the sequences."""
    for key, (title, unit) in COSTS.items():
        found = having(rows, ["sequence", "configuration"], positive=[key])
        if found:
            yield _cost(found, key, title, unit)


def _cost(rows: Rows, key: str, title: str, unit: str) -> Plot:
    def paint(axes: Axes) -> None:
        dots(axes, rows, "configuration", "sequence", key)
        axes.set_xlabel(f"{unit}, logarithmic")

    named = [{**row, "name": f"{row['configuration']} ({row['sequence']})"} for row in rows]
    return plot(title, f"Dots, in {unit}: {words(named, 'name', key, '')}.", paint)


# ---- pipeline -----------------------------------------------------------------------------------------------------


def pipeline(rows: Rows) -> Iterator[Plot]:
    """Draw the time of a step by batch and plan, a plot for each load."""
    found = having(rows, ["mode", "load"], ["batch", "ms_per_token"])
    for load in distinct(found, "load"):
        yield _plans(
            load, [{**row, "group": f"batch {row['batch']}"} for row in found if row["load"] == load]
        )


def _plans(load: str, rows: Rows) -> Plot:
    def paint(axes: Axes) -> None:
        bars(axes, rows, "group", "mode", "ms_per_token")
        axes.set_ylabel("ms per token of each request")

    named = [{**row, "name": f"{row['group']} {row['mode']}"} for row in rows]
    return plot(
        f"Stages one after another against stages that overlap: {load}",
        f"Bars by batch: {words(named, 'name', 'ms_per_token', 'ms')}.",
        paint,
    )


# ---- cold ---------------------------------------------------------------------------------------------------------


def cold(rows: Rows) -> Iterator[Plot]:
    """Draw the KL that fewer bits cost as bars, with the bytes that are left."""
    found = having(rows, ["encoding"], ["kv_over_bf16"], positive=["kl"])
    if not found:
        return

    def paint(axes: Axes) -> None:
        places = list(range(len(found)))
        axes.barh(places, [row["kl"] for row in found], 0.6, color=SERIES[0])
        for i, row in enumerate(found):
            label = f"{show(row['kl'])} nats, {row['kv_over_bf16']:.0%} of the bytes"
            note(axes, label, (0, i), (6, 0), va="center", fontsize=8)
        axes.set_yticks(places, [str(row["encoding"]) for row in found])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("mean KL (nats)")

    yield plot(
        "What KV in fewer bits costs under full attention",
        f"Bars of mean KL: {words(found, 'encoding', 'kl', 'nats')}.",
        paint,
    )


PLOTS: Final[dict[str, Callable[[Rows], Iterable[Plot]]]] = {
    "exactness": exactness,
    "decode": decode,
    "resume": resume,
    "prefill": prefill,
    "fidelity": fidelity,
    "cache": cache,
    "tiers": tiers,
    "cold": cold,
    "pipeline": pipeline,
}
