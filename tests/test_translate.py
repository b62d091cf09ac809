from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cli.translate import render
from sim.cli.translate import translate as translate_cli
from sim.commands.serve import parse_serve_command, table
from sim.errors import BadInput
from sim.translation.rules import BY_SGLANG, BY_VLLM, DEFAULTS, NO_SGLANG, NO_VLLM, PAIRS
from sim.translation.translate import Translation, translate


def from_vllm(flags: str) -> Translation:
    return translate(parse_serve_command(f"vllm serve M {flags}"))


def from_sglang(flags: str) -> Translation:
    return translate(parse_serve_command(f"sglang serve M {flags}"))


def target_flags(made: Translation) -> dict[str, str | None]:
    command = parse_serve_command(made.command)
    assert command.model == "M"
    assert command.engine == made.engine
    return dict(command.flags)


def test_reference_command() -> None:
    made = from_vllm(
        "--gpu-memory-utilization 0.85 --max-model-len 32768 --max-num-seqs 128 --max-num-batched-tokens 8192"
    )
    assert made.words[:5] == ("python", "-m", "sglang.launch_server", "--model-path", "M")
    assert target_flags(made) == {
        "--mem-fraction-static": "0.85",
        "--context-length": "32768",
        "--max-running-requests": "128",
        "--chunked-prefill-size": "8192",
    }
    verdicts = {pair.source.split()[0]: pair.verdict for pair in made.pairs}
    assert verdicts == {
        "--gpu-memory-utilization": "near",
        "--max-model-len": "equal",
        "--max-num-seqs": "near",
        "--max-num-batched-tokens": "near",
    }
    assert all(pair.text for pair in made.pairs if pair.verdict == "near")
    assert {pair.source.split()[0] for pair in made.defaults} == {"(--block-size", "(--port"}


@pytest.mark.parametrize(
    ("vllm", "sglang"),
    [
        ("--no-enable-chunked-prefill", {"--chunked-prefill-size": "-1"}),
        (
            "--no-enable-chunked-prefill --max-num-batched-tokens 40k",
            {"--chunked-prefill-size": "-1", "--max-prefill-tokens": "40000"},
        ),
        (
            "--max-num-batched-tokens 32K",
            {"--chunked-prefill-size": "32768", "--max-prefill-tokens": "32768"},
        ),
        (
            "--max-num-batched-tokens 1000 --block-size 64",
            {"--chunked-prefill-size": "960", "--page-size": "64"},
        ),
        ("--num-gpu-blocks-override 100", {"--max-total-tokens": "1600"}),
        (
            "--num-gpu-blocks-override 100 --block-size 32",
            {"--max-total-tokens": "3200", "--page-size": "32"},
        ),
        (
            "--scheduling-policy priority",
            {
                "--enable-priority-scheduling": None,
                "--schedule-low-priority-values-first": None,
                "--disable-priority-preemption": None,
            },
        ),
        ("--enable-expert-parallel -tp 8", {"--ep-size": "8", "--tp-size": "8"}),
        ("--prefill-schedule-interval 3", {"--prefill-decode-interval": "2"}),
        ("--kv-cache-dtype fp8", {"--kv-cache-dtype": "fp8_e4m3"}),
        ("--kv-cache-dtype int8_per_token_head", {}),
        ("--enable-prefix-caching", {}),
        ("--no-enable-prefix-caching", {"--disable-radix-cache": None}),
        ("--no-async-scheduling", {"--disable-overlap-schedule": None}),
        ("--no-trust-remote-code", {}),
        ("--served-model-name a b", {"--served-model-name": "a"}),
        ("--max-model-len 25.6k", {"--context-length": "25600"}),
        ("--cpu-offload-gb 0.5", {}),
        ("--dtype float", {"--dtype": "float"}),
        ("-cc.cudagraph_mode NONE", {}),
        ("--cudagraph-capture-sizes 1 2 4", {"--cuda-graph-bs-decode": "1 2 4"}),
    ],
)
def test_vllm_to_sglang(vllm: str, sglang: dict[str, str | None]) -> None:
    assert target_flags(from_vllm(vllm)) == sglang


