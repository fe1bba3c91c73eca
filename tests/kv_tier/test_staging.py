"""Staging: rows of borrowed frames beside a dict that remembers what was kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kv_tier.geometry import Geometry
from kv_tier.meta.read_engine import Ints
from kv_tier.staging import ABSENT, IN_FLIGHT, Staging

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, stretch_tokens=32)
NUM_PAGES, NUM_FRAMES = 40, 12


def make(num_lent: int = 2) -> Staging:
    staging = Staging(GEOMETRY, NUM_PAGES, NUM_FRAMES)
    for frame in range(3, 3 + num_lent):
        staging.lend(frame)
    return staging


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def test_a_lent_frame_is_one_row_per_pair() -> None:
    staging = make(1)
    rows = staging.insert(ints(0, 1, 2, 3), ints(7, 7, 7, 7))
    assert sorted(rows.tolist()) == [pair * NUM_FRAMES + 3 for pair in range(4)]
    assert staging.insert(ints(0), ints(8)).tolist() != []  # the oldest left
    staging.check_integrity()


def test_the_least_recently_used_row_leaves() -> None:
    staging = make(1)
    staging.insert(ints(0, 1, 2), ints(1, 2, 3))
    staging.insert(ints(3), ints(4))
    staging.find(ints(0, 1, 2), ints(1, 2, 3))
    staging.insert(ints(0), ints(9))
    assert staging.row_of[3, 4] == ABSENT
    assert (staging.find(ints(0, 1, 2, 0), ints(1, 2, 3, 9)) >= 0).all()


def test_the_clock_outlives_32_bits() -> None:
    staging = make(1)
    staging.insert(ints(0), ints(1))
    staging._clock = 2**31 - 1
    assert staging.find(ints(0), ints(1)).tolist() != [ABSENT]
    staging.insert(ints(1), ints(1))
    staging.touch(ints())
    staging.check_integrity()


def test_a_demoted_row_leaves_first_whatever_the_quota_until_it_is_touched() -> None:
    staging = make(1)
    staging.quota[:] = ints(2, 0, 0, 0)
    rows = staging.insert(ints(0, 0, 1, 1), ints(1, 2, 1, 2))
    staging.demote(rows[:2])
    staging.touch(rows[:1])
    staging.insert(ints(2), ints(5))
    assert (staging.row_of[ints(0, 0, 1, 1), ints(1, 2, 1, 2)] >= 0).tolist() == [True, False, True, True]
    staging.check_integrity()


def test_a_pair_within_its_quota_keeps_its_rows() -> None:
    staging = make(1)
    staging.quota[:] = ints(0, 2, 0, 0)
    staging.insert(ints(1, 1), ints(1, 2))
    staging.insert(ints(0, 0), ints(1, 2))
    staging.find(ints(0, 0), ints(1, 2))  # the others are older
    staging.insert(ints(2), ints(5))
    assert (staging.row_of[1, [1, 2]] >= 0).all()
    assert (staging.row_of[0, [1, 2]] == ABSENT).sum() == 1
    staging.quota[:] = 9
    assert staging.insert(ints(3, 3), ints(1, 2)).tolist() == []  # nobody may be pushed out
    staging.check_integrity()


def test_without_frames_nothing_is_kept() -> None:
    staging = Staging(GEOMETRY, NUM_PAGES, NUM_FRAMES)
    assert staging.insert(ints(0), ints(1)).tolist() == []
    assert staging.find(ints(0), ints(1)).tolist() == [ABSENT]


def test_forgetting_reaches_what_is_in_flight() -> None:
    staging = make()
    staging.insert(ints(0, 3), ints(5, 5))
    staging.row_of[1, 5] = IN_FLIGHT
    staging.forget(ints(5, 6))
    assert (staging.row_of == ABSENT).all() and staging.num_free == staging.num_rows
    staging.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_beside_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    staging, lent = make(0), list(range(1, NUM_FRAMES))
    content: dict[int, tuple[int, int]] = {}  # row -> (pair, page)
    for _ in range(300):
        action = rng.choice(["lend", "back", "insert", "insert", "insert", "find", "forget", "quota"])
        if action == "lend" and lent:
            staging.lend(lent.pop())
        elif action == "back" and staging.frames:
            frame = staging.give_back()
            lent.append(frame)
            content = {row: key for row, key in content.items() if row % NUM_FRAMES != frame}
        elif action == "insert":
            keys = {(rng.randrange(4), rng.randrange(NUM_PAGES)) for _ in range(rng.randrange(1, 9))}
            fresh = sorted(key for key in keys if staging.row_of[key] == ABSENT)
            if fresh:
                pairs, pages = np.array(fresh, np.int64).T
                rows = staging.insert(pairs, pages)
                content.update(zip(rows.tolist(), fresh, strict=False))
        elif action == "find":
            pairs, pages = ints(*range(4)), ints(*(rng.randrange(NUM_PAGES) for _ in range(4)))
            for pair, page, row in zip(pairs, pages, staging.find(pairs, pages).tolist(), strict=True):
                assert row == ABSENT or content[row] == (pair, page)
        elif action == "forget":
            staging.forget(ints(*rng.sample(range(NUM_PAGES), 3)))
        else:
            staging.quota[:] = [rng.randrange(4) for _ in range(4)]
        staging.check_integrity()
        for pair, page in zip(*(staging.row_of >= 0).nonzero(), strict=True):
            assert content[int(staging.row_of[pair, page])] == (pair, page)
