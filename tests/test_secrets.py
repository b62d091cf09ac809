"""What is printed and written holds no key, token or password of the user's."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from cli import main, servecast
from sim.build import build_scenario
from sim.planning.plan_report import bench_line, serve_line
from sim.secrets import without_secrets

EXTRA = """--extra-body '{"api_key": "S3CRET", "top_k": 3}'"""
LOAD = f"vllm bench serve --random-input-len 64 --random-output-len 4 --num-prompts 8 {EXTRA}"


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN='S3CRET vllm serve m",
        "OPENAI_API_KEY=S3CRET vllm serve m",
        'vllm serve m --hf-overrides \'{"auth_token": "S3CRET"}\'',
        "--api-key S3CRET",
        "--api-key=S3CRET --port 8000",
        "vllm serve https://user:S3CRET@host/model",
        "Authorization: Bearer S3CRET",
        "key sk-S3CRET0123456789",
        "non-default args: {'api_key': ['S3CRET', 'S3CRET'], 'max_num_seqs': 4}",
        "server_args=ServerArgs(model_path='m', api_key='S3CRET', admin_api_key=None)",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    assert "S3CRET" not in without_secrets(text)
    assert "***" in without_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-14B --hf-overrides-more 1 --max-num-batched-tokens 8192",
        '{"bos_token": "<s>", "max_tokens": "3"}',
        "http://localhost:8000/v1",
        "--key-value 3, pk-fk, sk-learn",
    ],
)
def test_other_words_stay(text: str) -> None:
    assert without_secrets(text) == text


def test_an_error_does_not_repeat_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--gpu", "H100", "--bench", LOAD, "--serve", "HF_TOKEN='S3CRET vllm serve m"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "HF_TOKEN='***" in said
    assert "S3CRET" not in said


@pytest.mark.parametrize("more", [["advise", "--goal", "ttft"], ["predict", "--json", "-"]])
def test_no_command_tells_the_secret_of_a_body(more: list[str]) -> None:
    words = [*more, "--gpu", "H100", "--serve", "vllm serve Qwen/Qwen2.5-7B-Instruct", "--bench", LOAD]
    done = CliRunner().invoke(servecast, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "S3CRET" not in done.output


def test_translation_masks_them_and_keeps_the_rest() -> None:
    words = ["translate", """vllm serve m --hf-overrides '{"api_key": "S3CRET", "bos_token": "<s>"}'"""]
    said = CliRunner().invoke(servecast, words, catch_exceptions=False).output
    assert "S3CRET" not in said
    assert '"bos_token": "<s>"' in said


def test_a_confirming_command_masks_them() -> None:
    scenario = build_scenario(
        serve="""vllm serve Qwen/Qwen2.5-7B-Instruct --hf-overrides '{"api_key": "S3CRET"}'""",
        bench="vllm bench serve",
        gpu="H100",
    )
    assert "--hf-overrides" in serve_line(scenario)
    assert "S3CRET" not in bench_line(scenario)
