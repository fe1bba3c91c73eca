"""SGLang's external linker over the span store: lookup by page key, load = attach, no KV moves."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kv_tier.request import Figures
from kv_tier.restore import Choice, choose
from kvdrive_sglang.control import ControlServer
from kvdrive_sglang.pool import KVDrivePool

logger = logging.getLogger(__name__)


MAX_CHOICES = 4096  # of requests that wait; the oldest may have been aborted


class _NothingToWaitFor:
    """A layer counter of loads that are complete when they are queued: attaching reads no KV."""

    def set_consumer(self, index: int) -> None:
        return

    def wait_until(self, layer: int) -> None:
        return


class KVDriveLinker(UnifiedCacheLinker):
    """Answer SGLang's tree which pages can be restored, and bind them to spans.

    Nothing here raises into the scheduler: what cannot be served is a miss and is recomputed. Sealing is driven by
    ``kvdrive_sglang.sealing`` at SGLang's checkpoints, where tokens, chain and session are known; ``offload`` only
    takes note, since the store owns the pages already.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        assert isinstance(pool, KVDrivePool), type(pool)
        self.pool = pool
        self.store = pool.store
        self.page_size = pool.page_size
        self.layer_done_counter = _NothingToWaitFor()
        self.pools = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self.choices: dict[
            str, tuple[Choice, int]
        ] = {}  # by rid, with the pages it is about, until a step has the request
        self._num_taken = 0
        self._num_started = 0
        self.control = ControlServer(pool)
        self.control.start()

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        places = self.store.spans.restorable([bytes.fromhex(key) for key in transfers[0].keys or ()])
        if not places:
            return []
        choice = choose(self.pool.config.restore, self.store.costs, places, self.pool.geometry)
        self.choices[rid] = choice, len(places)
        if len(self.choices) > MAX_CHOICES:
            del self.choices[next(iter(self.choices))]
        return list(range(1, len(places) + 1)) if choice.restore else []

    def take_choice(self, rid: str, figures: Figures) -> None:
        """Write down what ``lookup`` chose for a request, once a step has computed for it."""
        choice, num_pages = self.choices.pop(rid, (None, 0))
        if choice is not None:
            figures.restore_s, figures.recompute_s = choice.restore_s, choice.recompute_s
            figures.tokens_recomputed = 0 if choice.restore else num_pages * self.page_size

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        transfer = transfers[0]
        assert transfer.device_indices is not None and transfer.keys is not None
        pages = (transfer.device_indices[:: self.page_size] // self.page_size).cpu().numpy()
        return self.store.attach(pages, [bytes.fromhex(key) for key in transfer.keys])

    def start_layer_wise_loading(self) -> int:
        self._num_started += 1
        return self._num_started

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return True

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        self._num_taken += 1
        return True

    def num_completed_offloads(self) -> int:
        return self._num_taken

    def pop_completed_offload(self) -> bool:
        self._num_taken -= 1
        return True

    def reset(self) -> None:
        self.store.collect_sealed(wait_s=60.0)
        self._num_taken = 0

    def close(self) -> None:
        self.control.stop()
        self.store.close()
