"""Entry point of SGLang's plugin group: runs once in every SGLang process."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

BACKEND = "kvdrive"


def is_requested() -> bool:
    """Whether this engine runs on the kvdrive backend."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().kernel.attention_backend == BACKEND


def register() -> None:
    """Register backend, hooks and hashing; does not decide whether they are used."""
    end_with_parent()
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    from kvdrive_sglang.hashing import replace_native_hash
    from kvdrive_sglang.hooks import register_hooks

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(create_backend)
    replace_native_hash()
    register_hooks()


def end_with_parent() -> None:
    """End a process of SGLang's whose parent ended while it was still importing.

    SGLang asks the kernel for a signal at the parent's end; a parent that ended before sends none, and the process would
    stay for good, with its memory and the data directory.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def create_backend(model_runner: Any) -> Any:
    """Build the attention backend, after checking that nothing is on that we cannot serve."""
    from kvdrive_sglang.backend import KVDriveAttnBackend
    from kvdrive_sglang.hooks import check_hooks
    from kvdrive_sglang.refusals import refuse_unsupported

    check_hooks()
    refuse_unsupported(model_runner.server_args, model_runner.model_config)
    backend = KVDriveAttnBackend(model_runner)
    model_runner.req_to_token_pool.kvdrive_store = backend.store
    return backend