@pytest.mark.parametrize(
    ("sglang", "vllm"),
    [
        ("--chunked-prefill-size 4096", {"--max-num-batched-tokens": "4096"}),
        ("--chunked-prefill-size -1", {"--no-enable-chunked-prefill": None}),
        (
            "--chunked-prefill-size -1 --max-prefill-tokens 9000",
            {"--no-enable-chunked-prefill": None, "--max-num-batched-tokens": "9000"},
        ),
        ("--max-prefill-tokens 9000", {}),
        ("--enable-priority-scheduling", {"--scheduling-policy": "priority"}),
        ("--schedule-policy fcfs", {"--scheduling-policy": "fcfs"}),
        ("--schedule-policy lpm", {}),
        ("--enable-mixed-chunk", {}),
        ("--disable-radix-cache", {"--no-enable-prefix-caching": None}),
        ("--disable-cuda-graph", {"--enforce-eager": None}),
        (
            "--page-size 64 --max-total-tokens 6400",
            {"--block-size": "64", "--num-gpu-blocks-override": "100"},
        ),
        ("--ep-size 8 --tp 8", {"--enable-expert-parallel": None, "--tensor-parallel-size": "8"}),
        ("--max-lora-rank 24", {}),
        ("--context-length 4Ki", {"--max-model-len": "4096"}),
        ("--prefill-decode-interval 0", {"--prefill-schedule-interval": "1"}),
    ],
)
def test_sglang_to_vllm(sglang: str, vllm: dict[str, str | None]) -> None:
    assert target_flags(from_sglang(sglang)) == vllm


def test_what_has_no_counterpart_says_why() -> None:
    pairs = from_vllm("--watermark 0.1 --enable-log-requests").pairs
    assert [pair.verdict for pair in pairs] == ["none", "none"]
    assert "conservativeness" in pairs[0].text
    pairs = from_sglang("--enable-mixed-chunk --schedule-conservativeness 0.5").pairs
    assert [pair.verdict for pair in pairs] == ["none", "none"]
    assert "always mixes" in pairs[0].text


def test_priority_direction_is_told() -> None:
    (pair,) = from_sglang("--enable-priority-scheduling").pairs
    assert "turn the clients' values round" in pair.text


def test_environment_stays_behind() -> None:
    made = translate(parse_serve_command("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve M"))
    assert [(p.source, p.verdict) for p in made.pairs] == [("VLLM_USE_V2_MODEL_RUNNER=0", "none")]


def test_environment_that_is_no_engine_s_own_holds_for_the_other() -> None:
    text = "CUDA_VISIBLE_DEVICES=2,3 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve M -tp 2"
    made = translate(parse_serve_command(text))
    assert made.command.startswith("CUDA_VISIBLE_DEVICES=2,3 python -m sglang.launch_server ")
    verdicts = {p.source.partition("=")[0]: p.verdict for p in made.pairs if "=" in p.source}
    assert verdicts == {"CUDA_VISIBLE_DEVICES": "equal", "VLLM_USE_V2_MODEL_RUNNER": "none"}
    assert parse_serve_command(made.command).env == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_secrets_do_not_pass() -> None:
    made = from_vllm("--api-key hunter2 --max-num-seqs 4")
    assert "hunter2" not in repr(made)
    (pair,) = [pair for pair in made.pairs if pair.source == "--api-key"]
    assert (pair.target, pair.verdict, pair.text) == ("", "none", "a secret: set it again")


def test_what_the_reader_noticed_is_passed_on() -> None:
    text = "docker run --gpus all vllm/vllm-openai --model M --max-num-seqs 4 --max-num-seqs 8"
    made = translate(parse_serve_command(text))
    assert [note.subject for note in made.notes] == ["--gpus", "--max-num-seqs"]
    shown = render(made)
    assert "#   --max-num-seqs: given more than once; the last counts (8)" in shown
    assert all(line.startswith("#") for line in shown.splitlines()[1:] if line)


def test_a_length_that_fits_memory_is_left_out() -> None:
    for value in ("-1", "auto"):
        (pair,) = from_vllm(f"--max-model-len {value}").pairs
        assert (pair.verdict, pair.target) == ("none", "")


