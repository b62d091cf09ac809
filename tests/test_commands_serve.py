from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.commands.serve import (
    launch_words,
    parse_serve_command,
    table,
    version_of_tag,
)
from sim.errors import BadInput
from sim.scenario import EngineConfig


def flags(text: str) -> dict[str, str | None]:
    return dict(parse_serve_command(text).flags)


def test_plain_vllm_serve() -> None:
    command = parse_serve_command("vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 128 --enforce-eager")
    assert (command.engine, command.model, command.entry) == (
        "vllm",
        "Qwen/Qwen2.5-7B-Instruct",
        "vllm serve",
    )
    assert command.flags == (("--max-num-seqs", "128"), ("--enforce-eager", None))


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve M --max-num-seqs 64",
        "vllm serve M --max_num_seqs=64",
        "vllm serve --max-num-seqs=64 M",
        "vllm serve --model M --max_num_seqs 64",
        "$ vllm serve M \\\n    --max-num-seqs 64",
        "(venv) user@host:~/llm$ vllm serve M \\  \n  --max-num-seqs 64   # slots",
        "vllm serve M \\\r\n  --max-num-seqs 64\r\n",
        "vllm serve M\n  --max-num-seqs 64",
        "```bash\nvllm serve M --max-num-seqs 64\n```",
        "cd /srv && vllm serve M --max-num-seqs 64 2>&1 | tee server.log",
        "sudo nohup /opt/venv/bin/vllm serve M --max-num-seqs 64 > log.txt &",
        "MODEL=M\nSEQS=64\nvllm serve $MODEL --max-num-seqs ${SEQS}",
        "python -m vllm.entrypoints.openai.api_server --model M --max-num-seqs 64",
        "python3 -m vllm.entrypoints.cli.main serve M --max-num-seqs 64",
        "bash -c 'vllm serve M --max-num-seqs 64'",
        "vllm serve M --max-num-seqs 1 --max-num-seqs 64",
        "docker run --gpus all vllm/vllm-openai:latest M --max-num-seqs 64",
        "docker run --gpus all vllm/vllm-openai:latest --model M --max-num-seqs 64",
    ],
)
def test_one_command_however_it_is_pasted(text: str) -> None:
    command = parse_serve_command(text)
    assert command.engine == "vllm"
    assert command.model == "M"
    assert command.flags == (("--max-num-seqs", "64"),)


def test_docker_run_with_its_own_flags_and_environment() -> None:
    command = parse_serve_command(
        """docker run -itd --rm --name llm --runtime nvidia --gpus '"device=0,1"' --ipc=host --shm-size 16g \\
             -v ~/.cache/huggingface:/root/.cache/huggingface -p8000:8000 -e VLLM_USE_V2_MODEL_RUNNER=0 \\
             --env "HF_TOKEN=hunter2" -e VLLM_API_KEY=hunter2 --ulimit memlock=-1 \\
             vllm/vllm-openai:v0.28.0-cu129 \\
             --model Qwen/Qwen3-8B -tp 2 --api-key hunter2"""
    )
    assert command.image == "vllm/vllm-openai:v0.28.0-cu129"
    assert command.version == "0.28.0"
    assert command.model == "Qwen/Qwen3-8B"
    assert command.env == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert command.flags == (("--tensor-parallel-size", "2"),)
    assert "hunter2" not in repr(command)
    (left,) = [note for note in command.notes if "docker's own" in note.text]
    assert left.subject == "--runtime, --gpus, --ipc, --shm-size, -v, --ulimit"


def test_a_container_without_options_of_its_own_has_nothing_to_say() -> None:
    command = parse_serve_command(
        "docker run --rm -it --name=llm -p 8000:8000 -e VLLM_X=1 vllm/vllm-openai M --max-num-seqs 4"
    )
    assert command.notes == ()


