"""The parts of `kvdrive demo` that need no engine: text, verdict, signals, cleaning up."""

import os
import signal
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kv_services import token_log
from kv_services.conversation import Finish, Kind, Turn, Usage, input_record, meta_record, output_record
from kv_services.token_log import Record, RecordType
from kv_tier.meta.errors import ConfigError
from kvdrive_sglang import demo_text
from kvdrive_sglang.cli.demo import (
    DemoFailed,
    Row,
    Screen,
    Signals,
    Stack,
    costs,
    directory,
    drop_page_cache,
    last_prompt,
    verdict,
)


@dataclass
class Encoded:
    ids: list[int]
    offsets: list[tuple[int, int]]


class Letters:
    """A tokenizer of four letters per token."""

    def encode(self, text: str, add_special_tokens: bool) -> Encoded:
        assert not add_special_tokens
        begins = range(0, len(text), 4)
        return Encoded(list(begins), [(begin, min(begin + 4, len(text))) for begin in begins])


def test_text_has_as_many_tokens_as_asked_for() -> None:
    text = demo_text.demo_text(Letters(), 2000)
    assert text.num_tokens == 2000 and len(text.text) == 8000
    assert text.names[0] == "KVDrive" and "Apache License" in text.text


def test_text_without_debian_licences(tmp_path: Path) -> None:
    text = demo_text.demo_text(Letters(), 7000, debian=tmp_path / "missing")
    assert text.num_tokens == 7000 and len(set(text.names)) > 1


def test_a_licence_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, letter in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(letter * 3000)
    (tmp_path / "short").write_text("z")
    files = [(name, tmp_path / name) for name in ("a", "b", "missing", "short", "c")]
    monkeypatch.setattr(demo_text, "licences", lambda debian: files)
    text = demo_text.demo_text(Letters(), 1400)
    assert text.names == ["a", "c"] and text.text.startswith("x" * 3000 + "\n\n" + "y")
    with pytest.raises(ConfigError, match=r"a, c.*9000"):
        demo_text.demo_text(Letters(), 9000)


def rows_with(computed: int) -> list[Row]:
    usage = {"prompt_tokens": 7100, "restored_ssd_tokens": 7100 - computed, "read_bytes": 1 << 20}
    resumed = Usage(computed_tokens=computed, ttft_ms=500, **usage)
    return [Row("resumed turn", resumed), Row("re-prefill", Usage(7100, computed_tokens=7100, ttft_ms=9000))]


def test_a_resumed_turn_that_computes_little_passes() -> None:
    assert "18 times as long" in verdict(rows_with(computed=30)).plain


def test_a_resumed_turn_that_computes_most_again_fails() -> None:
    with pytest.raises(DemoFailed, match="3551 of 7100"):
        verdict(rows_with(computed=3551))


def test_table_shows_where_tokens_came_from() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(costs(rows_with(computed=30)))
    assert "…" not in captured.get() and "re-prefill" in captured.get()
    assert "7,070" in captured.get() and "0.50 s" in captured.get() and "1.0 MiB" in captured.get()


def test_prompt_of_the_last_turn_comes_from_the_log(tmp_path: Path) -> None:
    def turn(number: int, prompt: Sequence[int], answer: Sequence[int]) -> list[Record]:
        played = Turn(number, "", "", "chat", array("I", prompt), array("I", answer), "", Finish.STOP)
        return [input_record(number, "", "", "chat", played.prompt, 1), output_record(played, 8, 2)]

    meta = meta_record("s_x", "t", Kind.SESSION, "", "", "", 0, "", {})
    base = Record(RecordType.BASE, {"page_size": 8}, array("I", [1, 2]))
    (tmp_path / "sessions").mkdir()
    token_log.create(
        tmp_path / "sessions" / "s_x.log", [meta, base, *turn(0, [3], [4, 5]), *turn(1, [6], [7])]
    )
    assert last_prompt(tmp_path, "s_x") == [1, 2, 3, 4, 5, 6]


def test_dropping_the_page_cache_leaves_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.span").write_bytes(b"kept")
    drop_page_cache(tmp_path)
    assert (tmp_path / "a.span").read_bytes() == b"kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_but_waits_for_a_start(number: signal.Signals) -> None:
    signals, reached = Signals(), []

    def start() -> None:
        with signals.hold():
            os.kill(os.getpid(), number)
            reached.append("the end of the block")

    before = signal.getsignal(number)
    with signals.installed():
        with pytest.raises(KeyboardInterrupt):
            start()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert reached == ["the end of the block"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("keep", [False, True])
def test_the_directory_goes_unless_kept(keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    console = Console(width=200)
    roots = []

    def interrupted() -> None:
        with directory(keep, Screen(console, 8)) as root:
            roots.append(root)
            (root / "data").mkdir()
            raise KeyboardInterrupt

    with console.capture() as captured, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == (roots if keep else [])
    assert (str(roots[0]) in captured.get()) is keep


def test_a_service_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    with (
        pytest.raises(DemoFailed, match=r"Not a directory|not a directory|File exists"),
        Stack(tmp_path, Signals()) as stack,
    ):
        stack.start_service()
    assert stack.service is not None and stack.service.returncode == 1


@pytest.mark.redis
def test_the_stack_ends_what_it_started(tmp_path: Path) -> None:
    with Stack(tmp_path, Signals()) as stack:
        stack.start_service()
        assert stack.service is not None and stack.service_port > 0
        valkey = int((tmp_path / "data" / "catalog" / "valkey.pid").read_text())
        with stack.client() as client:
            assert list(client.list()) == []
    assert stack.service.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(valkey, 0)


def test_an_answer_streams_and_its_cost_is_kept() -> None:
    class Scripted:
        usage = Usage(prompt_tokens=5)

        def __enter__(self) -> "Scripted":
            return self

        def __exit__(self, *error: object) -> None:
            return

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter([SimpleNamespace(text="one [b] "), SimpleNamespace(text="two")])

    console = Console(width=80)
    with console.capture() as captured:
        row = Screen(console, 8).ask("turn", "why?", lambda asked: Scripted())  # type: ignore[arg-type,return-value]
    assert row == Row("turn", Scripted.usage)
    assert "turn: why?" in captured.get() and "one [b] two" in captured.get()
