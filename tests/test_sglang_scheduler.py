"""SGLang's scheduling rules one by one, in scenarios small enough to follow by hand."""

from __future__ import annotations

from sim.engines.sglang.config import SglangSchedulerConfig
from tests.sglang_by_hand import ARGS, ask, outcome, play, told

# -- the loop ------------------------------------------------------------------------------------------------


def test_a_prefill_makes_decodes_wait() -> None:
    lines = play(ask("A", 7, 4), ask("B", 11, 2, arrival_step=2))
    assert told(lines) == [
        "prefill A[0:7]",
        "decode A[7]",
        "prefill B[0:11]",
        "decode A[8] B[11]",
        "decode A[9]",
        "idle",
    ]
    assert [line["running"] for line in lines] == [[], ["A"], ["A"], ["A", "B"], ["A"], []]


def test_with_overlap_a_finished_request_rides_in_one_more_batch() -> None:
    lines = play(ask("A", 7, 3), disable_overlap_schedule=False)
    assert told(lines) == ["prefill A[0:7]", "decode A[7]", "decode A[8]", "decode A[9]", "idle", "idle"]
    assert [line["new_tokens"] for line in lines] == [[], [["A", 1]], [["A", 2]], [["A", 3]], [], []]
    # The position of the batch that was already launched is kept: 7 prompt tokens and all 3 outputs.
    assert (lines[-1]["available"], lines[-1]["evictable"]) == (190, 10)


def test_without_overlap_the_last_output_never_gets_kv() -> None:
    lines = play(ask("A", 7, 3))
    assert (lines[-1]["available"], lines[-1]["evictable"]) == (191, 9)


def test_slots_come_free_one_call_later_with_overlap() -> None:
    three = [ask(name, 5, 2) for name in "ABC"]
    assert told(play(*three, max_running_requests=2)) == [
        "prefill A[0:5] B[0:5]",
        "decode A[5] B[5]",
        "idle",
        "prefill C[0:5]",
        "decode C[5]",
        "idle",
    ]
    assert told(play(*three, max_running_requests=2, disable_overlap_schedule=False))[:5] == [
        "prefill A[0:5] B[0:5]",
        "decode A[5] B[5]",
        "decode A[6] B[6]",
        "idle",
        "prefill C[0:5]",
    ]


def test_a_stop_token_that_comes_with_the_last_allowed_token_counts_as_stop() -> None:
    assert outcome(ask("A", 5, 4, stop_after=4), ask("B", 5, 4, stop_after=2), ask("C", 5, 4)) == {
        "A": ["stop", 4, 0],
        "B": ["stop", 2, 0],
        "C": ["length", 4, 0],
    }


def test_the_new_token_ratio_falls_with_decode_calls_only_and_starts_again_when_idle() -> None:
    lines = play(ask("A", 90, 3), ask("B", 5, 2, arrival_step=20), schedule_conservativeness=1.2)
    init, decay = 0.84, 0.84 * 0.86 / 600
    falls = [round(init - decay * n, 6) for n in range(3)]
    assert told(lines) == [
        "prefill A[0:64]",
        "prefill A[64:90]",
        "decode A[90]",
        "decode A[91]",
        "idle",
        "prefill B[0:5]",
        "decode B[5]",
        "idle",
    ]
    assert [line["new_token_ratio"] for line in lines] == [
        *(falls[0], falls[0], falls[1], falls[2], falls[2]),
        *(falls[0], falls[1], falls[1]),
    ]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 20, 21, 22]


def test_max_new_tokens_is_clipped_to_context_and_pool_and_may_become_zero() -> None:
    assert outcome(ask("A", 30, 20), context_length=50)["A"] == ["length", 18, 0]
    assert outcome(ask("A", 150, 100), max_total_tokens=200)["A"] == ["length", 48, 0]
    # Room for nothing after the prompt: one token all the same, and no decode.
    clipped = play(ask("A", 34, 30), max_total_tokens=64, page_size=16)
    assert told(clipped) == ["prefill A[0:34]", "idle"]
    assert clipped[0]["finished"] == ["A"]
    overlapped = play(ask("A", 34, 30), max_total_tokens=64, page_size=16, disable_overlap_schedule=False)
    assert told(overlapped) == ["prefill A[0:34]", "idle", "idle"]
    assert [line["running"] for line in overlapped] == [[], ["A"], []]


# -- chunks --------------------------------------------------------------------------------------------------


def test_a_chunked_prompt_starves_decodes_until_its_last_chunk() -> None:
    lines = play(ask("A", 5, 4), ask("B", 25, 2, arrival_step=2), chunked_prefill_size=10)
    assert told(lines) == [
        "prefill A[0:5]",
        "decode A[5]",
        "prefill B[0:10]",
        "prefill B[10:20]",
        "prefill B[20:25]",
        "decode A[6] B[25]",
        "decode A[7]",
        "idle",
    ]


