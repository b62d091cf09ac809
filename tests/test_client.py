"""The client: times in order, keys that stay secret, bodies as each endpoint wants them."""

import asyncio
import json
import logging

import pytest

from bench.client import Client, Exchange, NoAnswer, Watch
from bench.payload import Target, Timeouts, request_body
from bench.prompts import PromptMaker, id_range
from bench.stream import StreamReader
from sim.errors import BadInput
from sim.request import Request
from tests.fakes.fault_server import FaultServer
from tests.fakes.stream_server import Asked


async def ask(
    server: FaultServer, endpoint: str = "/v1/completions", count: int = 1, **options
) -> list[Exchange]:
    target = Target(server.url, "m", endpoint, **options)
    prompt = [5, 6, 7] if target.takes_token_ids else "a b c"
    async with Client(target) as client:
        return [await client.send(request_body(target, prompt, 4)) for _ in range(count)]


def serve_and_ask(endpoint: str = "/v1/completions", count: int = 1, server_options=None, **options):
    async def run() -> tuple[list[Exchange], list[Asked]]:
        async with FaultServer(**(server_options or {})) as server:
            return await ask(server, endpoint, count, **options), server.asked

    return asyncio.run(run())


def test_times_are_in_order_and_the_second_request_reuses_the_connection():
    (first, second), _ = serve_and_ask(count=2, server_options={"first_delay": 0.02, "interval": 0.01})
    for got in (first, second):
        out = got.outcome
        moments = [
            got.sent,
            got.connected,
            got.headers,
            out.stream_open,
            out.first_token,
            out.last_token,
            got.ended,
        ]
        assert moments == sorted(moments)
        assert out.first_token - got.sent >= 0.02
        assert got.http_status == 200
    assert (first.reused, second.reused) == (False, True)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_counts_come_from_the_server(endpoint):
    (got,), (asked,) = serve_and_ask(endpoint, server_options={"cached_tokens": 2, "tokens_per_chunk": 2})
    out = got.outcome
    assert out.status == "ok", out.detail
    assert (out.output_tokens, out.token_source, out.cached_tokens) == (4, "server_usage", 2)
    assert out.prompt_tokens == asked.prompt_tokens
    assert out.itl_source == "usage_deltas"
    assert out.token_counts == (2, 2)


def test_token_ids_go_where_they_are_taken():
    _, (asked,) = serve_and_ask()
    assert asked.body["prompt"] == [5, 6, 7]
    assert asked.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert asked.body["ignore_eos"] is True
    _, (asked,) = serve_and_ask("/generate")
    assert asked.body["input_ids"] == [5, 6, 7]
    assert asked.body["sampling_params"] == {"max_new_tokens": 4, "ignore_eos": True}
    _, (asked,) = serve_and_ask("/v1/chat/completions")
    assert asked.body["messages"] == [{"role": "user", "content": "a b c"}]


def test_without_running_usage_there_is_no_itl_of_bundles():
    (got,), (asked,) = serve_and_ask(continuous_usage=False, server_options={"tokens_per_chunk": 2})
    assert "continuous_usage_stats" not in asked.body["stream_options"]
    assert got.outcome.itl_source is None
    assert got.outcome.output_tokens == 4


def test_extra_body_reaches_the_server():
    _, (asked,) = serve_and_ask(extra_body={"temperature": 0.5})
    assert asked.body["temperature"] == 0.5
    extra = {"sampling_params": {"temperature": 0.5}, "priority": 1}
    _, (asked,) = serve_and_ask("/generate", extra_body=extra)
    assert asked.body["sampling_params"] == {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0.5}
    assert asked.body["priority"] == 1


def test_output_may_stop_early_unless_told_otherwise():
    target = Target("http://h:1", "m")
    assert "ignore_eos" not in json.loads(request_body(target, [1], 1, ignore_eos=False))


# Secrets


def test_key_goes_out_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG)
    (got,), (asked,) = serve_and_ask(api_key_env="SOME_KEY", server_options={"fault": "echoes_key"})
    assert asked.headers["authorization"] == "Bearer sk-very-secret"
    assert got.outcome.status == "refused"
    assert "***" in got.outcome.detail
    assert "sk-very-secret" not in repr(got) + caplog.text


def test_other_secrets_in_an_answer_are_not_kept():
    client = Client(Target("http://h:1", "m"))
    assert client._clean("see http://u:S3CRET@h/") == "see http://u:***@h/"


def test_one_limit_for_a_request_holds_for_each_wait():
    limits = Timeouts.of_request(7200.0)
    assert (limits.first_token, limits.idle, limits.total) == (7200.0, 7200.0, 7200.0)
    assert Timeouts().first_token == Timeouts().total  # a queue is no failure


