"""How many requests may run: no more than have window caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdrive_sglang import hooks


@pytest.mark.parametrize(
    ("num_windows", "running", "allowed"),
    [(8, 0, 5), (8, 5, 3), (3, 1, 2), (3, 3, 0), (None, 9, 5)],
    ids=["SGLang's limit", "fewer windows", "few windows", "all lent", "no windows needed"],
)
def test_new_requests_wait_for_window_caches(
    monkeypatch: pytest.MonkeyPatch, num_windows: int | None, running: int, allowed: int
) -> None:
    device = None if num_windows is None else SimpleNamespace(num_requests=num_windows)
    monkeypatch.setattr(
        hooks, "linker_of", lambda cache: SimpleNamespace(store=SimpleNamespace(device=device))
    )
    seen: list[Any] = []

    def original(self: object, running_bs: int, *args: Any, **kwargs: Any) -> int:
        seen.append((running_bs, args, kwargs))
        return 5

    scheduler = SimpleNamespace(tree_cache=None)
    assert hooks.get_num_allocatable_reqs(original, scheduler, running, None, num_held_rows=1) == allowed
    assert seen == [(running, (None,), {"num_held_rows": 1})]


def test_another_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "linker_of", lambda cache: None)
    scheduler = SimpleNamespace(tree_cache=None)
    assert hooks.get_num_allocatable_reqs(lambda self, running_bs: 7, scheduler, 2) == 7
