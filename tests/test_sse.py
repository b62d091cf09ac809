"""The event-stream parser: WHATWG rules, whatever the network makes of the bytes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sse import Event, SseLineTooLong, SseParser


def parse(*reads: bytes) -> list[Event]:
    parser = SseParser()
    return [event for read in reads for event in parser.feed(read)]


def data(*reads: bytes) -> list[bytes]:
    return [event.data for event in parse(*reads)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\r\n\r\n", [b"a"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\n", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\ndata\ndata: b\n\n", [b"a\n\nb"]),
        (b": ping\n\n:\n\n", []),
        (b":ping\ndata: a\n\n", [b"a"]),
        (b"id: 7\nretry: 100\ndata: a\n\n", [b"a"]),
        (b"data: \n\ndata\n\n", []),
        (b"dataset: a\n\n", []),
        (b" data: a\n\n", []),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
        (b"data: {}\n\ndata: [DONE]\n\n", [b"{}", b"[DONE]"]),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
    ],
)
def test_fields_and_line_ends(stream, events):
    assert data(stream) == events


def test_name_holds_for_one_event():
    assert parse(b"event: error\ndata: x\n\ndata: y\n\n") == [Event("error", b"x"), Event("", b"y")]


def test_event_without_data_takes_its_name_along():
    assert parse(b"event: ping\ndata: \n\ndata: y\n\n") == [Event("", b"y")]


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_cr_and_lf_end_a_line(odd):
    text = json.dumps({"text": f"a{odd}b"}, ensure_ascii=False)
    assert data(f"data: {text}\n\n".encode()) == [text.encode()]


def test_crlf_cut_in_its_middle_is_one_line_end():
    assert data(b"data: a\r", b"\n\r", b"\ndata: b\r\n\r\n") == [b"a", b"b"]


def test_blank_line_of_cr_completes_the_event_at_once():
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r") == [Event("", b"a")]
    assert parser.feed(b"\n") == []


def test_mid_event():
    parser = SseParser()
    assert not parser.is_mid_event
    parser.feed(b"data: a\n")
    assert parser.is_mid_event
    parser.feed(b"\n")
    assert not parser.is_mid_event


def test_endless_line_is_refused_without_keeping_it():
    parser = SseParser(max_line_bytes=1000)
    for _ in range(10):
        parser.feed(b"x" * 100)
    with pytest.raises(SseLineTooLong):
        parser.feed(b"x")


def test_endless_event_of_short_lines_is_refused():
    parser = SseParser(max_line_bytes=1000)
    parser.feed(b"data: 12345\n" * 200)
    with pytest.raises(SseLineTooLong):
        parser.feed(b"data: 1\n")


LINES = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data: \xe2\x82\xac",
        b": c",
        b"event: error",
        b"data",
        b"id: 1",
        b"",
        b"",
        b"",
        b"x",
    ]
)
ENDS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.data())
def test_any_cut_gives_the_same_events(lines, draw):
    stream = b"".join(line + end for line, end in lines)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole = parse(stream)
    assert parse(*reads) == whole
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == whole


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_text_survives(texts):
    stream = b"".join(f"data: {json.dumps({'t': t}, ensure_ascii=False)}\n\n".encode() for t in texts)
    assert [json.loads(d)["t"] for d in data(stream)] == texts
