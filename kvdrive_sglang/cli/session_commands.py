"""`kvdrive session ...`, `kvdrive chat` and `kvdrive serve`: the session service at the terminal.

The first two are gRPC clients and need the extra `client` only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_services.client import Answer, Client
from kv_services.errors import EngineUnavailable, ServiceError, SessionBusy
from kv_services.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from kv_services.server import SessionServer

session_app = typer.Typer(
    help="List, inspect, fork, suspend, resume and delete sessions.", no_args_is_help=True
)

Address = Annotated[str, typer.Option(envvar="KVDRIVE_ADDRESS", help="host:port of the session service")]
Tenant = Annotated[
    str, typer.Option(envvar="KVDRIVE_TENANT", help="whose sessions; empty for the default tenant")
]
SessionId = Annotated[str, typer.Argument(help="session or document id", show_default=False)]
SessionIds = Annotated[list[str], typer.Argument(help="session or document ids", show_default=False)]

ADDRESS = "127.0.0.1:50051"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the program's."""
    app.add_typer(session_app, name="session")
    app.command()(chat)
    app.command()(serve)


@session_app.command()
def ls(
    address: Address = ADDRESS,
    tenant: Tenant = "",
    documents: Annotated[bool, typer.Option(help="list documents instead of sessions")] = False,
    limit: Annotated[int, typer.Option(min=1, help="most rows")] = 100,
) -> None:
    """List sessions, newest first."""
    table = Table("id", "state", "title", "turns", "tokens", "sealed pages", "updated")
    with _client(address, tenant) as client:
        for number, session in enumerate(client.list(documents=documents, page_size=min(limit, 1000))):
            if number == limit:
                table.caption = f"only the newest {limit}; see --limit"
                break
            table.add_row(*_cells(session))
    Console().print(table)


@session_app.command()
def show(session_id: SessionId, address: Address = ADDRESS, tenant: Tenant = "") -> None:
    """Show everything about a session or document; what it takes on SSD if an engine runs."""
    with _client(address, tenant) as client:
        session = client.get(session_id)
        try:
            storage = client.storage(session_id)
        except EngineUnavailable:
            storage = None
        _print_session(session, storage)


@session_app.command()
def fork(
    session_id: SessionId,
    address: Address = ADDRESS,
    tenant: Tenant = "",
    turns: Annotated[
        int | None, typer.Option(min=0, help="keep the first so many turns; all without it")
    ] = None,
    title: Annotated[str, typer.Option(help="title of the new session")] = "",
) -> None:
    """Create a session that continues another one, or starts from a document."""
    with _client(address, tenant) as client:
        _print_session(client.fork(session_id, num_turns=turns, title=title))


@session_app.command()
def suspend(session_ids: SessionIds, address: Address = ADDRESS, tenant: Tenant = "") -> None:
    """Wait until every full page of the sessions is on SSD, then mark them suspended."""
    with _client(address, tenant) as client:
        for session_id in session_ids:
            with Console().status(f"suspending {session_id}"):
                session = client.suspend(session_id)
            Console().print(f"{session_id} suspended, {session.num_sealed_pages} pages on SSD")


@session_app.command()
def resume(session_ids: SessionIds, address: Address = ADDRESS, tenant: Tenant = "") -> None:
    """Make suspended sessions accept turns again."""
    with _client(address, tenant) as client:
        for session_id in session_ids:
            session = client.resume(session_id)
            Console().print(f"{session_id} active, {session.num_tokens} tokens")


@session_app.command()
def rm(session_ids: SessionIds, address: Address = ADDRESS, tenant: Tenant = "") -> None:
    """Delete sessions or documents, with the KV that only they use."""
    with _client(address, tenant) as client:
        for session_id in session_ids:
            gone = client.delete(session_id)
            Console().print(f"{session_id} deleted, {gone.num_spans} spans, {gone.freed_bytes:,} bytes freed")


