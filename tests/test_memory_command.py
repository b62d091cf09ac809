"""`servecast memory`, `servecast models` and `servecast gpus`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli import main, servecast

SERVE = "vllm serve Qwen/Qwen3-8B --max-model-len 4096"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(servecast, arguments)


def printed(*arguments: str) -> Any:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_account_line_by_line() -> None:
    result = run("memory", "--serve", SERVE, "--gpu", "L40S")
    assert result.exit_code == 0, result.output
    for word in ("total memory", "weights", "activation peak", "non-torch", "KV pool", "concurrency"):
        assert word in result.stdout
    assert "head_dim 128 (config.json)" in result.stdout


def test_json_holds_the_same_and_nothing_else_is_printed() -> None:
    document = printed("memory", "--serve", SERVE, "--gpu", "L40S", "--json", "-")
    assert document["kv_bytes_per_token"] == 147456
    assert document["residual_tokens"] is None
    assert {"name", "bytes", "low", "high", "origin", "rule"} == set(document["lines"][0])


def test_the_residual_against_a_given_pool() -> None:
    document = printed(
        "memory", "--serve", SERVE, "--gpu", "L40S", "--kv-cache-tokens", "100000", "--json", "-"
    )
    assert document["kv_cache_tokens"] == 100_000
    assert document["residual_tokens"] == document["estimated_tokens"] - 100_000


def test_two_engines_side_by_side() -> None:
    other = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B"
    documents = printed("memory", "--serve", SERVE, "--serve", other, "--gpu", "L40S", "--json", "-")
    assert [document["engine"] for document in documents] == ["vllm", "sglang"]


def test_memory_is_total_and_time_is_active() -> None:
    result = run("memory", "--serve", "vllm serve Qwen/Qwen3-30B-A3B --max-num-seqs 16", "--gpu", "H100")
    assert "30,532,122,624 parameters, 3,353,032,704 active per token" in result.stdout
    assert "of 128 experts" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", SERVE, "--gpu", "H1000"], "nearest"),
        (["--serve", "vllm serve Qwen/Qwen-nope-8B", "--gpu", "H100"], "nearest"),
        (["--serve", f"{SERVE} -tp 5", "--gpu", "H100"], "32 attention heads not divisible by 5"),
        (["--serve", "vllm serve Qwen/Qwen2.5-72B-Instruct", "--gpu", "L4"], "does not fit"),
        (["--serve", SERVE, "--gpu", "L4", "--json", "/nowhere/at/all.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["memory", *arguments])
    assert ended.value.code == 2
    output, errors = capsys.readouterr()
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""


def test_a_gpu_and_a_model_from_files(tmp_path: Path) -> None:
    card = tmp_path / "card.yaml"
    card.write_text("memory_gib: 40\nbandwidth: 1000\ntflops: {bf16: 100}\n")
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 1024,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "intermediate_size": 4096,
                "vocab_size": 5000,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
            }
        )
    )
    document = printed("memory", "--serve", f"vllm serve {tmp_path}", "--gpu", str(card), "--json", "-")
    assert document["total_memory_bytes"] == 40 * 2**30
    assert document["kv_bytes_per_token"] == 4 * 2 * 128 * 2 * 2
    assert any(note["kind"] == "assumed" for note in document["notes"])


def test_tables() -> None:
    gpus = printed("gpus", "--json")
    assert {"H100-SXM-80GB", "RTX-5090", "MI300X"} <= {row["name"] for row in gpus}
    models = printed("models", "--json")
    assert len(models) >= 40
    assert "Qwen/Qwen3-14B" in run("models").stdout
    assert "GB/s" in run("gpus").stdout


def test_a_pool_that_leaves_no_room_is_part_of_the_account() -> None:
    serve = "vllm serve Qwen/Qwen3-14B --max-num-seqs 256 --gpu-memory-utilization 0.88"
    result = run(
        "memory", "--serve", serve, "--gpu", "H100", "--engine-version", "0.23", "--kv-cache-tokens", "288608"
    )
    assert result.exit_code == 0
    assert "nothing for activations" in result.stdout
    assert "residual" in result.stdout


SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    "serve",
    [
        f"{SERVE} --pipeline-parallel-size 2",
        f"{SERVE} --dtype float32",
        f"{SGLANG} --tp-size 4 --dp-size 4 --enable-dp-attention",
        f"{SGLANG} --tp-size 2 --pp-size 2",
    ],
)
def test_a_request_is_counted_on_the_rank_that_the_pool_is_of(serve: str) -> None:
    document = printed("memory", "--serve", serve, "--gpu", "H100", "--json", "-")
    per_token, length = document["kv_bytes_per_token"], document["request_tokens"]
    assert document["kv_bytes_per_request"] == per_token * length
    assert document["max_concurrency"] == pytest.approx(document["kv_cache_tokens"] / length, rel=0.001)


def test_heads_are_those_of_a_rank_with_dp_attention() -> None:
    serve = f"{SGLANG} --tp-size 4 --dp-size 2 --enable-dp-attention"
    assert "8 KV heads, 4 on each of 2 ranks" in run("memory", "--serve", serve, "--gpu", "H100").stdout


def test_a_length_that_the_engine_shrinks_is_the_one_that_is_shown() -> None:
    serve = "vllm serve Qwen/Qwen3-8B --max-model-len -1 --num-gpu-blocks-override 500"
    text = run("memory", "--serve", serve, "--gpu", "L40S").stdout
    assert "1,179,648,000 bytes at 8,000 tokens" in text
    assert "1.00x for 8,000 tokens per request" in text