def test_a_batch_is_packed_across_a_chunk_boundary() -> None:
    three = [ask(name, 7, 2) for name in "ABC"]
    assert told(play(*three, chunked_prefill_size=10))[:3] == [
        "prefill A[0:7] B[0:3]",
        "prefill B[3:7] C[0:6]",
        "prefill C[6]",
    ]


def test_only_the_first_chunk_is_page_aligned() -> None:
    """Later ones end where the budget ends, in mixed mode also inside a page."""
    lines = play(
        ask("A", 5, 9),
        ask("B", 70, 1, arrival_step=1),
        page_size=16,
        chunked_prefill_size=32,
        enable_mixed_chunk=True,
    )
    assert told(lines)[:4] == [
        "prefill A[0:5]",
        "mixed B[0:16] A[5]",
        "mixed B[16:47] A[6]",
        "mixed B[47:70] A[7]",
    ]


def test_mixed_chunks_shrink_by_the_running_decodes_and_put_them_last() -> None:
    lines = play(
        ask("A", 5, 9), ask("B", 25, 2, arrival_step=2), chunked_prefill_size=10, enable_mixed_chunk=True
    )
    assert told(lines)[:6] == [
        "prefill A[0:5]",
        "decode A[5]",
        "mixed B[0:9] A[6]",
        "mixed B[9:18] A[7]",
        "mixed B[18:25] A[8]",
        "decode B[25] A[9]",
    ]
    assert [line["running"] for line in lines[2:6]] == [[], [], [], ["B", "A"]]


def test_mixing_needs_chunking() -> None:
    lines = play(
        ask("A", 5, 4), ask("B", 9, 2, arrival_step=1), chunked_prefill_size=-1, enable_mixed_chunk=True
    )
    assert told(lines)[1] == "prefill B[0:9]"


def test_max_prefill_tokens_is_overshot_by_one_request() -> None:
    four = [ask(name, 8, 2) for name in "ABCD"]
    assert told(play(*four, max_prefill_tokens=15))[:2] == ["prefill A[0:8] B[0:8]", "prefill C[0:8] D[0:8]"]


def test_without_chunking_only_the_first_request_may_exceed_max_prefill_tokens() -> None:
    two = [ask("A", 40, 2), ask("B", 8, 2)]
    assert told(play(*two, chunked_prefill_size=-1, max_prefill_tokens=20))[:2] == [
        "prefill A[0:40]",
        "prefill B[0:8]",
    ]
    # The second one must stay below what is left, not merely within it.
    assert told(play(*two, chunked_prefill_size=-1, max_prefill_tokens=48))[0] == "prefill A[0:40]"
    assert told(play(*two, chunked_prefill_size=-1, max_prefill_tokens=49))[0] == "prefill A[0:40] B[0:8]"


def test_prefill_decode_interval_forces_decodes_between_prefills() -> None:
    lines = play(
        ask("A", 5, 9),
        ask("B", 25, 2, arrival_step=1),
        chunked_prefill_size=10,
        prefill_decode_interval=2,
    )
    assert told(lines)[:9] == [
        "prefill A[0:5]",
        "decode A[5]",
        "decode A[6]",
        "prefill B[0:10]",
        "decode A[7]",
        "decode A[8]",
        "prefill B[10:20]",
        "decode A[9]",
        "decode A[10]",
    ]


def test_prefill_max_requests_caps_a_batch() -> None:
    three = [ask(name, 5, 2) for name in "ABC"]
    assert told(play(*three, prefill_max_requests=2))[:2] == ["prefill A[0:5] B[0:5]", "prefill C[0:5]"]


# -- admission -----------------------------------------------------------------------------------------------


def test_a_candidate_reserves_all_it_may_generate() -> None:
    """Not the ratio of it, as a running request does; so the first batch and the next call refuse B."""
    two = [ask("A", 30, 80), ask("B", 30, 80)]
    assert told(play(*two, max_total_tokens=190))[:2] == ["prefill A[0:30]", "decode A[30]"]
    # With 160 tokens free and 0.7 * 79 of them reserved for A there is room for B's 111 and not one more.
    assert told(play(*two, max_total_tokens=197))[:2] == ["prefill A[0:30]", "prefill B[0:30]"]
    assert told(play(*two, max_total_tokens=196))[:2] == ["prefill A[0:30]", "decode A[30]"]


def test_the_latch_keeps_small_requests_out_too() -> None:
    lines = play(ask("A", 30, 10), ask("B", 60, 120), ask("C", 3, 2, arrival_step=3))
    assert told(lines)[:2] == ["prefill A[0:30]", "decode A[30]"]
    assert told(lines)[10:12] == ["idle", "prefill B[0:60] C[0:3]"]


