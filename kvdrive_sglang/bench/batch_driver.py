"""Drive a store with a batch of made-up requests, without SGLang: what the pipeline benchmark and `kvdrive tune` time.

Every request has a prompt of its own, with other tokens and the same keys and values: packed once, sealed into files of its
own. A part of its pages is in frames, the rest on SSD alone, read past the page cache.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from kv_tier.layer_stream import LayerStream
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.page_keys import page_keys
from kv_tier.pipeline import Pipeline
from kv_tier.request import Row
from kv_tier.selection import Budget
from kv_tier.spans import SealJob, SpanStore
from kv_tier.steps import DecodeStep
from kv_tier.store import StoreLimits, TieredStore
from kvdrive_sglang.bench.made_up import Inputs
from kvdrive_sglang.bench.tier_driver import IDENTITY, LOCAL_TOKENS, SINK_TOKENS, Setup, TierSession

SEAL = Setup("seal", "blockwise", 1.0, False)


def prompt_of(inputs: Inputs, request: int) -> np.ndarray:
    """Return the prompt of one request of the batch, [token] uint32."""
    return np.array(inputs.tokens[: inputs.num_prompt], dtype=np.uint32) + np.uint32(request)


def seal(inputs: Inputs, directory: Path, batch: int, pages_per_cluster: int) -> None:
    """Write the spans of the prompts of ``batch`` requests into a new data directory."""
    size = inputs.geometry.page_size
    with TierSession(
        directory,
        inputs.geometry,
        inputs.tokens,
        inputs.num_prompt,
        SEAL,
        lambda layer: inputs.queries[layer][0],
        pages_per_cluster=pages_per_cluster,
    ) as session:
        submit = session.spans.submit
        prompts = [prompt_of(inputs, request) for request in range(batch)]
        keys = [page_keys(prompt, size) for prompt in prompts]

        def submit_for_all(job: SealJob) -> None:
            assert job.parts is not None
            pages = slice(job.first_page, job.first_page + len(job.pages))
            for prompt, its_keys in zip(prompts, keys, strict=True):
                parts = replace(job.parts, tokens=prompt.reshape(-1, size)[pages], keys=its_keys[pages])
                parent = its_keys[pages.start - 1] if pages.start else bytes(32)
                submit(replace(job, parent_key=parent, parts=parts, done=threading.Event()))

        session.spans.submit = submit_for_all  # type: ignore[method-assign]
        session.seal(lambda layer: (inputs.k[layer], inputs.v[layer]))


@dataclass(frozen=True)
class StepCost:
    """What one decode step of the batch took, and what was read.

    Attributes:
        plan_s: before the first layer.
        layers_s: in all layers; ``wait_s`` of it waiting for reads.
    """

    plan_s: float
    layers_s: float
    wait_s: float
    bytes_read: int
    reads: int


class BatchSession:
    """A batch of requests over one store.

    Args:
        directory: where ``seal`` wrote.
        batch: requests, at most as many as were sealed.
        budget_tokens: attended per step.
        window_multiple: window caches, in budgets.
        frame_share: frames for so much of the requests' pages, evenly spread.
    """

    def __init__(
        self,
        inputs: Inputs,
        directory: Path,
        batch: int,
        *,
        budget_tokens: int,
        window_multiple: int,
        frame_share: float,
    ) -> None:
        self.inputs, self.batch = inputs, batch
        geometry = inputs.geometry
        self.scale = geometry.head_dim**-0.5
        per_request = geometry.num_pages(inputs.num_prompt + inputs.num_steps)
        num_resident = int(frame_share * geometry.num_pages(inputs.num_prompt))
        num_frames = batch * (num_resident + per_request - geometry.num_pages(inputs.num_prompt)) + 2
        limits = StoreLimits(batch * per_request + 1, num_frames, per_request + 1, window_multiple, batch)
        budget = Budget(budget_tokens // geometry.page_size, SINK_TOKENS, LOCAL_TOKENS, geometry.page_size)
        self.data_dir = DataDir.open(directory, role="engine")
        self.spans = SpanStore(self.data_dir, geometry, IDENTITY, ssd_bytes=1 << 40)
        self.store = TieredStore(geometry, limits, budget, self.spans)
        order = torch.randperm(batch * per_request, generator=torch.Generator().manual_seed(0)) + 1
        self.pages = list(order.split(per_request))
        self._attach(num_resident)
        self.restart()
        with torch.inference_mode():
            self.step(Pipeline())  # fills the indexes
        self.restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()
        self.data_dir.close()

    def _attach(self, num_resident: int) -> None:
        inputs, num_pages = self.inputs, self.inputs.geometry.num_pages(self.inputs.num_prompt)
        resident = np.linspace(0, num_pages, num_resident, endpoint=False).astype(np.int64)
        for request, pages in enumerate(self.pages):
            keys = page_keys(prompt_of(inputs, request), inputs.geometry.page_size)
            assert self.store.attach(pages[:num_pages].numpy(), keys), "the prompt is not in its spans"
            if num_resident:
                kept = pages[resident].numpy()
                stream = LayerStream(self.store, [kept], keep=True)
                for layer in range(inputs.geometry.num_layers):
                    stream.gather(layer, kept)
                stream.finish()
                assert (self.store.table.frames[kept] > 0).all(), "the frames do not hold their share"

    def restart(self) -> None:
        """Begin again after the prompt, with empty window caches; indexes stay."""
        store, num_pages = self.store, self.inputs.geometry.num_pages(self.inputs.num_prompt)
        windows = store.windows
        assert windows is not None
        for row, pages in enumerate(self.pages):
            store.release_pages(pages[num_pages:].numpy())
            window, _ = store.device_memory(store.request(row, 1))
            window.drop(np.arange(len(pages)))
            windows.eviction.forget(window.row)
        self.position = self.inputs.num_prompt

    def step(self, pipeline: Pipeline) -> tuple[torch.Tensor, StepCost]:
        """Decode one token of every request; returns the attention outputs, [layer, request, kv_head, group, head_dim]."""
        store, inputs, position = self.store, self.inputs, self.position
        geometry, number = inputs.geometry, self.position - inputs.num_prompt
        size, count = geometry.page_size, geometry.num_pages(position + 1)
        store.pipeline = pipeline
        counters, fetcher = store.counters, store.fetcher
        waited_ns, num_bytes, reads = fetcher.waited_ns, counters.bytes_read, counters.reads
        begin = time.perf_counter()
        rows = [
            Row(store.request(row, 1), pages[:count], position, position + 1)
            for row, pages in enumerate(self.pages)
        ]
        slots = torch.stack([pages[position // size] * size + position % size for pages in self.pages])
        planned = DecodeStep(store, rows, slots)
        outs, planned_at = [], time.perf_counter()
        for layer in range(geometry.num_layers):
            k, v = (t[layer][position].expand(self.batch, -1, -1) for t in (inputs.k, inputs.v))
            query = inputs.queries[layer][number, : self.batch]
            outs.append(planned.attend(layer, query, k, v, self.scale))
        end = time.perf_counter()
        assert all(row.state.failure is None for row in rows), [row.state.failure for row in rows]
        self.position += 1
        cost = StepCost(
            planned_at - begin,
            end - planned_at,
            (fetcher.waited_ns - waited_ns) / 1e9,
            counters.bytes_read - num_bytes,
            counters.reads - reads,
        )
        return torch.stack(outs), cost