def test_a_model_is_needed() -> None:
    with pytest.raises(BadInput, match="no model"):
        translate(parse_serve_command("vllm serve --max-num-seqs 4"))


def test_every_rule_names_real_flags() -> None:
    vllm, sglang = table("vllm"), table("sglang")
    for pair in PAIRS:
        left, right = vllm.find(pair.vllm), sglang.find(pair.sglang)
        assert left is not None, pair.vllm
        assert right is not None, pair.sglang
        assert (left.name, right.name) == (pair.vllm, pair.sglang)
        assert pair.verdict == "equal" or pair.text, pair.vllm
    assert all(vllm.find(name) for name in NO_SGLANG)
    assert all(sglang.find(name) for name in NO_VLLM)
    for left_name, right_name, _ in DEFAULTS:
        assert vllm.find(left_name) is not None
        assert sglang.find(right_name) is not None


# -- there and back -----------------------------------------------------------------------------------

_WORD = st.from_regex(r"[a-z][a-z0-9/_.]{0,8}", fullmatch=True)


_ON_BOTH_SIDES = {
    "--dtype": ["auto", "bfloat16", "half"],
    "--max-lora-rank": ["8", "16", "64"],
    "--cpu-offload-gb": ["4"],
}


def _values(spelling: str, engine: str) -> st.SearchStrategy[str]:
    """Values of one flag, of its kind."""
    row = table("vllm" if engine == "vllm" else "sglang").find(spelling)
    assert row is not None
    if spelling in _ON_BOTH_SIDES:
        return st.sampled_from(_ON_BOTH_SIDES[spelling])
    if row.kind in {"int", "human", "iec"}:
        return st.integers(1, 10**6).map(str)
    if row.kind == "float":
        return st.floats(0.01, 0.99).map(str)
    if row.kind == "list":
        if "sizes" in spelling or "graph" in spelling:
            return st.lists(st.integers(1, 512).map(str), min_size=1, max_size=4).map(" ".join)
        return _WORD
    if row.kind == "json":
        return st.dictionaries(_WORD, st.integers(0, 9), max_size=2).map(json.dumps)
    return _WORD


def _simple_flags(engine: str) -> st.SearchStrategy[dict[str, str | None]]:
    """Every flag that has a counterpart and carries its value over."""
    options: dict[str, st.SearchStrategy[str | None]] = {}
    for pair in PAIRS:
        name = pair.vllm if engine == "vllm" else pair.sglang
        row = table("vllm" if engine == "vllm" else "sglang").find(name)
        assert row is not None
        if pair.inverted:
            options["--no-" + name[2:] if engine == "vllm" else name] = st.none()
        elif row.kind in {"bool", "switch"}:
            options[name] = st.none()
        else:
            options[name] = _values(name, engine)
    return st.fixed_dictionaries({}, optional=options)


_VLLM_SPECIAL: dict[str, st.SearchStrategy[str | None]] = {
    "--max-num-batched-tokens": st.integers(1, 2000).map(lambda n: str(n * 64)),
    "--no-enable-chunked-prefill": st.none(),
    "--block-size": st.sampled_from(["16", "32", "64"]),
    "--num-gpu-blocks-override": st.integers(1, 10**5).map(str),
    "--scheduling-policy": st.sampled_from(["fcfs", "priority"]),
    "--enable-expert-parallel": st.none(),
    "--prefill-schedule-interval": st.integers(1, 9).map(str),
    "--kv-cache-dtype": st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "nvfp4"]),
}
_SGLANG_SPECIAL: dict[str, st.SearchStrategy[str | None]] = {
    "--chunked-prefill-size": st.just("-1") | st.integers(1, 200).map(lambda n: str(n * 64)),
    "--page-size": st.sampled_from(["1", "16", "64"]),
    "--enable-priority-scheduling": st.none(),
    "--ep-size": st.just("8"),
    "--prefill-decode-interval": st.integers(0, 9).map(str),
    "--kv-cache-dtype": st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "nvfp4"]),
}


