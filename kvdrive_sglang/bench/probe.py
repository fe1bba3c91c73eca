"""A probe in SGLang's scheduler process: times attention, forces tokens, keeps logits and digests.

``probe_server.py`` starts it. ``KVDRIVE_PROBE_DIR`` names a directory that the benchmark shares with the scheduler:

    <rid>.json      what to do for a request (``Wish``), written before it is sent
    store.json      KVDrive settings that the store is rebuilt with at the next flush of the cache
    steps.jsonl     one line per forward pass (``Step``)
    <rid>.logits    float32 [step, vocabulary], raw logits of every forward pass of the request, in order of the steps

A request id that has no file is left alone but for the line in ``steps.jsonl``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

PROBE_DIR_ENV = "KVDRIVE_PROBE_DIR"
DENSE_BACKEND = "kvdrive_dense"
STEPS_FILE = "steps.jsonl"
STORE_FILE = "store.json"


class Wish(msgspec.Struct, frozen=True):
    """Say what the probe does for one request.

    Args:
        prompt_tokens: length of the prompt; output number i follows ``prompt_tokens + i`` tokens.
        forced: tokens that replace the sampled ones, from the first output on.
        logits: keep the logits of every step.
        digest: chain a hash over the attention outputs of every layer and step.
        unattended: prefill writes its KV and attends nothing, so that long contexts can be timed without the hours
            their prefill would take; what the model then says means nothing.
        unindexed: prefill writes no page means; decoding on would select nonsense.
    """

    prompt_tokens: int
    forced: list[int] = []
    logits: bool = False
    digest: bool = False
    unattended: bool = False
    unindexed: bool = False


class Step(msgspec.Struct, frozen=True):
    """Describe one forward pass.

    Args:
        decode: one new token per request.
        rids, lengths: the requests, and their tokens with the new ones.
        attention_us: planning and attention, per layer.
        at_s: when its tokens were sampled, on the monotonic clock.
        digest: hex, over this step's attention outputs; empty unless asked for.
    """

    decode: bool
    rids: list[str]
    lengths: list[int]
    attention_us: float
    at_s: float
    digest: str = ""


class Probe:
    """Watch one scheduler process; made before the model is loaded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._steps = (directory / STEPS_FILE).open("ab", buffering=0)
        self._wishes: dict[str, Wish | None] = {}
        self._seconds = 0.0
        self._layers = 0
        self._hash: Any = None
        self._unattended = self._unindexed = False
        self._backend: Any = None
        self._linker: Any = None

    # ---- attention ------------------------------------------------------------------------------------------

    def watch_backend(self, backend: Any) -> Any:
        """Time ``init_forward_metadata`` and both forwards of an attention backend; everything else is its own."""
        self._backend = backend
        backend.init_forward_metadata = self._planned(backend.init_forward_metadata)
        backend.forward_decode = self._attended(backend.forward_decode)
        backend.forward_extend = self._attended(self._maybe_unattended(backend.forward_extend))
        return backend

    def _maybe_unattended(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def extended(*args: Any, **kwargs: Any) -> Any:
            attending = no_attention() if self._unattended else nullcontext()
            with attending, no_means() if self._unindexed else nullcontext():
                return call(*args, **kwargs)

        return extended

    def _planned(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def planned(forward_batch: Any) -> None:
            wishes = [self.wish(rid) for rid in forward_batch.rids or ()]
            self._hash = hashlib.sha256() if any(wish and wish.digest for wish in wishes) else None
            self._unattended = any(wish and wish.unattended for wish in wishes)
            self._unindexed = any(wish and wish.unindexed for wish in wishes)
            begin = time.perf_counter()
            call(forward_batch)
            self._seconds, self._layers = time.perf_counter() - begin, 0

        return planned

    def _attended(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def attended(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            out = call(*args, **kwargs)
            self._seconds += time.perf_counter() - begin
            self._layers += 1
            if self._hash is not None:
                self._hash.update(out.contiguous().view(-1).view(dtype=_bytes_dtype()).numpy())
            return out

        return attended

    # ---- sampling -------------------------------------------------------------------------------------------

    def sampled(
        self, original: Callable[..., Any], runner: Any, logits_output: Any, forward_batch: Any
    ) -> Any:
        """Stand around ``ModelRunner.sample``: keep logits, sample, force tokens, write the step."""
        rids, lengths = list(forward_batch.rids or ()), forward_batch.seq_lens.tolist()
        wishes = [self.wish(rid) for rid in rids]
        for i, (rid, wish) in enumerate(zip(rids, wishes, strict=True)):
            if wish is not None and wish.logits:
                with (self.directory / f"{rid}.logits").open("ab") as file:
                    file.write(logits_output.next_token_logits[i].float().numpy().tobytes())
        tokens = original(runner, logits_output, forward_batch)
        for i, (wish, length) in enumerate(zip(wishes, lengths, strict=True)):
            if wish is not None and 0 <= length - wish.prompt_tokens < len(wish.forced):
                tokens[i] = wish.forced[length - wish.prompt_tokens]
        self._write(forward_batch, rids, lengths)
        return tokens

    def _write(self, forward_batch: Any, rids: list[str], lengths: list[int]) -> None:
        step = Step(
            decode=forward_batch.forward_mode.is_decode(),
            rids=rids,
            lengths=lengths,
            attention_us=self._seconds / max(1, self._layers) * 1e6,
            at_s=time.monotonic(),
            digest="" if self._hash is None else self._hash.hexdigest(),
        )
        self._steps.write(msgspec.json.encode(step) + b"\n")

    def wish(self, rid: str) -> Wish | None:
        """Return what is asked for a request, None for nothing."""
        if rid not in self._wishes:
            path = self.directory / f"{rid}.json"
            self._wishes[rid] = msgspec.json.decode(path.read_bytes(), type=Wish) if path.exists() else None
        return self._wishes[rid]

    # ---- another store, same engine ---------------------------------------------------------------------------

    def linked(self, original: Callable[..., None], linker: Any, *args: Any, **kwargs: Any) -> None:
        """Stand around ``KVDriveLinker.__init__``: remember the linker."""
        original(linker, *args, **kwargs)
        self._linker = linker

    def flushed(self, original: Callable[[Any], None], allocator: Any) -> None:
        """Stand around ``KVDriveAllocator.clear``: rebuild the store when other settings are waiting."""
        original(allocator)
        path = self.directory / STORE_FILE
        if self._linker is not None and path.exists():
            self._rebuild_store(json.loads(path.read_bytes()))
            path.unlink()

    def _rebuild_store(self, settings: dict[str, Any]) -> None:
        from kvdrive_sglang.config import parse_config
        from kvdrive_sglang.pool import build_store
        from kvdrive_sglang.sealing import Sealer

        pool, linker, backend = self._backend.pool, self._linker, self._backend
        old = pool.store
        linker.control.stop()
        old.close()
        old.spans.data_dir.close()
        pool.config = parse_config({**msgspec.to_builtins(pool.config), **settings})
        pool.store = build_store(pool.config, pool.geometry, num_pages=old.limits.num_pages)
        backend.store = linker.store = backend.req_to_token_pool.kvdrive_store = pool.store
        linker.sealer = Sealer(pool, backend.req_to_token_pool)
        linker.control = type(linker.control)(pool)
        linker.control.start()


@contextmanager
def no_attention() -> Iterator[None]:
    """Let the products of prefill attention return zeros, in every backend that is compared."""
    import torch
    from sglang.srt.layers.attention import torch_native_backend

    from kv_tier import attention
    from kvdrive_sglang.bench import dense_backend

    def zeros(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    def masked_zeros(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(query), query.new_zeros(query.shape[:-1], dtype=torch.float32)

    with (
        patch.object(torch_native_backend, "scaled_dot_product_attention", zeros),
        patch.object(attention, "attend_masked", masked_zeros),
        patch.object(dense_backend, "attend_masked", masked_zeros),
    ):
        yield


@contextmanager
def no_means() -> Iterator[None]:
    """Let pages that fill up keep the means that their row had before."""
    from kv_tier.steps import Writer

    def bare(writer: Writer, layer: int, k: Any, v: Any) -> None:
        completed, writer.completed = writer.completed, writer.completed[:0]
        write(writer, layer, k, v)
        writer.completed = completed

    write = Writer.write
    with patch.object(Writer, "write", bare):
        yield


def _bytes_dtype() -> Any:
    import torch

    return torch.uint8


def install(directory: Path) -> Probe:
    """Put a probe into this process; call after SGLang's plugins and before its scheduler."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probe = Probe(directory)
    for name in ("torch_native", "kvdrive", DENSE_BACKEND):
        create = ATTENTION_BACKENDS[name]
        ATTENTION_BACKENDS[name] = lambda runner, create=create: probe.watch_backend(create(runner))
    for target, hook in (
        ("sglang.srt.model_executor.model_runner.ModelRunner.sample", probe.sampled),
        ("kvdrive_sglang.pool.KVDriveAllocator.clear", probe.flushed),
        ("kvdrive_sglang.linker.KVDriveLinker.__init__", probe.linked),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    return probe


def register_dense() -> None:
    """Make the dense backend a choice of ``--attention-backend`` in this process."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    from kvdrive_sglang.bench.dense_backend import DenseAttnBackend

    add_attention_backend_choices([DENSE_BACKEND])
    register_attention_backend(DENSE_BACKEND)(DenseAttnBackend)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process with the probe in it."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    register_dense()
    install(Path(os.environ[PROBE_DIR_ENV]))
    run_scheduler_process(*args, **kwargs)