def test_sglang_in_docker() -> None:
    command = parse_serve_command(
        "docker run --gpus all --shm-size 32g -p 30000:30000 lmsysorg/sglang:v0.5.21-cu129 "
        "python3 -m sglang.launch_server --model-path M --host 0.0.0.0 --tp 4 --mem-fraction 0.85"
    )
    assert (command.engine, command.model, command.version) == ("sglang", "M", "0.5.21")
    assert command.flags == (
        ("--host", "0.0.0.0"),
        ("--tp-size", "4"),
        ("--mem-fraction-static", "0.85"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --model-path M --tp-size 2",
        "python3 -m sglang.launch_server --model M --tensor-parallel-size 2",
        "sglang serve M --tp 2",
        "sglang serve --model-path M --tp-size=2",
        "python3 /sgl-workspace/sglang/python/sglang/launch_server.py --model-path M --tp 2",
    ],
)
def test_sglang_entries(text: str) -> None:
    command = parse_serve_command(text)
    assert (command.engine, command.model) == ("sglang", "M")
    assert command.flags == (("--tp-size", "2"),)


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.28.0", "0.28.0"),
        ("lmsysorg/sglang:v0.5.21-cu129", "0.5.21"),
        ("registry.local:5000/vllm/vllm-openai:0.33.0", "0.33.0"),
        ("vllm/vllm-openai:latest", ""),
        ("vllm/vllm-openai", ""),
        ("registry.local:5000/vllm", ""),
        ("rocm/vllm:rocm6.4_vllm_0.9", ""),
    ],
)
def test_version_of_tag(image: str, version: str) -> None:
    assert version_of_tag(image) == version


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("-O3", ("--optimization-level", "3")),
        ("-O 1", ("--optimization-level", "1")),
        ("-O=0", ("--optimization-level", "0")),
        ("-tp 2", ("--tensor-parallel-size", "2")),
        ("-dp=2", ("--data-parallel-size", "2")),
        ("-q fp8", ("--quantization", "fp8")),
        ("-cc.cudagraph_mode NONE", ("--compilation-config.cudagraph_mode", "NONE")),
        ("--compilation_config.cudagraph_mode=NONE", ("--compilation-config.cudagraph_mode", "NONE")),
        ("--no-enable-prefix-caching", ("--no-enable-prefix-caching", None)),
        ("--no_enable_prefix_caching", ("--no-enable-prefix-caching", None)),
        ("--tensor-parallel 2", ("--tensor-parallel-size", "2")),
        ("--max-model-len -1", ("--max-model-len", "-1")),
        ("--cudagraph-capture-sizes 1 2 4", ("--cudagraph-capture-sizes", "1 2 4")),
    ],
)
def test_spellings(given: str, expected: tuple[str, str | None]) -> None:
    assert parse_serve_command(f"vllm serve M {given}").flags == (expected,)


def test_environment_in_front_and_exported() -> None:
    command = parse_serve_command(
        "export VLLM_ATTENTION_BACKEND=FLASHINFER\nVLLM_LOGGING_LEVEL=DEBUG HOME=/root vllm serve M"
    )
    assert command.env == {"VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_LOGGING_LEVEL": "DEBUG"}


def test_hash_inside_a_word_is_no_comment() -> None:
    assert flags("vllm serve M --served-model-name a#b # rest")["--served-model-name"] == "a#b"


def test_json_value_keeps_its_quotes() -> None:
    text = """vllm serve M --compilation-config '{"cudagraph_mode": "PIECEWISE"}'"""
    assert flags(text)["--compilation-config"] == '{"cudagraph_mode": "PIECEWISE"}'


def test_config_file_loses_to_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(
        "model: M\nmax-num-seqs: 32\nmax_num_batched_tokens: 4096\nenforce-eager: true\n"
        "enable_prefix_caching: false\nserved-model-name: [a, b]\n"
        "compilation-config: {cudagraph_mode: NONE}\n"
    )
    command = parse_serve_command(f"vllm serve --config {config} --max-num-seqs 64")
    assert command.model == "M"
    assert dict(command.flags) == {
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "4096",
        "--enforce-eager": None,
        "--no-enable-prefix-caching": None,
        "--served-model-name": "a b",
        "--compilation-config": '{"cudagraph_mode": "NONE"}',
    }


def test_repeated_flag_is_noted() -> None:
    notes = parse_serve_command("vllm serve M --max-num-seqs 1 --max-num-seqs 2").notes
    assert [(n.kind, n.subject) for n in notes] == [("warning", "--max-num-seqs")]


def test_truth_value_where_the_engine_takes_none_is_noted() -> None:
    command = parse_serve_command("vllm serve M --enable-chunked-prefill=False")
    assert command.flags == (("--no-enable-chunked-prefill", None),)
    assert "takes no value" in command.notes[0].text