def chat(
    address: Address = ADDRESS,
    tenant: Tenant = "",
    session: Annotated[str, typer.Option(help="continue this session; a new one without it")] = "",
    document: Annotated[str, typer.Option(help="start the new session from this document")] = "",
    system: Annotated[str, typer.Option(help="system message of a new session")] = "",
    title: Annotated[str, typer.Option(help="title of the new session")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.7,
) -> None:
    """Talk to the model. Ctrl-C stops an answer, Ctrl-D ends; the session stays and can be continued."""
    console = Console(highlight=False, soft_wrap=True)
    with _client(address, tenant) as client:
        found = _session_to_chat(client, session, document, title)
        console.print(Text(f"session {found.session_id}, {found.num_tokens} tokens", style="dim"))
        first = system if found.num_turns == 0 else ""
        while (line := _ask(console)) is not None:
            if not line.strip():
                continue
            with client.chat(
                found.session_id, line, system=first, max_new_tokens=max_new_tokens, temperature=temperature
            ) as answer:
                _stream(console, answer)
            first = ""
        console.print(Text(f"continue with: kvdrive chat --session {found.session_id}", style="dim"))


def serve(
    data_dir: Annotated[
        Path, typer.Option(help="data directory, shared with the engine", show_default=False)
    ],
    host: Annotated[str, typer.Option(help="where gRPC listens")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="where gRPC listens; 0 takes a free port")] = 50051,
    redis_url: Annotated[
        str, typer.Option(envvar="KVDRIVE_REDIS_URL", help="Redis 7 or later; an embedded Valkey without it")
    ] = "",
    metrics_port: Annotated[
        int | None, typer.Option(help="port of Prometheus' /metrics; none without it")
    ] = None,
    max_concurrent_turns: Annotated[int, typer.Option(help="turns running at once")] = 64,
    suspend_timeout_s: Annotated[float, typer.Option(help="how long a suspend waits for the SSD")] = 60.0,
    tenant_quota_bytes: Annotated[
        int, typer.Option(help="KV and logs that one tenant may keep; 0: no limit")
    ] = 0,
    session_ttl_s: Annotated[
        int, typer.Option(help="delete sessions that nobody changed for so long; 0: never")
    ] = 0,
) -> None:
    """Serve durable sessions over gRPC until Ctrl-C or SIGTERM. Start the engine with `kvdrive engine`."""
    # The service's own dependencies are not those of a client.
    from kv_services.config import ServiceConfig
    from kv_services.server import serve as run
    from kv_tier.meta.errors import KVDriveError

    try:
        config = ServiceConfig(
            data_dir,
            host=host,
            port=port,
            redis_url=redis_url,
            metrics_port=metrics_port,
            max_concurrent_turns=max_concurrent_turns,
            suspend_timeout_s=suspend_timeout_s,
            tenant_quota_bytes=tenant_quota_bytes,
            session_ttl_s=session_ttl_s,
        )
        asyncio.run(run(config, _announce))
    except KVDriveError as error:
        raise _fail(str(error)) from error


@contextlib.contextmanager
def _client(address: str, tenant: str) -> Iterator[Client]:
    """Connect; an error of the service ends the program with its message."""
    with Client(address, tenant=tenant) as client:
        try:
            yield client
        except ServiceError as error:
            raise _fail(f"{error.message} [{error.reason}]") from error


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    return typer.Exit(1)


def _session_to_chat(client: Client, session_id: str, document_id: str, title: str) -> pb.Session:
    if not session_id:
        return client.create_session(title=title, document_id=document_id)
    found = client.get(session_id)
    return client.resume(session_id) if found.state == pb.SESSION_STATE_SUSPENDED else found


