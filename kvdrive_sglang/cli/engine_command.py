"""`kvdrive engine`: check the port and the data directory, then become SGLang's server with the right flags."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.config import CONFIG_ENV, KVDriveConfig, load_config
from kvdrive_sglang.engine_process import server_command
from kvdrive_sglang.launch import ENVIRONMENT, server_arguments
from kvdrive_sglang.packaged_model import MODEL_NAME, ensure_model

PACKAGED: Final = "packaged"
CACHE_ENV: Final = "KVDRIVE_CACHE"
LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}
OUR_FLAGS: Final = ("--model-path", "--model", "--host", "--port", "--attention-backend")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="engine")(engine)


def cache_dir() -> Path:
    """Return where the packaged model lies: ``KVDRIVE_CACHE``, or ``.cache/kvdrive`` in the home directory."""
    return Path(os.environ.get(CACHE_ENV) or Path.home() / ".cache" / "kvdrive").absolute()


def engine(
    model_path: Annotated[
        str, typer.Option(help="model directory, or `packaged` for a small one from the package index")
    ] = PACKAGED,
    data_dir: Annotated[
        str | None,
        typer.Option(help="directory of spans and control socket, on a local disk; one engine owns it"),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help=f"configuration as JSON or @FILE; else the variable {CONFIG_ENV}")
    ] = None,
    budget_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS|all", help="positions attended per step, layer and KV head")
    ] = None,
    dram_bytes: Annotated[int | None, typer.Option(help="frames, page means and tables")] = None,
    device_bytes: Annotated[
        int | None, typer.Option(help="window caches and indexes; requests that find none wait")
    ] = None,
    ssd_bytes: Annotated[int | None, typer.Option(help="span files")] = None,
    window_multiple: Annotated[
        int | None, typer.Option(help="window cache size as a multiple of the budget")
    ] = None,
    append: Annotated[
        str | None, typer.Option(metavar="auto|exact|sparse", help="how new tokens after a prefix attend")
    ] = None,
    persist: Annotated[
        str | None,
        typer.Option(metavar="sessions|all", help="which requests keep files: with a session id, or all"),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="where HTTP listens, default 127.0.0.1; keep it private")
    ] = None,
    port: Annotated[int | None, typer.Option(help="where HTTP listens, default 30000")] = None,
    print_flags: Annotated[bool, typer.Option("--print-flags", help="show SGLang's flags and end")] = False,
    sglang_flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SGLANG FLAGS]", help="handed to SGLang unchanged")
    ] = None,
) -> None:
    """Serve a model with SGLang over the tiered store, until Ctrl-C or SIGTERM.

    Plain SGLang clients (HTTP, OpenAI API, sgl.function) use it as any SGLang server; `kvdrive serve` adds
    durable sessions. A flag wins over the configuration, and what follows `--` over both.
    """
    loaded = load_config(
        config,
        data_dir=data_dir,
        budget_tokens=_budget(budget_tokens),
        dram_bytes=dram_bytes,
        device_bytes=device_bytes,
        ssd_bytes=ssd_bytes,
        window_multiple=window_multiple,
        append=append,
        persist=persist,
        http_host=host,
        http_port=port,
    )
    listen = loaded.http_host
    settings = _told_to_the_service(loaded)
    extra = _checked_flags(sglang_flags or [])
    require_sglang()
    if print_flags:
        command = engine_command(settings, _model(model_path, fetch=False), listen, extra)
        typer.echo(shlex.join(command[3:]))
        return
    check_port(listen, settings.http_port)
    check_data_dir(settings)
    if listen not in ("127.0.0.1", "::1", "localhost"):
        _warn(
            f"the engine listens on {listen}: whoever reaches port {settings.http_port} reads every tenant's prefixes"
        )
    command = engine_command(settings, _model(model_path, fetch=True), listen, extra)
    sys.stdout.flush()
    os.execve(command[0], command, {**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false", **os.environ})


def engine_command(config: KVDriveConfig, model_path: str, host: str, extra: list[str]) -> list[str]:
    """Return the command line of SGLang's server: Python, our flags, then ``extra``, which wins."""
    arguments = server_arguments(config, model_path)
    return [*server_command(arguments, host=host, port=config.http_port), *extra]


def check_port(host: str, port: int) -> None:
    """Refuse a port that the server could not open.

    Raises:
        ConfigError: it is in use, not permitted, or the host is no address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is no address: {error.strerror}: pass another --host") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop what listens there, or pass another --port"
        else:
            message = (
                f"port {port} on {host} cannot be opened: {error.strerror}: pass another --port or --host"
            )
        raise ConfigError(message) from error


def check_data_dir(config: KVDriveConfig) -> None:
    """Open the data directory as the engine will, and close it again; warn when the disk is smaller than the quota.

    Raises:
        DataDirError: a live engine owns it, it is somebody else's, or it cannot be written.
    """
    with DataDir.open(config.data_dir, role="engine") as opened:
        opened.engine_socket_path  # noqa: B018  # its length is checked
        spans = opened.path / "spans"
        held = sum(entry.stat().st_size for entry in os.scandir(spans) if entry.is_file())
    room = shutil.disk_usage(config.data_dir).free + held
    if room < config.ssd_bytes:
        _warn(
            f"ssd_bytes={config.ssd_bytes:,} is more than the {room:,} bytes that {config.data_dir} can hold"
        )


def _budget(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number of tokens nor `all`", param_hint="--budget-tokens"
        ) from None


def _told_to_the_service(config: KVDriveConfig) -> KVDriveConfig:
    """Make the directory absolute and the host one that can be connected to."""
    return msgspec.structs.replace(
        config,
        data_dir=os.path.abspath(os.path.expanduser(config.data_dir)),
        http_host=LOOPBACK.get(config.http_host, config.http_host),
    )


def _checked_flags(flags: list[str]) -> list[str]:
    for flag in flags:
        if flag.partition("=")[0] in OUR_FLAGS or flag.startswith("--unified-cache-external-linker"):
            raise typer.BadParameter(
                f"{flag} is set by kvdrive: pass its own option before `--`", param_hint="SGLANG FLAGS"
            )
    if flags and not flags[0].startswith("-"):
        raise typer.BadParameter(f"{flags[0]!r} is no flag", param_hint="SGLANG FLAGS")
    return flags


def require_sglang() -> None:
    for name in ("torch", "sglang"):
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed: pip install 'kvdrive-sglang[engine]'")


def _model(path: str, *, fetch: bool) -> str:
    """Return the model directory that SGLang gets; a name of a model hub is left to SGLang."""
    if path == PACKAGED:
        return str(ensure_model(cache_dir()) if fetch else cache_dir() / MODEL_NAME)
    if not Path(path).expanduser().exists():
        if _HUB_NAME.fullmatch(path):
            return path
        raise ConfigError(f"model path {path} does not exist: pass a model directory, or `{PACKAGED}`")
    return os.path.abspath(os.path.expanduser(path))


def _warn(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"warning: {message}", style="yellow"))
