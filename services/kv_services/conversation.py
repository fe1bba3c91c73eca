"""Conversation: what the records of a token log add up to. Pure values, no I/O.

    records   META BASE? (INPUT OUTPUT | INPUT WITHDRAW)* INPUT?      STATE and UPDATE anywhere between
    tokens    base | turn 0 prompt | turn 0 answer | turn 1 prompt | ...

A turn without OUTPUT is open: the service stopped, the engine failed, or the client left before it saw a token. The
same request_id continues it; any other turn withdraws it first. A cancelled turn is a finished turn: its answer is
the tokens that were delivered.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_services.errors import LogCorrupt
from kv_services.token_log import Record, RecordType


class Finish(enum.StrEnum):
    """Why a turn's answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class State(enum.StrEnum):
    """What a session accepts."""

    ACTIVE = "active"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    CLOSED = "closed"


class Kind(enum.StrEnum):
    """A session takes turns, a document is only forked."""

    SESSION = "session"
    DOCUMENT = "document"


@dataclass(frozen=True)
class Usage:
    """What a turn cost; the fields of the message of the same name."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    restored_device_tokens: int = 0
    restored_dram_tokens: int = 0
    restored_ssd_tokens: int = 0
    computed_tokens: int = 0
    read_bytes: int = 0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    retries: int = 0
    recomputed_tokens: int = 0
    restore_estimate_ms: float | None = None
    recompute_estimate_ms: float | None = None


@dataclass
class Turn:
    """One prompt and its answer; open while `finish` is None.

    Args:
        request_id: of the Generate call; empty in forks, so that a fork repeats no call of its parent.
        digest: sha256 (hex) of the request's content.
        mode: "text", "chat" or "tokens": how the prompt came.
    """

    number: int
    request_id: str
    digest: str
    mode: str
    prompt: array[int]
    answer: array[int] = field(default_factory=lambda: array("I"))
    text: str = ""
    finish: Finish | None = None
    usage: Usage = Usage()


@dataclass
class Conversation:
    """A session as its log tells it.

    Args:
        salt_id: names the salt of its page keys; empty in logs of versions that did not write it.
        log_bytes: bytes of the intact log; where the next record goes.
        page_size: positions per page of the engine that served last; 0 before any did.
    """

    session_id: str
    tenant: str
    kind: Kind
    parent_id: str
    request_id: str
    digest: str
    created_ms: int
    updated_ms: int
    title: str
    labels: dict[str, str]
    salt_id: str = ""
    log_bytes: int = 0
    page_size: int = 0
    state: State = State.ACTIVE
    base: array[int] = field(default_factory=lambda: array("I"))
    turns: list[Turn] = field(default_factory=list)

    @property
    def open_turn(self) -> Turn | None:
        """The last turn, if it has no answer yet."""
        return self.turns[-1] if self.turns and self.turns[-1].finish is None else None

    @property
    def finished_turns(self) -> list[Turn]:
        """Turns that have an answer."""
        return [turn for turn in self.turns if turn.finish is not None]

    @property
    def tokens(self) -> array[int]:
        """All tokens of the base and of finished turns, in order."""
        return tokens_of(self.base, self.finished_turns)

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV an engine has computed: all but a last generated one."""
        finished = self.finished_turns
        return len(self.tokens) - (1 if finished and finished[-1].answer else 0)

    @property
    def num_pages(self) -> int:
        """Full pages among the computed tokens; 0 while the page size is unknown."""
        return self.num_computed_tokens // self.page_size if self.page_size else 0


def tokens_of(base: array[int], turns: Iterable[Turn]) -> array[int]:
    """Concatenate a base with prompts and answers."""
    tokens = array("I", base)
    for turn in turns:
        tokens.extend(turn.prompt)
        tokens.extend(turn.answer)
    return tokens


def fold(records: Iterable[Record], log_bytes: int) -> Conversation:
    """Add up the records of a log.

    Args:
        records: META first, as `token_log.load` returns them.
        log_bytes: bytes of the intact log.
    """
    first, *rest = records
    assert first.type is RecordType.META, first.type
    conversation = _from_meta(first.head)
    conversation.log_bytes = log_bytes
    for record in rest:
        apply(conversation, record)
    return conversation


