"""Real SGLang processes with the packaged model; engines are expensive, so each module shares its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kv_tier.meta.page_keys import page_keys
from kvdrive_sglang.bench.texts import ModelTokenizer, reference_text
from kvdrive_sglang.config import parse_config
from kvdrive_sglang.engine_process import EngineProcess, free_port
from kvdrive_sglang.launch import server_arguments
from kvdrive_sglang.packaged_model import ensure_model

REPO = Path(__file__).resolve().parents[2]
TIE_NATS = 0.26
"""Two steps of a bfloat16 logit between 16 and 32: so much apart are the gaps of ``torch_native`` alone and in a batch of 8."""


@pytest.fixture(scope="session")
def model_path() -> Path:
    return ensure_model(Path(os.environ.get("KVDRIVE_CACHE", REPO / ".cache")))


@pytest.fixture(scope="session")
def real_tokens(model_path: Path) -> list[int]:
    """Tokens of a real text, which no edit of ours changes."""
    return ModelTokenizer(model_path).encode(reference_text())


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    meta: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        return dict(self.meta["kvdrive"][0])


class Engine:
    """One engine on one data directory, started and killed at will."""

    def __init__(self, model_path: Path, data_dir: Path, log_path: Path, **settings: Any) -> None:
        self.model_path = model_path
        self.data_dir = data_dir
        self.log_path = log_path
        self.flags = settings.pop("flags", {})
        self.settings = settings
        self.process: EngineProcess | None = None

    def start(self) -> None:
        port = free_port()
        config = parse_config({"data_dir": str(self.data_dir), "http_port": port, **self.settings})
        arguments = server_arguments(config, str(self.model_path), log_level="warning", **self.flags)
        self.process = EngineProcess(arguments, port=port, log_path=self.log_path)
        self.process.wait_ready()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    @property
    def url(self) -> str:
        assert self.process is not None
        return self.process.url

    def generate(
        self,
        tokens: Sequence[int],
        *,
        new: int = 16,
        session: str | None = None,
        salt: str | None = None,
        **extra: Any,
    ) -> Answer:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
            "session_id": session,
            "cache_salt": salt,
            **extra,
        }
        response = httpx.post(f"{self.url}/generate", json=body, timeout=300)
        response.raise_for_status()
        answer = response.json()
        return Answer(answer["output_ids"], answer["meta_info"])

    def generate_batch(self, prompts: Sequence[Sequence[int]], *, new: int = 16) -> list[Answer]:
        body = {
            "input_ids": [list(p) for p in prompts],
            "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
        }
        response = httpx.post(f"{self.url}/generate", json=body, timeout=600)
        response.raise_for_status()
        return [Answer(a["output_ids"], a["meta_info"]) for a in response.json()]

    def control(self, op: str, **fields: Any) -> dict[str, Any]:
        import socket

        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(90)
            connection.connect(str(self.data_dir / "engine.sock"))
            with connection.makefile("rwb") as lines:
                lines.write(json.dumps({"op": op, **fields}).encode() + b"\n")
                lines.flush()
                return dict(json.loads(lines.readline()))

    def sealed(
        self, tokens: Sequence[int], *, salt: str | None = None, wait_s: float = 30.0
    ) -> tuple[int, int]:
        """Return (sealed pages, full pages) of a sequence whose last token was sampled."""
        keys = [key.hex() for key in page_keys(list(tokens)[:-1], 8, cache_salt=salt)]
        return int(self.control("sealed", keys=keys, wait_s=wait_s)["num_sealed"]), len(keys)

    def counters(self) -> dict[str, int]:
        return dict(self.control("stats")["counters"])


@dataclass(frozen=True)
class Scored:
    """An answer with the gap between its two most likely tokens at every step, in nats."""

    tokens: list[int]
    gaps: list[float]


def ask(
    engine: Engine, tokens: Sequence[int], *, new: int = 20, ignore_eos: bool = True, **extra: Any
) -> Scored:
    answer = engine.generate(
        tokens,
        sampling_params={"max_new_tokens": new, "temperature": 0, "ignore_eos": ignore_eos},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=-1,
        **extra,
    )
    tops = answer.meta["output_top_logprobs"]
    return Scored(answer.tokens, [best[0] - second[0] for best, second, *_ in tops])


def assert_same(alone: Scored, together: Scored) -> None:
    """Equal, or apart from a step on whose two best tokens were as good as equal."""
    for step, (expected, got) in enumerate(zip(alone.tokens, together.tokens, strict=True)):
        if expected != got:
            assert alone.gaps[step] <= TIE_NATS, (step, expected, got, alone.gaps[step])
            return


@pytest.fixture(scope="module")
def new_engine(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Make engines that are gone after the module."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        root = tmp_path_factory.mktemp("engine")
        engine = Engine(model_path, root / "data", root / "engine.log", **settings)
        engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.kill()
