import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.figures.lengths import length_drift, output_count
from sim.workload.generate import generate, generate_load, warmups
from sim.workload.sharegpt import estimate_tokens
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec


def lengths(dataset, seed=0, n=6, **more):
    requests = generate(WorkloadSpec(dataset=dataset, num_prompts=n, seed=seed, **more))
    return [(r.prompt_len, r.max_tokens) for r in requests]


# Lengths drawn by vllm.benchmarks.datasets 0.28.0 (200 requests, one-to-one tokenizer).
@pytest.mark.parametrize(
    ("dataset", "seed", "expected"),
    [
        (RandomDataset(100, 37, 0.3), 7, [(127, 35), (108, 49), (111, 27), (124, 41), (105, 43), (117, 35)]),
        (RandomDataset(100, 37, 0.3), 0, [(121, 30), (108, 36), (101, 33), (86, 30), (88, 47), (72, 45)]),
        (
            RandomDataset(100, 37, 0.5, prefix_len=16, output_range_ratio=0.1, num_special_tokens=2),
            7,
            [(160, 36), (128, 41), (134, 33), (155, 38), (124, 39), (143, 36)],  # two special tokens included
        ),
    ],
)
def test_random_lengths_are_those_of_the_real_client(dataset, seed, expected):
    assert lengths(dataset, seed, n=200)[:6] == expected


# Lengths drawn by sglang.benchmark.datasets 0.5.21, random-ids.
@pytest.mark.parametrize(
    ("dataset", "seed", "n", "expected"),
    [
        (RandomDataset(100, 30, 0.0), 42, 200, [(52, 9), (93, 30), (15, 5), (72, 1), (61, 19), (21, 10)]),
        (RandomDataset(64, 16, 0.5), 1, 300, [(44, 16), (40, 13), (41, 8), (43, 13), (37, 16), (47, 14)]),
    ],
)
def test_sglang_lengths_are_those_of_the_real_client(dataset, seed, n, expected):
    dataset = replace(dataset, style="sglang", vocab_size=5000)
    assert lengths(dataset, seed, n, client="sglang")[:6] == expected


def test_prefixes_are_shuffled_as_by_the_real_client_and_the_remainder_is_dropped():
    # Order of the seven prefixes in 33 prompts, seed 7, by vllm.benchmarks.datasets 0.28.0.
    real = [0, 1, 2, 0, 1, 3, 4, 5, 3, 3, 4, 3, 4, 2, 6, 1, 5, 2, 5, 0, 6, 5, 6, 6, 2, 4, 1, 0]
    load = generate_load(WorkloadSpec(dataset=PrefixRepetitionDataset(20, 7, 7, 9), num_prompts=33, seed=7))
    first_seen: dict[object, int] = {}
    assert [first_seen.setdefault(r.prompt[0][0], len(first_seen)) for r in load.requests] == real
    assert {r.prompt_len for r in load.requests} == {27}
    assert len({r.prompt[1][0] for r in load.requests}) == 28
    assert "28 sent" in load.notes[0].text
    unshuffled = PrefixRepetitionDataset(20, 7, 7, 9, shuffle=False)
    keys = [r.prompt[0][0] for r in generate(WorkloadSpec(dataset=unshuffled, num_prompts=28))]
    assert keys == sorted(keys)


def test_a_prefix_group_hits_what_its_first_request_computed():
    # 60 prompts of 2048 + 128 tokens on 10 prefixes: ten compute their prefix, fifty can find it.
    spec = WorkloadSpec(dataset=PrefixRepetitionDataset(2048, 128, 10, 128), num_prompts=60)
    seen: Counter[object] = Counter(r.prompt[0][0] for r in generate(spec))
    assert set(seen.values()) == {6}


