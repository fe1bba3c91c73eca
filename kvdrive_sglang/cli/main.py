"""The program `kvdrive`. Its commands import what they need when they run: `kvdrive --help` loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from kv_tier.meta.errors import KVDriveError
from kvdrive_sglang.cli import (
    bench_command,
    calibrate_command,
    demo,
    doctor,
    engine_command,
    fsck_command,
    profile_command,
    tune_command,
)

CLIENT_PACKAGES = ("grpc", "google", "kv_services")


class Program(TyperGroup):
    """Show an error that we raise on purpose as one line, without a traceback, and end with status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVDriveError as error:
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(1) from error


def build_app() -> typer.Typer:
    """Return the program with every command whose dependencies are installed."""
    app = typer.Typer(
        cls=Program,
        help="A tiered sparse KV store and durable sessions for SGLang.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    demo.register(app)
    engine_command.register(app)
    try:
        import_module("kvdrive_sglang.cli.session_commands").register(app)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in CLIENT_PACKAGES:
            raise
        app.info.epilog = (
            f"session, chat and serve need the extra `service` or `client` ({error.name} is missing)."
        )
    bench_command.register(app)
    calibrate_command.register(app)
    profile_command.register(app)
    tune_command.register(app)
    doctor.register(app)
    fsck_command.register(app)
    return app


def main() -> None:
    """Run the program and end the process with its status."""
    build_app()()