def test_launch_words_split_lists_and_keep_json() -> None:
    text = "vllm serve M --cudagraph-capture-sizes 1 2 4 --compilation-config '{\"mode\": 3}' --enforce-eager"
    command = parse_serve_command(text)
    engine = EngineConfig("vllm", "0.28.0", "0.28.0", {}, command.flags)
    assert launch_words(engine) == [
        "--cudagraph-capture-sizes",
        "1",
        "2",
        "4",
        "--compilation-config",
        '{"mode": 3}',
        "--enforce-eager",
    ]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("vllm serve M --max-num-sqes 8", "--max-num-sqes", ["--max-num-seqs"]),
        ("vllm serve M --max-running-requests 8", "--max-running-requests", ["SGLang"]),
        ("sglang serve M --gpu-memory-utilization 0.9", "--gpu-memory-utilization", ["vLLM"]),
        (
            "python -m sglang.launch_server --model-path M --chunked-prefil-size 1",
            "--chunked-prefil-size",
            ["--chunked-prefill-size"],
        ),
        ("vllm serve M --max-num-seqs", "--max-num-seqs", ["value"]),
        ("vllm serve M --max-num-seqs --enforce-eager", "--max-num-seqs", ["value"]),
        ("vllm serve M --max-num-seqs abc", "--max-num-seqs", ["abc", "whole"]),
        ("vllm serve M --max-num-seqs 1k", "--max-num-seqs", ["1k"]),
        ("vllm serve M --max-num-seqs $SEQS", "--max-num-seqs", ["$SEQS", "variable"]),
        ("vllm serve $MODEL", "--serve", ["$MODEL", "variable"]),
        ("vllm serve M --gpu-memory-utilization nan", "--gpu-memory-utilization", ["NaN"]),
        ("vllm serve M --max-loras many", "--max-loras", ["many"]),
        ("vllm serve M --scheduling-policy lifo", "--scheduling-policy", ["lifo", "fcfs, priority"]),
        ("vllm serve M --max-model-len 1.5K", "--max-model-len", ["1.5k"]),
        ("vllm serve M --max-num 8", "--max-num", ["--max-num-seqs", "--max-num-batched-tokens"]),
        ("vllm serve M -tp2", "-tp2", ["no such flag"]),
        ("vllm serve M --speculative-config {method: ngram}", "--speculative-config", ["JSON", "quotes"]),
        ("vllm serve M stray", "--serve", ["stray"]),
        ("vllm serve A --model B", "--model", ["'A'"]),
        ("vllm serve 'M", "--serve", ["quot"]),
        ("vllm bench serve --model M", "--serve", ["vllm bench", "vllm serve"]),
        ("echo hello", "--serve", ["no engine"]),
        ("", "--serve", ["no command"]),
        ("vllm serve A\nvllm serve B", "--serve", ["2"]),
        ("docker run --gpus all", "--serve", ["no image"]),
        ("docker run ubuntu:24.04 sleep 1", "--serve", ["ubuntu:24.04"]),
        ("vllm serve M --config /nowhere/c.yaml", "--config", ["/nowhere/c.yaml", "read"]),
        ("vllm serve M --enforce-eager.x 1", "--enforce-eager.x", ["dotted"]),
        ("vllm serve M --enable-prefix-caching=perhaps", "--enable-prefix-caching", ["true or false"]),
        ("sglang serve M --max-total-tokens 4K", "--max-total-tokens", ["4K", "8Ki"]),
    ],
)
def test_bad_serve_commands_name_the_flag(text: str, field: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        parse_serve_command(text)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n", "x: [", "max-num-sqes: 1\n"])
def test_bad_config_files(tmp_path: Path, content: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(content)
    with pytest.raises(BadInput):
        parse_serve_command(f"vllm serve M --config {config}")


def test_nothing_is_run_by_a_shell(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    command = parse_serve_command(
        f"vllm serve M --served-model-name 'x$(touch {marker})' 'y`touch {marker}`'"
    )
    assert not marker.exists()
    assert command.flags == (("--served-model-name", f"x$(touch {marker}) y`touch {marker}`"),)


@pytest.mark.parametrize(("engine", "at_least"), [("vllm", 280), ("sglang", 500)])
def test_tables_are_complete_and_say_what_is_not_modelled(engine: str, at_least: int) -> None:
    rows = table("vllm" if engine == "vllm" else "sglang").flags
    assert len(rows) >= at_least
    for row in rows:
        assert row.role != "not-modelled" or row.effect, row.name
        assert row.name.startswith("--")


_WORDS = """
vllm serve M --max-num-seqs --max-num-seqs= =3 -tp -O -O9 -- - ' " $ ${X} X=1 export docker run -e
--no- --no-x -cc. -cc.a { } && | > 2>&1 # -m sglang.launch_server nan -1 1e400 é --config --config=/ bash -c
--cudagraph-capture-sizes --compilation-config
"""
_PIECES = st.lists(st.sampled_from([*_WORDS.split(), "\\\n", "\n", "\x00", "'a b'", "'a\nb'"]), max_size=12)


@settings(max_examples=300, deadline=None)
@given(_PIECES.map(" ".join) | st.text(max_size=40).map(lambda text: "vllm serve M " + text))
def test_any_paste_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        command = parse_serve_command(text)
    except BadInput as error:
        message = str(error)
        assert "\n" not in message, message
    else:
        assert command.engine in {"vllm", "sglang"}


def test_what_else_a_text_runs_is_named() -> None:
    parsed = parse_serve_command("cd /models && vllm serve Qwen/Qwen3-8B; rm -rf /tmp/x")
    assert parsed.model == "Qwen/Qwen3-8B"
    assert any("cd, rm" in note.text for note in parsed.notes)
    assert not any("is read" in note.text for note in parse_serve_command("vllm serve Qwen/Qwen3-8B").notes)