def test_random_prompts_share_only_the_prefix_unless_the_vocabulary_is_known():
    requests = generate(WorkloadSpec(dataset=RandomDataset(64, 8, prefix_len=16), num_prompts=300))
    assert {r.prompt[0] for r in requests} == {("prefix", 16)}
    assert len({r.prompt[1][0] for r in requests}) == 300
    # With 100 possible first tokens, 300 prompts must begin alike now and then, and they are the same then.
    tiny = generate(WorkloadSpec(dataset=RandomDataset(64, 8, vocab_size=100), num_prompts=300))
    assert len({r.prompt[0][0] for r in tiny}) < 100


def test_random_data_always_runs_to_full_length_and_other_data_only_on_request():
    full = generate(WorkloadSpec(dataset=RandomDataset(8, 4), num_prompts=1, ignore_eos=False))[0]
    assert full.ignore_eos
    free = generate(
        WorkloadSpec(dataset=PrefixRepetitionDataset(4, 4, 1, 9), num_prompts=1, ignore_eos=False)
    )[0]
    assert free.stop_after == free.max_tokens == 9


@pytest.mark.parametrize(
    ("flag", "dataset"),
    [
        ("--random-input-len", RandomDataset(0, 4)),
        ("--random-input-len", RandomDataset(1, 4, 0.9)),
        ("--random-output-len", RandomDataset(4, 0)),
        ("--random-range-ratio", RandomDataset(4, 4, 1.0)),
        ("--random-range-ratio", RandomDataset(4, 4, float("nan"))),
        ("--random-range-ratio", RandomDataset(4, 4, 0.5, output_range_ratio=-0.1)),
        ("--random-prefix-len", RandomDataset(4, 4, prefix_len=-1)),
        ("--num-prompts", PrefixRepetitionDataset(num_prefixes=50)),
        ("--prefix-repetition-num-prefixes", PrefixRepetitionDataset(num_prefixes=0)),
    ],
)
def test_bad_data_sets_name_their_flag(flag, dataset):
    with pytest.raises(BadInput, match=flag):
        lengths(dataset, n=20)


@settings(max_examples=60, deadline=None)
@given(
    dataset=st.builds(
        RandomDataset,
        input_len=st.integers(2, 500),
        output_len=st.integers(1, 500),
        range_ratio=st.floats(0.0, 0.49),
        prefix_len=st.integers(0, 40),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_lengths_stay_within_their_range(dataset, seed):
    for prompt, output in lengths(dataset, seed, n=40):
        assert (
            abs(prompt - dataset.prefix_len - dataset.input_len)
            <= dataset.input_len * dataset.range_ratio + 1
        )
        assert output >= 1
        assert abs(output - dataset.output_len) <= dataset.output_len * dataset.range_ratio + 1


def test_warmups_repeat_request_zero():
    spec = WorkloadSpec(dataset=RandomDataset(32, 8), num_prompts=4, request_rate=3.0, num_warmups=2)
    requests = generate(spec)
    warm = warmups(spec, requests)
    assert [w.request_id for w in warm] == ["warmup-0", "warmup-1"]
    assert {(w.prompt, w.max_tokens, w.arrival) for w in warm} == {(requests[0].prompt, 8, 0.0)}
    assert warmups(replace(spec, num_warmups=0), requests) == []


def write(tmp_path, value, name="data.json"):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def sharegpt(path, n, **more):
    return generate_load(
        WorkloadSpec(dataset=FileDataset("sharegpt", path, **more), num_prompts=n, request_rate=float("inf"))
    )


def turns(*texts):
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_conversations_give_their_first_two_turns_and_say_that_lengths_are_estimates(tmp_path):
    entries = [turns("a" * 400, "b" * 80, "c" * 999), turns("too few turns"), turns("d" * 40, "e" * 9999)]
    load = sharegpt(write(tmp_path, entries), 1)
    assert [(r.prompt_len, r.max_tokens) for r in load.requests] == [
        (100, 20)
    ]  # the third exceeds 2048 tokens
    assert any(note.kind == "assumed" for note in load.notes)
    fixed = sharegpt(write(tmp_path, entries), 2, output_len=7)
    assert sorted((r.prompt_len, r.max_tokens) for r in fixed.requests) == [(10, 7), (100, 7)]
    assert estimate_tokens("täglich") == 2
    assert estimate_tokens("a\ud83d") == 1  # half an emoji, as JSON may hold it


def test_lengths_files_are_exact_and_too_few_entries_are_repeated(tmp_path):
    lines = "\n".join(json.dumps({"input_len": 3000 + i, "output_len": 5}) for i in range(3))
    load = sharegpt(write(tmp_path, lines, "lens.jsonl"), 7)
    assert len(load.requests) == 7
    assert {r.prompt_len for r in load.requests[:3]} == {3000, 3001, 3002}
    assert "repeated" in load.notes[-1].text
    keys = {r.prompt_len: r.prompt[0][0] for r in load.requests[:3]}
    assert all(keys[r.prompt_len] == r.prompt[0][0] for r in load.requests)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('[{"conversations": [', "truncated"),
        ("[1]", "entry 0.*JSON object"),
        ('[{"conversations": [{"text": "a"}, {"text": "b"}]}]', "value"),
        ('[{"conversations": [{"value": "a"}]}]', "no usable entry"),
        ('[{"conversations": null}]', "entry 0 conversations.*list of turns"),
        ('[{"conversations": []}, {"conversations": [1, 2]}]', "entry 1: conversation turns"),
        ('[{"input_len": 5}]', "lacks the field output_len"),
        ('[{"input_len": 0, "output_len": 4}]', "at least 1"),
        ('[{"input_len": 5, "output_len": 4}, {"conversations": []}]', "mixes"),
    ],
)
def test_bad_sharegpt_files_say_where(tmp_path, content, message):
    with pytest.raises(BadInput, match=message):
        sharegpt(write(tmp_path, content), 2)


