"""kvdrive bench cold: what do suspended sessions in fewer bits save, and what does it cost?

The KV of a prompt is encoded and decoded as a suspend does it, page by page, and the true continuation is fed to full
attention over it: agreement of the next token and KL(as it was | decoded) in nats, means over texts. The model runs in plain
torch (``lab.py``): the prefill in bfloat16, as an engine does, the decodes that are compared in float32; the row "bfloat16
arithmetic" says what decoding in bfloat16 alone costs over the same, unrounded KV.

First checked: the decoded KV is what a span file of that encoding gives back, and coding it again changes nothing. Bytes
are those of the file of one whole stretch. Speeds are of one thread, in MiB of the model's KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_tier.geometry import bits
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.kv_codec import KvEncoding, decode_pages, encode_pages
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.span_file import SpanParts, write_span
from kv_tier.meta.span_format import DtypeCode, Shape, SpanHeader
from kvdrive_sglang.bench.engines import BenchFailed, Progress, model_path, scratch
from kvdrive_sglang.bench.fidelity import compare, mean_and_error
from kvdrive_sglang.bench.lab import LabModel, Prefix
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.texts import ModelTokenizer, studied_texts

NAME = "cold"
SUMMARY_KEYS = (
    "int8_kv_over_bf16",
    "int8_file_over_bf16",
    "int8_agreement",
    "int8_kl",
    "fp8_agreement",
    "fp8_kl",
    "arithmetic_kl",
    "num_texts",
)

PROMPT_TOKENS = 7040
FORCED_TOKENS = 64
PAGE_SIZE = 8
STRETCH_TOKENS = 1024
NOISE = "bfloat16 arithmetic"
ENCODINGS = (KvEncoding.INT8, KvEncoding.FP8)
REPEATS = 5

Pages = np.ndarray


@dataclass(frozen=True)
class Outcome:
    """One encoding on one text: means over its steps."""

    text: str
    encoding: str
    agreement: float
    kl: float


def pages_of(keys: torch.Tensor, values: torch.Tensor) -> Pages:
    """Cut one layer's keys and values ([kv_head, position, head_dim], whole pages) into [kv_head, page, 2, P, D] raw bits."""
    heads, positions, dim = keys.shape
    shape = (heads, positions // PAGE_SIZE, PAGE_SIZE, dim)
    return bits(torch.stack([keys.reshape(shape), values.reshape(shape)], dim=2))


def encode(pages: Pages, encoding: KvEncoding) -> Pages:
    """Encode pages: [page of one (layer, KV head), stored bytes]."""
    stored = encode_pages(pages, encoding, DtypeCode.BFLOAT16)
    return stored.reshape(-1, stored.shape[-1])


def decode(rows: Pages, encoding: KvEncoding, like: Pages) -> Pages:
    """Decode pages to the shape of ``like``."""
    size, dim = like.shape[-2:]
    plain = decode_pages(rows, encoding, size, dim, DtypeCode.BFLOAT16)
    return plain.view(like.dtype).reshape(like.shape)


def decoded(pages: Pages, encoding: KvEncoding) -> Pages:
    """Encode pages and decode them again."""
    return decode(encode(pages, encoding), encoding, pages)


def rounded(prefix: Prefix, encoding: KvEncoding) -> Prefix:
    """Return a prompt's KV as it comes back from spans of an encoding."""
    keys, values = [], []
    for key, value in zip(prefix.keys, prefix.values, strict=True):
        pages = torch.from_numpy(decoded(pages_of(key, value), encoding).view(np.int16)).view(torch.bfloat16)
        keys.append(pages[:, :, 0].reshape(key.shape))
        values.append(pages[:, :, 1].reshape(value.shape))
    return Prefix(keys, values, [])


def header_of(model: LabModel, encoding: KvEncoding) -> SpanHeader:
    """Plan the span of one whole stretch, as an engine writes it."""
    num_pages = STRETCH_TOKENS // PAGE_SIZE
    shape = Shape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=PAGE_SIZE,
        stretch_tokens=STRETCH_TOKENS,
        dtype_code=DtypeCode.BFLOAT16,
    )
    exact = SpanHeader.plan(
        shape,
        sequence=int(encoding),
        fingerprint=bytes(32),
        first_page=0,
        num_pages=num_pages,
        num_exact_pages=num_pages,
        num_clusters=num_pages // 8,
    )
    if encoding == KvEncoding.RAW:
        return exact
    return replace(exact, encoding=encoding, num_exact_pages=0, selection=b"s" * 32)


