import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_services.errors import InvalidRequest, TokenizerMissing
from kv_services.text import Detokenizer, StopFilter, Tokenizer
from tests.kv_services.fake_engine import IM_END, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("model"))))


@given(words=st.text(max_size=20), cuts=st.lists(st.integers(1, 5), max_size=80))
def test_detokenizer_gives_the_whole_text_in_whole_characters(
    tokenizer: Tokenizer, words: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(words)
    detokenizer, pieces = Detokenizer(tokenizer, [1, 2, 3]), []
    for cut in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(ids[:cut]))
        ids = ids[cut:]
    pieces.append(detokenizer.push(ids, final=True))
    assert "".join(pieces) == words
    assert "\ufffd" in words or not any("\ufffd" in piece for piece in pieces)


def test_detokenizer_gives_up_a_broken_character_at_the_end_only(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("\u6f22")[:2]
    detokenizer = Detokenizer(tokenizer, [])
    assert detokenizer.push(half) == ""
    assert detokenizer.push([], final=True) == "\ufffd"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer, []).push([*tokenizer.encode("ok"), IM_END], final=True) == "ok"


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 3), max_size=40),
)
def test_stop_filter_cuts_at_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    """The first match to be complete decides; what lies before it has been given, whatever the pieces were."""
    stop, out, rest = StopFilter(stops), "", text
    for cut in [*cuts, len(text)]:
        out += stop.push(rest[:cut])
        rest = rest[cut:]
    out += stop.push("", final=True)
    found = [text.find(s) for s in stops if s in text]
    assert stop.stopped == bool(found)
    if found:
        assert (
            text.startswith(out)
            and len(out) >= min(found)
            and any(text[len(out) :].startswith(s) for s in stops)
        )
    else:
        assert out == text


def test_stop_filter_holds_back_no_more_than_it_must() -> None:
    stop = StopFilter(["END"])
    assert [stop.push(piece) for piece in ("a", "E", "N", "x", "EN", "D", "z")] == [
        "a",
        "",
        "",
        "ENx",
        "",
        "",
        "",
    ]


def test_chat_delta_equals_rendering_the_whole(tokenizer: Tokenizer) -> None:
    user, more = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
    whole = tokenizer.chat([user, {"role": "assistant", "content": "said"}, more])
    ids = tokenizer.chat([user])
    for answer in ([*tokenizer.encode("said"), IM_END], tokenizer.encode("said")):
        history = [*ids, *answer]
        assert history + tokenizer.chat_delta([more], history[-4:]) == whole


def test_template_errors_are_the_clients(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no tools here"):
        tokenizer.chat([{"role": "tool", "content": ""}])
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.chat_delta([{"role": "user", "content": "a"}, {"role": "tool", "content": ""}], [])
    assert caught.value.metadata["roles"] == "user,assistant,user,tool"


def test_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    (path / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="rewrites earlier messages"):
        Tokenizer(str(path)).chat_delta([{"role": "user", "content": "a"}], [])


def test_template_may_be_in_the_tokenizer_config(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    expected = Tokenizer(str(write_tokenizer(tmp_path / "other"))).chat([{"role": "user", "content": "q"}])
    for form in (template, [{"name": "default", "template": template}]):
        (path / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": form})
        )
        assert Tokenizer(str(path / "tokenizer.json")).chat([{"role": "user", "content": "q"}]) == expected


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        Tokenizer(str(tmp_path))
    path = write_tokenizer(tmp_path)
    (path / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerMissing, match="no chat template"):
        Tokenizer(str(path)).chat([{"role": "user", "content": "q"}])
    (path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerMissing, match="does not parse"):
        Tokenizer(str(path))