def test_no_key_no_header(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    _, (asked,) = serve_and_ask()
    assert "authorization" not in asked.headers


def test_passwords_in_the_address_are_not_shown():
    target = Target("http://user:hunter2@host:8000/v1?token=x", "m")
    assert target.public_url == "http://host:8000/v1"


# Input


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://"])
def test_address_must_be_one(url):
    with pytest.raises(BadInput, match="--base-url"):
        Target(url, "m")


def test_endpoint_must_be_known():
    with pytest.raises(BadInput, match="/embeddings"):
        Target("http://h:1", "m", "/v1/embeddings")


@pytest.mark.parametrize("name", ["connect", "first_token", "idle", "total"])
def test_limits_are_positive(name):
    with pytest.raises(BadInput, match=name):
        Timeouts(**{name: 0.0})


def test_limits_do_not_fail_slow_but_healthy_requests_by_default():
    limits = Timeouts()
    assert min(limits.first_token, limits.idle, limits.total) >= 300


class StillWire:
    """A wire whose last byte came at `last_read_at`."""

    def __init__(self, last_read_at: float) -> None:
        self.last_read_at = last_read_at
        self.takes_body = True
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("now", "last_read", "has_token", "hit"),
    [
        (15.0, 0.0, False, ""),  # a long prefill
        (119.0, 0.0, False, ""),
        (121.0, 120.9, False, "first_token"),  # pings are no token
        (70.0, 12.0, True, ""),  # a long pause between tokens
        (73.0, 12.0, True, "idle"),
        (599.0, 598.0, True, ""),
        (601.0, 600.9, True, "total"),
    ],
)
def test_each_limit_on_its_own(now, last_read, has_token, hit):
    reader = StreamReader()
    if has_token:
        reader.feed(1.0, b'data: {"choices": [{"text": "a"}]}\n\n')
    wire = StillWire(last_read)
    watch = Watch(0.0, wire, reader)
    watch.check(now, Timeouts(connect=10.0, first_token=120.0, idle=60.0, total=600.0))
    assert watch.hit == hit
    assert wire.aborted == bool(hit)


def test_get_json():
    async def run(path: str) -> object:
        async with FaultServer() as server, Client(Target(server.url, "m")) as client:
            return await client.get_json(path)

    assert asyncio.run(run("/v1/models"))["data"][0]["id"] == "m"


def test_get_json_from_nobody():
    async def run() -> None:
        async with FaultServer() as server:
            url = server.url
        async with Client(Target(url, "m")) as client:
            await client.get_json("/v1/models")

    with pytest.raises(NoAnswer, match="/v1/models"):
        asyncio.run(run())


def test_a_served_alias_is_not_a_wrong_model():
    (got,), _ = serve_and_ask(server_options={"fault": "wrong_model"}, model_aliases=("someone-else",))
    assert got.outcome.status == "ok"


# Prompts


def make(seed: int = 0, vocab: int | None = 1000, **options) -> PromptMaker:
    return PromptMaker(seed, vocab, **options)


def request(*prompt: tuple[int | str, int]) -> Request:
    return Request("r", prompt, max_tokens=1)


def test_segments_with_one_key_begin_alike_and_others_do_not():
    a = make().token_ids(request(("p", 50), (1, 20)))
    b = make().token_ids(request(("p", 50), (2, 30)))
    assert (len(a), len(b)) == (70, 80)
    assert a[:50] == b[:50]
    assert a[50:] != b[50:70]
    assert make().token_ids(request((1, 9))) != make().token_ids(request(("1", 9)))


def test_a_longer_segment_begins_with_the_shorter_one_in_any_order():
    maker = make()
    short, long, again = (maker.segment("k", n).tolist() for n in (10, 1000, 10))
    assert long[:10] == short == again
    assert make(kept_segments=0).segment("k", 1000).tolist() == long


def test_seeds_and_salts_share_nothing():
    prompts = [m.token_ids(request(("k", 64))) for m in (make(0), make(1), make(0, salt="warmup"))]
    assert prompts[0] == make(0).token_ids(request(("k", 64)))
    assert len({tuple(p[:8]) for p in prompts}) == 3


@pytest.mark.parametrize("vocab", [16, 64, 2048, 32_000, 128_256, 151_936, 262_144])
def test_ids_stay_clear_of_both_ends_of_the_vocabulary(vocab):
    ids = make(3, vocab).token_ids(request((7, 5000)))
    low, high = id_range(vocab)
    assert 0 < low <= min(ids)
    assert max(ids) < high < vocab
    assert len(set(ids)) > min(vocab // 2, 1000)


def test_a_vocabulary_too_small_is_refused():
    with pytest.raises(BadInput, match="vocab_size"):
        make(0, 8)


def test_quoted_outputs_are_what_was_really_generated():
    maker = make()
    quoting = request(("p", 4), ("out:r1", 6), ("q", 2))
    ids = maker.token_ids(quoting, {"r1": (901, 902, 903)})
    assert ids[4:7] == [901, 902, 903]
    assert len(ids) == 12
    assert ids[7:10] == maker.token_ids(quoting)[7:10]


def test_words_share_beginnings_as_ids_do():
    a, b = (make().text(request(("p", 30), (key, 10))).split() for key in (1, 2))
    assert len(a) == 40
    assert a[:30] == b[:30]
    assert a != b


def test_words_are_as_many_as_their_tokens_ask_for():
    assert len(make().text(request(("p", 30)), tokens_per_word=1.5).split()) == 20
    assert len(make().text(request(("p", 1)), tokens_per_word=4.0).split()) == 1
