"""What settings cost: a made-up batch in the model's shape, decoded over a real store on the disk that will serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Self

import torch

from kv_tier.geometry import Geometry
from kv_tier.meta.errors import ConfigError
from kv_tier.pipeline import Pipeline
from kvdrive_sglang.bench.batch_driver import BatchSession, seal
from kvdrive_sglang.bench.made_up import Inputs
from kvdrive_sglang.tuning import Settings

STEPS, FIRST_STEPS = 14, 4  # from empty window caches; the first are not counted
ROUNDS = 2  # of these steps: what else the machine does then makes them slower, never faster
MOST_BYTES = 64 << 20  # of KV that is made up; fewer layers where the model has more


def shape_of(model: Path, num_tokens: int, page_size: int) -> tuple[Geometry, int, int]:
    """Return the model's shape with as many layers as are measured, its group, and how many layers it has.

    Raises:
        ConfigError: the directory has no readable ``config.json``, or that lacks a size.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}/config.json cannot be read: {error}: name a model directory") from error
    except KeyError as error:
        raise ConfigError(f"{model}/config.json has no {error}: not a model that is supported") from error
    one = Geometry(1, kv_heads, head_dim, page_size)
    measured = max(1, min(layers, MOST_BYTES // (one.token_bytes * num_tokens)))
    return Geometry(measured, kv_heads, head_dim, page_size), heads // kv_heads, layers


class StoreCost:
    """Measure settings one after another; spans are sealed once per centroid count.

    Args:
        directory: where data directories are made.
        batch: requests that decode.
        budget_tokens: attended per step.
        frame_share: frames for so much of their KV.
        progress: told what is under way.
    """

    def __init__(
        self,
        inputs: Inputs,
        directory: Path,
        batch: int,
        budget_tokens: int,
        frame_share: float,
        progress: Callable[[str], None],
    ) -> None:
        self.inputs, self.directory, self.batch = inputs, directory, batch
        self.budget_tokens, self.frame_share = budget_tokens, frame_share
        self.progress = progress
        self._session: BatchSession | None = None
        self._opened = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store that is open."""
        if self._session is not None:
            self._session.__exit__(None, None, None)
            self._session = None

    def prepare(self, settings: Settings) -> None:
        """Seal what ``settings`` need, so that their measurement takes no longer than others."""
        self._open(settings)

    def __call__(self, settings: Settings) -> float:
        """Return the seconds of a decode step of the measured layers: the mean over steps of the best of a few rounds."""
        self.progress(describe(settings))
        session, pipeline = self._open(settings), Pipeline(settings.micro_batch)
        rounds = []
        with torch.inference_mode():
            for _ in range(ROUNDS):
                session.restart()
                rounds.append([session.step(pipeline)[1].layers_s for _ in range(self.inputs.num_steps)])
        return mean(min(times) for times in list(zip(*rounds, strict=True))[FIRST_STEPS:])

    def _open(self, settings: Settings) -> BatchSession:
        wanted = settings.window_multiple, settings.pages_per_cluster
        if self._session is not None and self._opened == wanted:
            return self._session
        self.close()
        path = self.directory / spans_name(settings.pages_per_cluster)
        if not path.exists():
            seal(self.inputs, path, self.batch, settings.pages_per_cluster)
        self._session = BatchSession(
            self.inputs,
            path,
            self.batch,
            budget_tokens=self.budget_tokens,
            window_multiple=settings.window_multiple,
            frame_share=self.frame_share,
        )
        self._opened = wanted
        return self._session


def spans_name(pages_per_cluster: int) -> str:
    """Name the data directory whose spans are packed so."""
    return f"{pages_per_cluster}-pages"


def describe(settings: Settings) -> str:
    """Say what is tried."""
    micro = settings.micro_batch or "auto"
    return f"windows x{settings.window_multiple}, {settings.pages_per_cluster} pages per cluster, micro-batch {micro}"
