from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kv_services import conversation
from kv_services.conversation import Conversation, Finish, Kind, State, Turn, Usage
from kv_services.token_log import Record, RecordType

TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)


def meta(session_id: str = "s") -> Record:
    return conversation.meta_record(session_id, "t", Kind.SESSION, "", "", "", 1, "", {})


def output(turn: Turn, answer: list[int], finish: Finish) -> Record:
    ended = Turn(turn.number, "", "", turn.mode, turn.prompt, array("I", answer), "", finish, Usage())
    return conversation.output_record(ended, 4, 3)


@given(
    base=st.lists(st.integers(0, 9), max_size=4),
    steps=st.lists(st.tuples(st.sampled_from(["end", "withdraw", "cancel"]), TOKENS, TOKENS)),
)
def test_tokens_are_what_was_not_withdrawn(
    base: list[int], steps: list[tuple[str, list[int], list[int]]]
) -> None:
    records = [meta()] + ([Record(RecordType.BASE, {"page_size": 4}, base)] if base else [])
    model, number = list(base), 0
    for how, prompt, answer in steps:
        opened = conversation.input_record(number, f"r{len(records)}", "d", "tokens", array("I", prompt), 2)
        records.append(opened)
        found = conversation.fold(records, 0)
        assert found.open_turn is not None and list(found.tokens) == model
        if how == "withdraw":
            records.append(Record(RecordType.WITHDRAW, {"turn": number}))
        else:
            finish = Finish.STOP if how == "end" else Finish.CANCELLED
            records.append(output(found.open_turn, answer, finish))
            model += [*prompt, *answer]
            number += 1
    found = conversation.fold(records, 0)
    assert list(found.tokens) == model
    assert found.open_turn is None and len(found.finished_turns) == number
    assert found.num_computed_tokens == len(model) - (number > 0)
    check_forks(found, model)


def check_forks(found: Conversation, model: list[int]) -> None:
    for keep in range(len(found.finished_turns) + 1):
        fork = conversation.fold(conversation.fork_records(found, meta("f"), keep), 0)
        assert list(fork.tokens) == model[: len(fork.tokens)]
        assert len(fork.finished_turns) == keep
        assert all(turn.request_id == "" for turn in fork.turns)
    whole = conversation.fold(conversation.fork_records(found, meta("f"), None), 0)
    assert list(whole.tokens) == model
    assert whole.num_pages == found.num_pages


def test_state_title_and_times() -> None:
    records: list[Any] = [
        meta(),
        Record(RecordType.STATE, {"state": State.SUSPENDED, "ms": 9}),
        Record(RecordType.UPDATE, {"title": "x", "labels": {"a": "b"}, "ms": 5}),
    ]
    found = conversation.fold(records, 77)
    assert (found.state, found.title, found.labels) == (State.SUSPENDED, "x", {"a": "b"})
    assert (found.created_ms, found.updated_ms, found.log_bytes, found.num_pages) == (1, 9, 77, 0)


def test_document_has_all_its_pages_computed() -> None:
    found = conversation.fold([meta(), Record(RecordType.BASE, {"page_size": 4}, [1] * 8)], 0)
    assert (found.num_computed_tokens, found.num_pages) == (8, 2)
