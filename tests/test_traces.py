import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.workload.generate import generate, generate_load
from sim.workload.spec import FileDataset, WorkloadSpec


def load(kind, path, n=1000, output_len=None, **more):
    more.setdefault("use_trace_arrivals", True)
    return generate_load(
        WorkloadSpec(dataset=FileDataset(kind, str(path), output_len), num_prompts=n, **more)
    )


def put(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_text(text)
    return path


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:47.2224720,879,55
"""


def test_azure_times_count_from_the_first_and_rows_come_in_order_of_time(tmp_path):
    requests = load("azure", put(tmp_path, AZURE)).requests
    assert [r.prompt_len for r in requests] == [374, 879, 396]
    assert [r.max_tokens for r in requests] == [44, 55, 109]
    assert [r.arrival for r in requests] == pytest.approx([0.0, 0.541882, 4.314579], abs=1e-9)


def test_azure_2024_stamps_with_a_zone_and_compressed_files_are_read(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
    text += "2024-05-10 00:00:00.017335+00:00,2399,6"
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert load("azure", path).requests[1].arrival == pytest.approx(0.007405)


def test_the_rate_of_a_trace_scales_and_its_arrivals_can_be_left_out(tmp_path):
    path = put(tmp_path, AZURE)
    assert load("azure", path, rate_scale=2.0).requests[-1].arrival == pytest.approx(4.314579 / 2)
    assert [r.arrival for r in load("azure", path, use_trace_arrivals=False).requests] == [0.0] * 3
    assert len(load("azure", path, n=2).requests) == 2
    assert "all are sent" in load("azure", path).notes[0].text


MOONCAKE = """{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]}

