"""The program as a whole: help, errors, what starting it loads."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.cli import main as program

COMMANDS = ["demo", "engine", "serve", "chat", "session", "bench", "profile", "tune", "doctor"]


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(program.build_app(), ["--help"])
    assert shown.exit_code == 0
    assert all(command in shown.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    shown = CliRunner().invoke(program.build_app(), [command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "Usage" in shown.output


def test_an_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(program.build_app(), ["dance"]).exit_code == 2


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_loads_no_torch_and_no_sglang() -> None:
    code = """
import sys
from typer.testing import CliRunner
from kvdrive_sglang.cli.main import build_app
assert CliRunner().invoke(build_app(), ["--help"]).exit_code == 0
print([name for name in ("torch", "sglang", "transformers", "numpy") if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_without_grpc_the_rest_is_there_and_says_why() -> None:
    code = """
import sys
sys.modules.update({"grpc": None, "kv_services.client": None})
from typer.testing import CliRunner
from kvdrive_sglang.cli.main import build_app
print(CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "200"}).output)
"""
    shown = python(code)
    assert "doctor" in shown and "need the extra" in shown
    assert "Talk to the model" not in shown


def test_an_error_of_ours_is_one_line_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("budget_tokens is 0: pass at least 1 [see] README")

    monkeypatch.setattr("kvdrive_sglang.cli.engine_command.load_config", refuse)
    ended = CliRunner().invoke(program.build_app(), ["engine"], env={"COLUMNS": "40"})
    assert ended.exit_code == 1
    assert ended.stderr == "error: budget_tokens is 0: pass at least 1 [see] README\n"
    assert ended.stdout == ""