def of_log(records: Sequence[Record], log_bytes: int, path: Path) -> Conversation:
    """Fold the log in a file, whose records are intact; records that contradict each other are damage.

    Raises:
        LogCorrupt: they do.
    """
    try:
        return fold(records, log_bytes)
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise LogCorrupt(
            f"{path}: its records contradict each other ({error}); restore it from a backup"
        ) from error


def apply(conversation: Conversation, record: Record) -> None:
    """Add one record to a conversation, in place."""
    head = record.head
    conversation.updated_ms = max(conversation.updated_ms, int(head.get("ms", 0)))
    conversation.page_size = int(head.get("page_size", conversation.page_size))
    match record.type:
        case RecordType.BASE:
            conversation.base = array("I", record.tokens)
        case RecordType.INPUT:
            assert conversation.open_turn is None, (
                f"{conversation.session_id}: turn {head['turn']} on an open turn"
            )
            conversation.turns.append(
                Turn(
                    int(head["turn"]),
                    head["request_id"],
                    head["digest"],
                    head["mode"],
                    array("I", record.tokens),
                )
            )
        case RecordType.OUTPUT:
            turn = conversation.open_turn
            assert turn is not None, f"{conversation.session_id}: an answer without a prompt"
            turn.answer, turn.text = array("I", record.tokens), head["text"]
            turn.finish, turn.usage = Finish(head["finish"]), Usage(**head["usage"])
        case RecordType.WITHDRAW:
            assert conversation.open_turn is not None, f"{conversation.session_id}: nothing to withdraw"
            conversation.turns.pop()
        case RecordType.STATE:
            conversation.state = State(head["state"])
        case RecordType.UPDATE:
            conversation.title, conversation.labels = head["title"], head["labels"]
        case RecordType.META:
            raise AssertionError(f"{conversation.session_id}: a second META record")


def fork_records(source: Conversation, meta: Record, num_turns: int | None) -> list[Record]:
    """List the records of a log that continues `source` after its first `num_turns` finished turns (None: all)."""
    records = [meta]
    if source.base:
        records.append(Record(RecordType.BASE, {"page_size": source.page_size}, source.base))
    for turn in source.finished_turns[:num_turns]:
        records.append(input_record(turn.number, "", "", turn.mode, turn.prompt, source.created_ms))
        records.append(output_record(turn, source.page_size, source.created_ms))
    return records


def meta_record(
    session_id: str,
    tenant: str,
    kind: Kind,
    parent_id: str,
    request_id: str,
    digest: str,
    created_ms: int,
    title: str,
    labels: dict[str, str],
    salt_id: str = "",
) -> Record:
    """Make the first record of a log."""
    return Record(
        RecordType.META,
        {
            "session_id": session_id,
            "tenant": tenant,
            "kind": kind,
            "parent_id": parent_id,
            "request_id": request_id,
            "digest": digest,
            "created_ms": created_ms,
            "title": title,
            "labels": labels,
            "salt_id": salt_id,
        },
    )


def input_record(turn: int, request_id: str, digest: str, mode: str, prompt: array[int], ms: int) -> Record:
    """Make the record that opens a turn."""
    head = {"turn": turn, "request_id": request_id, "digest": digest, "mode": mode, "ms": ms}
    return Record(RecordType.INPUT, head, prompt)


def output_record(turn: Turn, page_size: int, ms: int) -> Record:
    """Make the record that ends `turn`, whose answer, text, finish and usage are set."""
    assert turn.finish is not None
    head = {
        "turn": turn.number,
        "finish": turn.finish,
        "text": turn.text,
        "usage": vars(turn.usage),
        "page_size": page_size,
        "ms": ms,
    }
    return Record(RecordType.OUTPUT, head, turn.answer)


def _from_meta(head: dict[str, Any]) -> Conversation:
    return Conversation(
        session_id=head["session_id"],
        tenant=head["tenant"],
        kind=Kind(head["kind"]),
        parent_id=head["parent_id"],
        request_id=head["request_id"],
        digest=head["digest"],
        created_ms=head["created_ms"],
        updated_ms=head["created_ms"],
        title=head["title"],
        labels=head["labels"],
        salt_id=head.get("salt_id", ""),
    )