def _text(start: str, flags: dict[str, str | None]) -> str:
    words = shlex.split(start)
    for name, value in flags.items():
        words.append(name)
        row = table("vllm" if start.startswith("vllm") else "sglang").find(name)
        if value is not None:
            words += value.split(" ") if row is not None and row.kind == "list" else [value]
    return shlex.join(words)


def _there_and_back(start: str, flags: dict[str, str | None]) -> dict[str, str | None]:
    there = translate(parse_serve_command(_text(start, flags)))
    back = translate(parse_serve_command(there.command))
    return target_flags(back)


@settings(max_examples=150, deadline=None)
@given(_simple_flags("vllm"), st.fixed_dictionaries({}, optional=_VLLM_SPECIAL))
def test_vllm_there_and_back(simple: dict[str, str | None], special: dict[str, str | None]) -> None:
    flags = simple | special
    if "--enable-expert-parallel" in flags:
        flags["--tensor-parallel-size"] = "8"
    if "--no-enable-chunked-prefill" not in flags and "--block-size" in flags:
        flags.setdefault("--max-num-batched-tokens", "8192")
    assert _there_and_back("vllm serve M", flags) == flags


@settings(max_examples=150, deadline=None)
@given(_simple_flags("sglang"), st.fixed_dictionaries({}, optional=_SGLANG_SPECIAL))
def test_sglang_there_and_back(simple: dict[str, str | None], special: dict[str, str | None]) -> None:
    flags = simple | special
    if "--ep-size" in flags:
        flags["--tp-size"] = "8"
    if flags.get("--chunked-prefill-size") == "-1":
        flags["--max-prefill-tokens"] = "9000"
    if "--page-size" in flags:
        flags["--max-total-tokens"] = "6400"
    kept = _there_and_back("sglang serve M", flags)
    if "--enable-priority-scheduling" in flags:  # vLLM's direction and lack of preemption come back in words
        assert kept.pop("--schedule-low-priority-values-first", "") is None
        assert kept.pop("--disable-priority-preemption", "") is None
    assert kept == flags


@pytest.mark.parametrize(("name", "by"), [("vllm", BY_VLLM), ("sglang", BY_SGLANG)])
def test_no_flag_is_paired_twice(name: str, by: dict[str, object]) -> None:
    assert len(by) == len(PAIRS), name


# -- the command --------------------------------------------------------------------------------------


def test_output_is_a_paste_of_its_own() -> None:
    runner = CliRunner()
    there = runner.invoke(
        translate_cli, ["vllm serve M --max-num-seqs 8 --watermark 0.1"], catch_exceptions=False
    )
    assert there.exit_code == 0
    assert "no counterpart" in there.output
    back = runner.invoke(translate_cli, ["-"], input=there.output, catch_exceptions=False)
    assert back.output.splitlines()[0] == "vllm serve M --max-num-seqs 8"


def test_json_output() -> None:
    result = CliRunner().invoke(
        translate_cli, ["--json", "sglang serve M --page-size 16"], catch_exceptions=False
    )
    content = json.loads(result.output)
    assert content["command"] == "vllm serve M --block-size 16"
    assert content["pairs"][0]["verdict"] == "near"


@pytest.mark.parametrize(
    "content",
    [
        "serve: vllm serve M --max-num-seqs 8\n",
        "engine: {name: vllm, model: M, args: {max-num-seqs: 8}}\n",
    ],
)
def test_the_command_of_a_scenario_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(content)
    runner = CliRunner()
    wanted = runner.invoke(translate_cli, ["--serve", "vllm serve M --max-num-seqs 8"]).output.splitlines()[0]
    assert wanted.endswith("--model-path M --max-running-requests 8")
    made = runner.invoke(translate_cli, [str(path)], catch_exceptions=False)
    assert made.output.splitlines()[0] == wanted


@pytest.mark.parametrize("words", [[], ["vllm serve M", "--serve", "vllm serve M"], ["nowhere.yaml"]])
def test_one_command_that_is_there(words: list[str]) -> None:
    with pytest.raises(BadInput):
        CliRunner().invoke(translate_cli, words, catch_exceptions=False)
