from __future__ import annotations

import numpy as np
import torch

from kv_tier.page_table import NOWHERE, PageTable
from tests.models.synthetic_engine import GEOMETRY


def filled_table() -> PageTable:
    table = PageTable(GEOMETRY, 6)
    table.frames[2] = 7
    table.span_of[2], table.ordinal_of[2] = 11, 3
    table.filled[2], table.exact[2], table.stamp[2] = 4, True, 9
    for means in table.means:
        means[2] = 1.5
    return table


def test_reset_forgets_a_page_and_ends_its_life() -> None:
    table = filled_table()
    table.reset(np.array([2]))
    assert table.frames[2] == table.span_of[2] == table.ordinal_of[2] == NOWHERE
    assert table.filled[2] == 0 and not table.exact[2] and not table.lost[2]
    assert table.life[2] == 1 and table.life[3] == 0


def test_move_hands_over_everything_that_is_known() -> None:
    table = filled_table()
    table.lost[5] = True
    table.move(2, 5)
    assert (table.frames[5], table.span_of[5], table.ordinal_of[5]) == (7, 11, 3)
    assert (table.filled[5], table.exact[5], table.stamp[5], table.lost[5]) == (4, True, 9, False)
    assert all(torch.equal(means[5], means[2]) for means in table.means)
    assert table.frames[2] == table.span_of[2] == NOWHERE
    assert table.life[5] == 1  # what was cached of the lost page no longer applies


def test_the_frame_column_has_one_home() -> None:
    table = PageTable(GEOMETRY, 4)
    table.frames[1] = 3
    assert table.frame_of.tolist() == [NOWHERE, 3, NOWHERE, NOWHERE]
    assert table.num_bytes > sum(means.nbytes for means in table.means)