def _ask(console: Console) -> str | None:
    try:
        return console.input(Text("> ", style="bold"))
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _stream(console: Console, answer: Answer) -> None:
    """Print an answer as it comes, then its cost."""
    try:
        for delta in answer:
            console.print(Text(delta.text), end="")
    except KeyboardInterrupt:
        answer.cancel()
        console.print(Text(" (stopped)", style="dim"))
        return
    except SessionBusy as error:
        console.print(Text(error.message, style="red"))
        return
    console.print()
    usage = answer.usage
    again = f" ({usage.recomputed_tokens} sooner than read)" if usage.recomputed_tokens else ""
    console.print(
        Text(
            f"{usage.completion_tokens} tokens in {usage.total_ms / 1e3:.1f} s, first after {usage.ttft_ms:.0f} ms; "
            f"prompt {usage.prompt_tokens}: {usage.restored_device_tokens} device, {usage.restored_dram_tokens} DRAM, "
            f"{usage.restored_ssd_tokens} SSD, {usage.computed_tokens} computed{again}",
            style="dim",
        )
    )


def _print_session(session: pb.Session, storage: pb.Storage | None = None) -> None:
    table = Table(show_header=False)
    rows: dict[str, Any] = {
        "id": session.session_id,
        "kind": _name(pb.SessionKind, session.kind, "SESSION_KIND_"),
        "state": _name(pb.SessionState, session.state, "SESSION_STATE_"),
        "title": session.title,
        "labels": ", ".join(f"{name}={value}" for name, value in sorted(session.labels.items())),
        "parent": session.parent_id,
        "created": _time(session.create_time),
        "updated": _time(session.update_time),
        "turns": session.num_turns,
        "tokens": session.num_tokens,
        "sealed pages": f"{session.num_sealed_pages} of {session.num_pages}",
    }
    if storage is not None:
        rows |= _audit(storage)
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    Console().print(table)


def _audit(storage: pb.Storage) -> dict[str, str]:
    """Break down what a session takes on SSD; the parts add up to the last line."""
    span_bytes = storage.kv_bytes + storage.other_kv_bytes + storage.index_bytes
    return {
        "pages shared": f"the first {storage.num_shared_pages} with other sessions or documents",
        "KV of its pages": f"{storage.kv_bytes:,} bytes",
        "KV of others' pages beside": f"{storage.other_kv_bytes:,} bytes",
        "index, keys, checksums": f"{storage.index_bytes:,} bytes",
        "= span files": f"{span_bytes:,} bytes in {storage.num_spans} files",
        "token log": f"{storage.log_bytes:,} bytes",
        "= on disk": f"{span_bytes + storage.log_bytes:,} bytes",
    }


def _cells(session: pb.Session) -> list[Text]:
    cells = [
        session.session_id,
        _name(pb.SessionState, session.state, "SESSION_STATE_"),
        session.title,
        session.num_turns,
        session.num_tokens,
        f"{session.num_sealed_pages} of {session.num_pages}",
        _time(session.update_time),
    ]
    # The id must stay whole: it is what the other commands take.
    return [Text(str(cell), no_wrap=number == 0, overflow="fold") for number, cell in enumerate(cells)]


def _name(enum: Any, value: int, prefix: str) -> str:
    return str(enum.Name(value)).removeprefix(prefix).lower()


def _time(stamp: Any) -> str:
    local = datetime.fromtimestamp(stamp.ToMilliseconds() / 1e3, UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S")


def _announce(server: SessionServer) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rebuilt = server.rebuilt
    if rebuilt.indexed or rebuilt.unlisted or rebuilt.deleted:
        console.print(
            f"catalog repaired from the logs: {rebuilt.indexed} indexed, {rebuilt.unlisted} unlisted, "
            f"{rebuilt.deleted} deletions ended"
        )
    for session_id in rebuilt.corrupt:
        console.print(
            Text(f"the token log of {session_id} is damaged; restore it from a backup", style="red")
        )
    metrics = f", metrics on port {server.metrics_port}" if server.metrics_port else ""
    console.print(f"serving sessions on port {server.port}{metrics}; Ctrl-C stops")
