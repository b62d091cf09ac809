"""What a streamed answer amounts to: token times, counts, classes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stream import StreamOutcome, read_stream

Timed = tuple[float, dict[str, object] | bytes]


def sse(*events: Timed) -> list[tuple[float, bytes]]:
    return [
        (t, body if isinstance(body, bytes) else b"data: " + json.dumps(body).encode() + b"\n\n")
        for t, body in events
    ]


def run(*events: Timed, done: bool = True, **options) -> StreamOutcome:
    reads = sse(*events)
    if done:
        reads.append((events[-1][0] + 0.001, b"data: [DONE]\n\n"))
    return read_stream(reads, **options)


def usage(n: int, prompt: int = 7, **more) -> dict[str, object]:
    return {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n, **more}


def text(t: float, said: str, finish: str | None = None, count: int | None = None) -> Timed:
    event = {"model": "m", "choices": [{"index": 0, "text": said, "finish_reason": finish}]}
    return (t, event if count is None else {**event, "usage": usage(count)})


def delta(t: float, finish: str | None = None, count: int | None = None, **said) -> Timed:
    event = {"model": "m", "choices": [{"index": 0, "delta": said, "finish_reason": finish}]}
    return (t, event if count is None else {**event, "usage": usage(count)})


def last_usage(t: float, n: int, **more) -> Timed:
    return (t, {"choices": [], "usage": usage(n, **more)})


def approx(*values: float):
    return pytest.approx(values, abs=1e-9)


# When the first token came


def test_role_chunk_opens_the_stream_but_is_no_token():
    got = run(
        delta(0.5, role="assistant", content=""),
        delta(1.5, content="a"),
        delta(1.75, content="b"),
        delta(2.0, content="c"),
        delta(2.1, "length"),
        last_usage(2.1, 3, prompt=900),
    )
    assert (got.status, got.stream_open, got.first_token, got.last_token) == ("ok", 0.5, 1.5, 2.0)
    assert (got.output_tokens, got.prompt_tokens) == (3, 900)
    assert got.chunk_gaps == approx(0.25, 0.25)
    assert got.tpot == pytest.approx(0.25)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_counts_and_the_answer_has_its_own_time(key):
    got = run(
        delta(0.1, role="assistant", content=""),
        delta(1.0, **{key: "hm"}),
        delta(1.5, **{key: "ok", "content": None}),
        delta(2.0, content="4"),
        delta(2.5, "stop", content="."),
        last_usage(2.6, 4, completion_tokens_details={"reasoning_tokens": 2}),
    )
    assert (got.first_token, got.first_answer, got.last_token) == (1.0, 2.0, 2.5)
    assert (got.output_tokens, got.reasoning_tokens) == (4, 2)
    assert got.tpot == pytest.approx(0.5)


def test_a_tool_call_is_a_token():
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    got = run(delta(1.0, tool_calls=[call]), delta(2.0, "tool_calls", tool_calls=[call]))
    assert (got.status, got.first_token, got.first_answer, got.last_token) == ("ok", 1.0, 1.0, 2.0)


def test_pings_are_no_tokens():
    got = run(
        (5.0, b": ping\n\n"),
        (6.0, b":\n\n"),
        (7.0, b"event: ping\ndata: \n\n"),
        text(8.0, "a"),
        text(8.5, "b", "stop"),
    )
    assert (got.status, got.stream_open, got.first_token, got.output_tokens) == ("ok", 8.0, 8.0, 2)
    assert got.token_source == "chunks"


def test_a_token_without_text_is_seen_by_its_running_count():
    got = run(text(1.0, "", count=1), text(2.0, "a", count=2), text(3.0, "", "stop", count=3))
    assert (got.first_token, got.last_token, got.output_tokens) == (1.0, 3.0, 3)
    assert got.itls == approx(1.0, 1.0)
    assert got.first_answer == 2.0


def test_an_output_of_invisible_tokens_is_not_empty():
    got = run(text(1.0, "", "length"), last_usage(1.1, 1))
    assert (got.status, got.first_token, got.output_tokens) == ("ok", 1.0, 1)
    assert "invisible_tokens" in got.warnings


def test_text_that_comes_late_without_a_token_is_none():
    got = run(text(1.0, "a", count=1), text(2.0, "b", count=2), text(9.0, "!", "stop", count=2))
    assert got.last_token == 2.0
    assert got.itls == approx(1.0)


# ITL, chunk gaps, TPOT


def test_itl_leaves_the_wait_for_the_first_token_out():
    got = run(text(0.9, "a"), text(1.0, "b"), text(1.2, "c", "length"), last_usage(1.2, 3))
    assert got.itl_source == "one_token_per_chunk"
    assert got.itls == approx(0.1, 0.2)
    assert sum(got.itls) == pytest.approx(got.last_token - got.first_token)


def test_tokens_that_come_together_have_no_time_between_them():
    got = run(
        text(1.0, "abc", count=3),
        text(1.5, "de", count=5),
        text(1.6, "f", "length", count=6),
        last_usage(1.6, 6),
    )
    assert got.itl_source == "usage_deltas"
    assert got.token_counts == (3, 2, 1)
    assert got.itls == approx(0.0, 0.0, 0.5, 0.0, 0.1)
    assert len(got.itls) == got.output_tokens - 1
    assert got.warnings == ("first_chunk_tokens>1",)
    assert got.tpot == pytest.approx(0.6 / 5)


def test_without_running_counts_gaps_of_bundles_are_only_chunk_gaps():
    got = run(text(1.0, "ab"), text(1.5, "cd", "length"), last_usage(1.5, 4))
    assert (got.itl_source, got.itls) == (None, ())
    assert got.chunk_gaps == approx(0.5)
    assert got.output_tokens == 4
    assert got.tpot == pytest.approx(0.5 / 3)


def test_server_count_wins_over_everything_visible():
    got = run(text(0.1, " " * 90), text(1.1, " ", "length"), last_usage(1.1, 101))
    assert (got.output_tokens, got.token_source) == (101, "server_usage")
    assert got.tpot == pytest.approx(0.01)


def test_one_token_has_no_tpot():
    got = run(text(1.0, "a", "length", count=1), last_usage(1.0, 1))
    assert (got.tpot, got.itls, got.status) == (None, (), "ok")


def test_slow_but_healthy_is_ok():
    got = run(text(30.0, "a"), text(90.0, "b", "stop"))
    assert (got.status, got.first_token, got.tpot) == ("ok", 30.0, 60.0)


# How it ended


def test_finish_reason_is_enough():
    got = run(text(1.0, "a"), text(1.1, "b", "stop"), last_usage(1.1, 2), done=False)
    assert (got.status, got.output_tokens, got.warnings) == ("ok", 2, ("missing_done",))


def test_done_is_enough():
    got = run(text(1.0, "a"), text(1.1, "b"))
    assert (got.status, got.finish_reason) == ("ok", None)


@pytest.mark.parametrize("end", ["eof", "reset"])
def test_neither_is_truncated(end):
    got = run(text(1.0, "a"), text(1.1, "b"), done=False, end=end)
    assert (got.status, got.output_tokens, got.first_token) == ("truncated", 2, 1.0)


def test_timeout_before_the_end_keeps_what_came():
    got = run(text(1.0, "a"), done=False, end="timeout")
    assert (got.status, got.output_tokens) == ("timeout", 1)


def test_nothing_but_an_end_is_empty():
    got = run(text(1.0, "", "stop"), last_usage(1.0, 0))
    assert (got.status, got.first_token, got.tpot) == ("empty", None, None)


def test_no_bytes_at_all_are_truncated():
    assert read_stream([]).status == "truncated"


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"error": {"message": "engine dead", "code": 500}}, "engine dead", 500),
        ({"error": {"message": "who knows", "code": "bad"}}, "who knows", None),
        ({"error": "prompt too long"}, "prompt too long", None),
        ({"object": "error", "message": "old style", "code": 400}, "old style", 400),
        (b'event: error\ndata: {"message": "by name"}\n\n', "by name", None),
        (b"event: error\ndata: plain words\n\n", "plain words", None),
        (b"data: {broken\n\n", "not JSON", None),
        (b"data: 5\n\n", "not a JSON object", None),
        (b'data: {"choices": [{"text": "\xe2\x82"}]}\n\n', "not JSON", None),
    ],
)
def test_errors_inside_a_200(body, message, code):
    got = run(text(1.0, "a"), text(1.1, "b"), (1.2, body))
    assert (got.status, got.error_code, got.output_tokens) == ("server_error", code, 2)
    assert message in got.detail
    before = run((1.2, body))
    assert (before.status, before.first_token, before.output_tokens) == ("server_error", None, 0)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_finish_reasons_that_are_failures(reason):
    assert run(text(1.0, "a"), text(1.1, "", reason)).status == "server_error"


def test_an_error_after_the_finish_is_still_an_error():
    assert run(text(1.0, "a", "stop"), (1.1, {"error": "late"})).status == "server_error"


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": "hello"}]},
        {"choices": ["hello"]},
        {"choices": {"0": {"text": "a"}}},
        {"choices": 3},
        {"choices": [{"text": "a", "token_ids": 7}]},
        {"meta_info": None, "text": "a"},
        {"meta_info": [1], "text": "a"},
    ],
)
def test_an_event_of_an_unknown_shape_fails_its_request(event):
    got = run(text(1.0, "a"), (2.0, event), text(3.0, "b", "stop"))
    assert got.status == "server_error"
    assert "an event of an unknown shape" in got.detail
    assert got.first_token == 1.0


def test_an_event_nested_too_deeply_fails_its_request():
    got = run((1.0, b"data: " + b"[" * 100_000 + b"\n\n"))
    assert (got.status, "not JSON" in got.detail) == ("server_error", True)


def test_a_null_error_is_none():
    event = {"error": None, "choices": [{"text": "a", "finish_reason": "stop"}]}
    assert run((1.0, event)).status == "ok"


def test_unknown_events_are_ignored():
    got = run((0.5, b'event: metadata\ndata: {"region": "x"}\n\n'), text(1.0, "a", "stop"))
    assert (got.status, got.stream_open) == ("ok", 1.0)


def test_line_above_the_limit_is_an_error():
    reads = [(float(i), b"x" * (1 << 20)) for i in range(10)]
    assert read_stream(reads).status == "server_error"


# Prefix cache, SGLang


def test_cached_prompt_tokens():
    got = run(text(1.0, "a", "length"), last_usage(1.0, 1, prompt_tokens_details={"cached_tokens": 64}))
    assert got.cached_tokens == 64
    assert run(text(1.0, "a", "length"), last_usage(1.0, 1)).cached_tokens is None


def native(t: float, said: str, count: int, finish: dict[str, object] | None = None, **more) -> Timed:
    meta = {"prompt_tokens": 12, "completion_tokens": count, "cached_tokens": 4, "finish_reason": finish}
    return (t, {"text": said, "meta_info": meta, **more})


def test_native_generate():
    got = run(
        native(1.0, "a", 1),
        native(1.2, "abc", 3),
        native(1.3, "abcd", 4, {"type": "length", "length": 4}),
        keep_text=True,
    )
    assert (got.status, got.finish_reason, got.text) == ("ok", "length", "abcd")
    assert (got.prompt_tokens, got.cached_tokens, got.output_tokens) == (12, 4, 4)
    assert got.itls == approx(0.2, 0.0, 0.1)


def test_native_generate_in_increments():
    got = run(native(1.0, "a", 1), native(1.2, "b", 2, {"type": "stop"}), keep_text=True)
    assert got.text == "ab"


def test_native_generate_gives_its_token_ids():
    got = run(
        native(1.0, "a", 2, output_ids=[5, 6]), native(1.2, "ab", 3, {"type": "stop"}, output_ids=[5, 6, 7])
    )
    assert got.token_ids == (5, 6, 7)


def test_native_abort():
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    got = run(native(1.0, "", 0, reason))
    assert (got.status, got.error_code, got.detail) == ("server_error", 400, "too long")


def test_completion_token_ids():
    event = {"choices": [{"text": "a", "token_ids": [3, 4], "finish_reason": "length"}]}
    assert run((1.0, event)).token_ids == (3, 4)


# Bytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_outcome_does_not_depend_on_the_cuts(draw):
    stream = b"".join(
        body
        for _, body in sse(
            delta(0, role="assistant", content=""),
            delta(0, content=" two\u2028 words\n€"),
            (0, b": ping\r\n\r\n"),
            delta(0, "stop", content="end"),
            last_usage(0, 9),
            (0, b"data: [DONE]\n\n"),
        )
    )
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reads = [(1.0, stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read_stream(reads, keep_text=True) == read_stream([(1.0, stream)], keep_text=True)
    assert read_stream(reads, keep_text=True).text == " two\u2028 words\n€end"


def test_an_event_has_the_time_of_its_blank_line():
    whole = b'data: {"choices": [{"text": " x", "finish_reason": "stop"}]}\n\n'
    got = read_stream([(1.0, whole[:7]), (2.0, whole[7:-1]), (3.0, whole[-1:] + whole)])
    assert got.token_times == (3.0, 3.0)