def test_sglangs_client_keeps_long_conversations_and_repeats_none(tmp_path):
    entries = [turns("a" * 8, "b" * 8), turns("c" * 20_000, "d" * 4000), turns("e" * 4, "f" * 400)]
    path = write(tmp_path, entries)

    def lengths(**more):
        load = generate_load(
            WorkloadSpec(dataset=FileDataset("sharegpt", path, **more), num_prompts=5, client="sglang")
        )
        return sorted((r.prompt_len, r.max_tokens) for r in load.requests), load.notes

    found, notes = lengths()
    assert found == [(2, 2), (5000, 1000)]  # the last prompt has one token
    assert any("2 usable entries for 5 prompts: all are sent, once" in note.text for note in notes)
    assert lengths(context_len=5999)[0] == [(2, 2)]
    assert lengths(context_len=6000)[0] == found
    with pytest.raises(BadInput, match="at least 2 prompt tokens"):
        lengths(context_len=3)


def test_a_context_limit_cuts_files_of_lengths_too(tmp_path):
    lines = "\n".join(json.dumps({"input_len": n, "output_len": 5}) for n in (10, 100))
    path = write(tmp_path, lines, "lens.jsonl")
    dataset = FileDataset("sharegpt", path, context_len=50)
    load = generate_load(WorkloadSpec(dataset=dataset, num_prompts=2, client="sglang"))
    assert [r.prompt_len for r in load.requests] == [10]


def test_prompt_lengths_that_drift_are_reported_against_their_limits():
    requested = [500] * 10
    drift = length_drift(requested, [500] * 8 + [503, 560])
    assert drift.mean_actual == 506.3
    assert drift.mean_drift_pct == pytest.approx(1.26)
    assert drift.max_drift_pct == pytest.approx(12.0)
    assert len(drift.notes) == 2
    assert length_drift(requested, requested).notes == ()
    assert length_drift([], []) is None
    only_one = length_drift([1000] * 20, [1000] * 19 + [1080])
    assert [note.text for note in only_one.notes] == ["largest drift 8.0 % (limit 5 %)"]


def test_the_server_counts_output_tokens_and_a_client_only_estimates():
    counted = output_count(80, 6)
    assert (counted.tokens, counted.source) == (80, "server_usage")
    assert "80 tokens" in counted.notes[0].text
    assert output_count(80, 81).notes == ()
    assert output_count(None, 6).source == "estimated"
    assert output_count(None, None) is None
