"""The terminal commands against a service with a fake engine."""

import asyncio
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner, Result

from kvdrive_sglang.cli.session_commands import register
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import IM_END, continuation

APP = typer.Typer()
register(APP)


async def kvdrive(world: World, *arguments: str, typed: str | None = None) -> Result:
    environment = {"KVDRIVE_ADDRESS": f"127.0.0.1:{world.server.port}", "COLUMNS": "160", "TERM": "dumb"}
    return await asyncio.to_thread(CliRunner().invoke, APP, list(arguments), typed, environment)


async def test_ls_show_fork_suspend_resume_rm(world: World) -> None:
    session = (await world.client.create_session(title="my [title]", labels={"a": "b"})).session_id
    await world.client.generate(session, token_ids=[1] * 8, max_new_tokens=5).read()
    listed = await kvdrive(world, "session", "ls")
    assert listed.exit_code == 0, listed.output
    assert session in listed.output and "my [title]" in listed.output and "active" in listed.output
    shown = await kvdrive(world, "session", "show", session)
    assert "a=b" in shown.output and "13" in shown.output
    forked = await kvdrive(world, "session", "fork", session, "--turns", "0", "--title", "half")
    assert "half" in forked.output and session in forked.output
    suspended = await kvdrive(world, "session", "suspend", session)
    assert f"{session} suspended, 3 pages on SSD" in suspended.output
    assert "suspended" in (await kvdrive(world, "session", "ls", "--limit", "5")).output
    assert f"{session} active, 13 tokens" in (await kvdrive(world, "session", "resume", session)).output
    removed = await kvdrive(world, "session", "rm", session)
    assert f"{session} deleted, 3 spans, 300 bytes freed" in removed.output
    missing = await kvdrive(world, "session", "show", session)
    assert missing.exit_code == 1
    assert "SESSION_NOT_FOUND" in missing.output and session in missing.output
    assert "only the newest 1" not in (await kvdrive(world, "session", "ls", "--limit", "1")).output


async def test_chat_streams_and_can_be_continued(world: World) -> None:
    world.engine.script(answer=[40, 41, IM_END])
    said = await kvdrive(world, "chat", "--system", "S", "--title", "talk", typed="hello\n\nmore\n")
    assert said.exit_code == 0, said.output
    assert "3 tokens in" in said.output and "continue with: kvdrive chat --session s_" in said.output
    assert len(world.engine.requests) == 2  # an empty line is no turn
    first, second = (request["input_ids"] for request in world.engine.requests)
    assert second[: len(first) + 3] == [*first, 40, 41, IM_END]
    session = said.output.rpartition("--session ")[2].split()[0]
    await world.client.suspend(session)
    again = await kvdrive(world, "chat", "--session", session, "--max-new-tokens", "2", typed="so\n")
    assert again.exit_code == 0, again.output
    asked = world.engine.requests[-1]["input_ids"]
    assert (await world.client.get(session)).num_tokens == len(asked) + len(continuation(asked, 2))


async def test_no_service_is_named(world: World) -> None:
    result = await kvdrive(world, "session", "ls", "--address", "127.0.0.1:1")
    assert result.exit_code == 1 and "UNAVAILABLE" in result.output


@pytest.mark.parametrize("option", [["--port", "70000"], ["--redis-url", "http://x"]])
def test_serve_refuses_bad_values(option: list[str]) -> None:
    result = CliRunner().invoke(APP, ["serve", "--data-dir", "/nowhere/x", *option])
    assert result.exit_code == 1 and "it must be" in result.output


def test_commands_load_no_torch() -> None:
    code = "import sys, kvdrive_sglang.cli.session_commands; print('torch' in sys.modules, 'redis' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["False", "False"]