def check_file(root: Path, model: LabModel, prefix: Prefix, encoding: KvEncoding) -> None:
    """Refuse to measure what a file would not give back, or what changes when it is coded again.

    Raises:
        BenchFailed: it does.
    """
    header = header_of(model, encoding)
    layers = [
        pages_of(key[:, :STRETCH_TOKENS], value[:, :STRETCH_TOKENS])
        for key, value in zip(prefix.keys, prefix.values, strict=True)
    ]
    places = (header.num_layers, header.num_kv_heads, header.num_pages)
    order = np.broadcast_to(np.arange(header.num_pages, dtype=np.uint16), places)
    tokens = np.arange(STRETCH_TOKENS, dtype=np.uint32)
    parts = SpanParts(
        tokens.reshape(-1, PAGE_SIZE),
        page_keys(tokens, PAGE_SIZE),
        np.zeros((*places, header.head_dim), np.uint16),
        np.ascontiguousarray(order),
        np.zeros(places, np.uint16),
        (encode_pages(layer, encoding, DtypeCode.BFLOAT16) for layer in layers),
        np.zeros((*places[:2], header.num_clusters, header.head_dim), np.uint16),
    )
    with DataDir.open(root, role="engine") as data_dir:
        span = write_span(data_dir, header.sequence, header, parts)
        size = data_dir.span_path(header.sequence).stat().st_size
        found = [span.read_layer(layer) for layer in range(header.num_layers)]
        span.close()
    expected = [decoded(layer, encoding) for layer in layers]
    if size != header.file_bytes or not all(map(np.array_equal, found, expected)):
        raise BenchFailed(f"a span of {encoding.name} gives back other KV than its codec")
    if not all(np.array_equal(layer, decoded(layer, encoding)) for layer in expected):
        raise BenchFailed(f"decoded {encoding.name} KV changes when it is coded again")


def speed(work: Callable[[], Any], num_bytes: int) -> float:
    """Return MiB per second, the median of some runs."""
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return num_bytes / 2**20 / sorted(taken)[REPEATS // 2]


def speeds(prefix: Prefix, encoding: KvEncoding) -> dict[str, float]:
    """Time the codec on one stretch of one layer."""
    pages = pages_of(prefix.keys[0][:, :STRETCH_TOKENS], prefix.values[0][:, :STRETCH_TOKENS])
    rows = encode(pages, encoding)
    return {
        "encode_mib_per_s": speed(lambda: encode(pages, encoding), pages.nbytes),
        "decode_mib_per_s": speed(lambda: decode(rows, encoding, pages), pages.nbytes),
    }


def run(full: bool, progress: Progress) -> BenchResult:
    """Compare every encoding on nine texts, with ``full`` on twelve."""
    torch.set_grad_enabled(False)
    model, precise = LabModel(model_path()), LabModel(model_path(), torch.float32)
    texts = studied_texts(ModelTokenizer(model_path()), PROMPT_TOKENS, FORCED_TOKENS, 4 if full else 3)
    outcomes: list[Outcome] = []
    timed: dict[str, dict[str, float]] = {}
    for number, text in enumerate(texts, 1):
        label = f"{text.name} ({number} of {len(texts)})"
        progress(f"{label}: prefill")
        prefix = model.prefill(text.prompt)
        if number == 1:
            with scratch() as root:
                for encoding in ENCODINGS:
                    check_file(root / encoding.name, model, prefix, encoding)
                    timed[encoding.name.lower()] = speeds(prefix, encoding)
        progress(f"{label}: decoding")
        wanted = precise.forced(prefix, text.forced)
        outcomes.append(Outcome(text.name, NOISE, *compare(wanted, model.forced(prefix, text.forced))))
        for encoding in ENCODINGS:
            found = compare(wanted, precise.forced(rounded(prefix, encoding), text.forced))
            outcomes.append(Outcome(text.name, encoding.name.lower(), *found))
    headers = {encoding.name.lower(): header_of(model, encoding) for encoding in KvEncoding}
    return result_of(headers, timed, outcomes)


def result_of(
    headers: dict[str, SpanHeader], timed: dict[str, dict[str, float]], outcomes: Sequence[Outcome]
) -> BenchResult:
    """Sum up over texts.

    Args:
        headers: the span of one stretch by encoding, "raw" among them.
        timed: speeds by encoding.
    """
    raw = headers["raw"]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(outcome.encoding for outcome in outcomes):
        header = headers.get(name, raw)
        own = [outcome for outcome in outcomes if outcome.encoding == name]
        row: dict[str, Any] = {
            "encoding": name,
            "kv_over_bf16": header.kv_bytes / raw.kv_bytes,
            "file_over_bf16": header.file_bytes / raw.file_bytes,
        }
        row["agreement"], row["agreement_se"] = mean_and_error([o.agreement for o in own])
        row["kl"], row["kl_se"] = mean_and_error([o.kl for o in own])
        rows.append(row | timed.get(name, {}))
    by_name = {row["encoding"]: row for row in rows}
    summary = {
        "int8_kv_over_bf16": by_name["int8"]["kv_over_bf16"],
        "int8_file_over_bf16": by_name["int8"]["file_over_bf16"],
        "int8_agreement": by_name["int8"]["agreement"],
        "int8_kl": by_name["int8"]["kl"],
        "fp8_agreement": by_name["fp8"]["agreement"],
        "fp8_kl": by_name["fp8"]["kl"],
        "arithmetic_kl": by_name[NOISE]["kl"],
        "num_texts": len({outcome.text for outcome in outcomes}),
    }
    return BenchResult(NAME, rows, summary, details=[asdict(outcome) for outcome in outcomes])