def test_the_gate_is_strict() -> None:
    """extend + max_new_tokens + page must be less than what is left."""
    two = [ask("A", 20, 20), ask("B", 30, 40)]
    # After A: 20 + 1 + 20 tokens are spoken for, B asks for 71.
    assert told(play(*two, max_total_tokens=112))[0] == "prefill A[0:20]"
    assert told(play(*two, max_total_tokens=113))[0] == "prefill A[0:20] B[0:30]"


def test_very_long_outputs_are_reserved_up_to_a_clip_only() -> None:
    two = [ask("A", 10, 9000), ask("B", 10, 9000)]
    args = {"max_total_tokens": 9200, "context_length": 20000}
    # Unclipped, B would have to wait for A: 2 x 9010 > 9200; clipped, 2 x 4107 fit.
    assert told(play(*two, **args))[0] == "prefill A[0:10] B[0:10]"


def test_without_radix_cache_certain_lengths_are_played_through() -> None:
    three = [ask(name, 20, 30) for name in "ABC"]
    args = {"disable_radix_cache": True, "max_total_tokens": 120}
    # A and B end with 100 tokens and more than one to spare for each, C does not fit beside them.
    lines = play(*three, **args)
    assert told(lines)[:2] == ["prefill A[0:20] B[0:20]", "decode A[20] B[20]"]
    assert told(lines)[30] == "idle"
    # One token less than needed: B waits for A.
    assert told(play(*three, disable_radix_cache=True, max_total_tokens=103))[0] == "prefill A[0:20]"
    # The normal rule for requests that may stop early reserves the ratio of running ones.
    early = [{**spec, "stop_after": 30} for spec in three]
    assert told(play(*early, **args))[:2] == ["prefill A[0:20] B[0:20]", "decode A[20] B[20]"]


def test_max_running_requests_is_at_most_half_the_pool() -> None:
    assert SglangSchedulerConfig(**{**ARGS, "max_total_tokens": 9}).request_slots == 4
    many = [ask(chr(65 + i), 1, 1) for i in range(12)]
    assert len(play(*many, max_total_tokens=20)[0]["scheduled"]) <= 10


# -- prefixes ------------------------------------------------------------------------------------------------


def test_a_full_hit_recomputes_one_token_or_one_page() -> None:
    shared = [(7, 48)]
    again = [ask("A", shared, 2), ask("B", shared, 2, arrival_step=9)]
    assert told(play(*again))[3] == "prefill B[47]"
    assert told(play(*again, page_size=16))[3] == "prefill B[32:48]"
    assert told(play(*again, disable_radix_cache=True))[3] == "prefill B[0:48]"


def test_a_follow_up_turn_hits_the_answer_it_quotes() -> None:
    turn = [ask("A", [(7, 20)], 6), ask("B", [(7, 20), ("out:A", 6), (8, 5)], 2, arrival_step=9)]
    # Without overlap the last output has no KV.
    assert play(*turn)[7]["cached"] == [["B", 25]]
    assert play(*turn, disable_overlap_schedule=False)[9]["cached"] == [["B", 26]]


def test_the_stop_token_is_the_same_token_for_everybody() -> None:
    """Two answers of one token, the stop token, leave one prefix that both quote."""
    shared = [(7, 20)]
    lines = play(
        ask("A", shared, 6, stop_after=1),
        ask("B", shared, 6, stop_after=1, arrival_step=9),
        ask("C", [*shared, ("out:B", 1), (8, 5)], 1, arrival_step=20),
        disable_overlap_schedule=False,
    )
    assert [line["cached"] for line in lines if line["cached"]] == [[["A", 0]], [["B", 19]], [["C", 21]]]


def test_duplicates_in_one_batch_are_both_computed_and_one_copy_is_freed() -> None:
    lines = play(ask("A", [(7, 40)], 1), ask("B", [(7, 40)], 1), chunked_prefill_size=128)
    assert told(lines) == ["prefill A[0:40] B[0:40]", "idle"]
    assert (lines[0]["available"], lines[1]["available"], lines[1]["evictable"]) == (120, 160, 40)


def test_the_output_of_a_finished_request_is_evicted_apart_from_its_prompt() -> None:
    lines = play(
        ask("A", [(7, 30)], 30),
        ask("B", 100, 9, arrival_step=40),
        ask("C", [(7, 30)], 2, arrival_step=60),
        max_total_tokens=140,
        chunked_prefill_size=128,
    )
    # B's 100 tokens are 19 more than are free: A's 29 outputs go as a whole, its 30 prompt tokens stay.
    after_b = next(line for line in lines if line["step"] == 40)
    assert (after_b["available"], after_b["evictable"]) == (10, 30)
    assert [line["cached"] for line in lines if line["cached"]][-1] == [["C", 29]]