{"timestamp": 3500, "input_length": 600, "output_length": 7, "hash_ids": [7]}
"""


def test_mooncake_ids_are_blocks_of_512_shared_tokens(tmp_path):
    first, second, third = load("mooncake", put(tmp_path, MOONCAKE)).requests
    assert first.prompt == ((7, 512), (8, 512), (9, 176))
    assert second.prompt[:2] == first.prompt[:2]
    assert third.prompt == ((7, 512), ("row:2", 88))  # beyond the last id the tokens are its own
    assert [first.arrival, second.arrival, third.arrival] == [0.0, 3.0, 3.5]


def result_file(**change):
    entry = {
        "input_lens": [10, 20, 30],
        "output_lens": [4, 0, 6],
        "start_times": [100.5, 100.7, 101.0],
        "ttfts": [0.1, 0.0, 0.1],
        **change,
    }
    return json.dumps(entry)


def test_a_result_is_replayed_as_it_was_sent_without_its_failures(tmp_path):
    replay = load("vllm-result", put(tmp_path, result_file()))
    assert [(r.prompt_len, r.max_tokens) for r in replay.requests] == [(10, 4), (30, 6)]
    assert [r.arrival for r in replay.requests] == pytest.approx([0.0, 0.5])
    assert "1 of 3 requests failed" in replay.notes[0].text
    forced = load("vllm-result", put(tmp_path, result_file()), output_len=8)
    assert [(r.prompt_len, r.max_tokens) for r in forced.requests] == [(10, 8), (20, 8), (30, 8)]


def test_plain_lengths_carry_prefix_session_and_priority(tmp_path):
    lines = [
        {
            "arrival": 5.0,
            "input_len": 100,
            "output_len": 3,
            "prefix": "sys",
            "prefix_len": 64,
            "session": "u1",
        },
        {"arrival": 4.0, "prompt_len": 64, "output_len": 2, "prefix": "sys", "prefix_len": 64, "priority": 3},
    ]
    requests = load("lengths", put(tmp_path, "\n".join(map(json.dumps, lines)))).requests
    assert requests[0].prompt == (("prefix:sys", 64),)
    assert requests[1].prompt == (("prefix:sys", 64), (0, 36))
    assert (requests[0].priority, requests[1].session, requests[1].arrival) == (3, "u1", 1.0)


def test_lengths_without_arrivals_need_a_rate(tmp_path):
    path = put(tmp_path, '{"input_len": 5, "output_len": 2}\n')
    with pytest.raises(BadInput, match="no arrival times"):
        load("lengths", path)
    assert load("lengths", path, use_trace_arrivals=False, request_rate=2.0).requests[0].arrival == 0.5


def test_early_stops_of_a_trace_happen_only_where_stop_tokens_count(tmp_path):
    path = put(tmp_path, AZURE)
    assert load("azure", path).requests[0].stop_after is None
    assert load("azure", path, ignore_eos=False).requests[0].stop_after == 44


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("azure", "", "is empty"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("azure", "a,b,c\n1,2,3\n", "line 1: lacks the column TIMESTAMP"),
        ("azure", AZURE + "2023-11-16 18:15:5", "line 5: has 1 of 3 columns"),
        ("azure", AZURE + "soon,1,2\n", "line 5 TIMESTAMP: 'soon'"),
        ("azure", AZURE + "2023-11-16 18:15:59,x,2\n", "line 5 ContextTokens: 'x'"),
        ("azure", AZURE + "2023-11-16 18:15:59,1,0\n", "line 5 GeneratedTokens: 0"),
        ("azure", AZURE + "2023-11-16 18:15:59,nan,1\n", "line 5 ContextTokens: nan"),
        ("mooncake", MOONCAKE + '{"timestamp": 9, "input_len', "line 5: the file is truncated"),
        ("mooncake", '{"timestamp": 9}', "line 1: lacks the field input_length"),
        ("mooncake", MOONCAKE.replace("[7, 8, 10]", "[7, 8, 10, 11]"), "line 2 hash_ids"),
        ("mooncake", MOONCAKE.replace("[7]", '"7"'), "line 4 hash_ids"),
        ("mooncake", "[1, 2]", "line 1: must be a JSON object"),
        ("vllm-result", '{"duration": 3.0}', "lacks input_lens; save the result with --save-detailed"),
        ("vllm-result", result_file(start_times=[1.0]), "differ in length"),
        ("vllm-result", result_file()[:-9], "truncated"),
        ("lengths", '{"input_len": 5, "output_len": 2, "ttl": 1}', "unknown field ttl"),
        ("lengths", '{"input_len": 5, "output_len": 2, "prefix": "a"}', "go together"),
        ("lengths", '{"input_len": 5, "output_len": 2, "prefix": "a", "prefix_len": 6}', "prefix_len: 6"),
        (
            "lengths",
            '{"arrival": 1, "input_len": 5, "output_len": 2}\n{"input_len": 5, "output_len": 2}',
            "on all",
        ),
        ("lengths", '{"arrival": 1e999, "input_len": 5, "output_len": 2}', "arrival: inf"),
        ("azure", AZURE + "2023-11-16 18:15:59,1e20,1\n", "line 5 ContextTokens.*too large"),
        ("azure", AZURE + '2023-11-16 18:15:59,"' + "x" * 140_000 + '",1\n', "line 5: is not CSV"),
        ("lengths", '{"input_len": true, "output_len": 2}', "input_len: must be a number"),
    ],
)
def test_broken_traces_name_file_and_line(tmp_path, kind, text, message):
    path = put(tmp_path, text, "broken.trace")
    with pytest.raises(BadInput, match=message) as caught:
        load(kind, path)
    assert "broken.trace" in str(caught.value)


def test_line_ends_of_text_within_a_line_of_json_are_none(tmp_path):
    path = put(tmp_path, '{"input_len": 5, "output_len": 2, "session": "a\u2028b\x85c"}\r\n', "u.jsonl")
    (request,) = load("lengths", path, use_trace_arrivals=False).requests
    assert request.session == "a\u2028b\x85c"


def test_missing_truncated_and_binary_files_are_refused(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        load("azure", tmp_path / "none.csv")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(AZURE.encode() * 50)[:-20])
    with pytest.raises(BadInput, match="truncated"):
        load("azure", cut)
    data = bytearray(gzip.compress(AZURE.encode() * 50, mtime=0))
    data[12:40] = b"\xff" * 28
    cut.write_bytes(bytes(data))
    with pytest.raises(BadInput, match="damaged"):
        load("azure", cut)
    noise = tmp_path / "noise"
    noise.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadInput, match="UTF-8"):
        load("azure", noise)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(1, 5000), st.integers(1, 500), st.integers(0, 10)),
        min_size=1,
        max_size=30,
    )
)
def test_any_mooncake_trace_keeps_its_tokens_and_ascends(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("m") / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "timestamp": stamp,
                    "input_length": tokens,
                    "output_length": out,
                    "hash_ids": list(range(first, first + -(-tokens // 512))),
                }
            )
            for stamp, tokens, out, first in rows
        )
    )
    spec = WorkloadSpec(dataset=FileDataset("mooncake", str(path)), num_prompts=99, use_trace_arrivals=True)
    requests = generate(spec)
    assert sorted(r.prompt_len for r in requests) == sorted(row[1] for row in rows)
    arrivals = [r.arrival for r in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert all(0 < n <= 512 for r in requests for _, n in r.prompt)
