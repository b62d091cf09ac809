from pathlib import Path

import pytest

from bench.alignment import align, table
from bench.launch import LaunchOptions, choose_kind, prepare, served_name, split_program
from bench.probe.reading import FOLDER
from sim.build import read_source
from sim.errors import BadInput
from tests.real.dummy_model import write

BENCH = "vllm bench serve --dataset-name random --random-input-len 64 --random-output-len 16 --num-prompts 8"


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "tiny")


def source_of(model, flags="", **options):
    return read_source(serve=f"vllm serve {model} {flags}", bench=BENCH, gpu="cpu", **options)


def spec_of(model, folder, flags="", **options):
    source = source_of(model, flags)
    launch = prepare(source, source.build(), LaunchOptions(**options), folder, "run", has_gpus=False)
    return launch, launch.server._spec


def test_a_process_gets_the_users_flags_and_our_port(model, tmp_path):
    launch, spec = spec_of(model, tmp_path, "--max-num-seqs 4 --host 0.0.0.0 --port 8123 --enforce-eager")
    assert launch.kind == "process"
    assert spec.command == ("vllm", "serve", str(model), "--max-num-seqs", "4", "--enforce-eager")
    assert spec.port == 8123
    assert launch.model_id == str(model)


def test_a_program_of_ones_own(model, tmp_path):
    _, spec = spec_of(model, tmp_path, program=split_program("/venv/bin/python -m vllm.x"))
    assert spec.command[:4] == ("/venv/bin/python", "-m", "vllm.x", "serve")


def test_the_served_name_is_what_requests_carry(model, tmp_path):
    launch, _ = spec_of(model, tmp_path, "--served-model-name a b")
    assert launch.model_id == "a"
    assert served_name(source_of(model)) == str(model)


def test_the_environment_of_the_command_and_of_the_option(model, tmp_path):
    source = read_source(serve=f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {model}", bench=BENCH, gpu="cpu")
    options = LaunchOptions(env={"TORCHDYNAMO_DISABLE": "1"})
    launch = prepare(source, source.build(), options, tmp_path, "run", has_gpus=False)
    assert launch.server._spec.env == {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}


def test_the_probe_goes_onto_the_path(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/already/there")
    launch, spec = spec_of(model, tmp_path, probe=True)
    assert spec.command[-2:] == ("--scheduler-cls", "servecast_step_probe.make_scheduler")
    assert spec.env["PYTHONPATH"] == f"{FOLDER}:/already/there"
    assert spec.env["SERVECAST_STEPS"] == str(launch.steps_path)


def test_the_probe_does_not_oust_a_scheduler_of_the_users(model, tmp_path):
    with pytest.raises(BadInput, match="--probe"):
        spec_of(model, tmp_path, "--scheduler-cls x.Y", probe=True)


def test_a_container_mounts_the_model_read_only_and_serves_it_under_its_name(model, tmp_path):
    launch, spec = spec_of(model, tmp_path, image="repo/engine:v1")
    assert launch.kind == "docker"
    assert spec.docker.entrypoint == ("vllm",)
    assert spec.command == ("serve", "/models/tiny", "--served-model-name", str(model))
    assert spec.docker.mounts == ((model, "/models/tiny"),)
    assert spec.docker.gpus is None
    assert launch.model_id == str(model)


def test_a_container_with_the_probe_writes_into_the_results(model, tmp_path):
    launch, spec = spec_of(model, tmp_path, image="repo/engine:v1", probe=True)
    assert (FOLDER, "/opt/servecast-probe") in spec.docker.mounts
    assert spec.docker.writable == ((launch.steps_path.parent, "/opt/servecast-out"),)
    assert spec.env["SERVECAST_STEPS"] == "/opt/servecast-out/run.steps.jsonl"


def test_a_container_of_a_cached_model_mounts_the_cache(tmp_path, monkeypatch):
    cache = tmp_path / "hf"
    snapshot = cache / "hub" / "models--Qwen--Qwen2.5-7B-Instruct" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HOME", str(cache))
    source = read_source(serve="vllm serve Qwen/Qwen2.5-7B-Instruct", bench=BENCH, gpu="H100")
    options = LaunchOptions(image="repo/engine:v1")
    spec = prepare(source, source.build(), options, tmp_path, "run", has_gpus=True).server._spec
    assert spec.docker.mounts == ((cache / "hub", "/root/.cache/huggingface/hub"),)
    assert spec.env["HF_HOME"] == "/root/.cache/huggingface"
    assert spec.docker.gpus == "all"
    moved = LaunchOptions(image="repo/engine:v1", env={"HF_HOME": "/data"})
    spec = prepare(source, source.build(), moved, tmp_path, "run", has_gpus=True).server._spec
    assert spec.docker.mounts == ((cache / "hub", "/data/hub"),)
    elsewhere = LaunchOptions(image="repo/engine:v1", mounts=((cache, "/elsewhere"),))
    with pytest.raises(BadInput, match="but the engine looks in"):
        prepare(source, source.build(), elsewhere, tmp_path, "run", has_gpus=True)


def test_an_image_in_the_serve_command_means_docker(model):
    serve = f"docker run --gpus all vllm/vllm-openai:v0.28.0 --model {model}"
    source = read_source(serve=serve, bench=BENCH, gpu="cpu")
    assert choose_kind(source, LaunchOptions()) == "docker"
    assert choose_kind(source, LaunchOptions(kind="process")) == "process"
    assert choose_kind(source, LaunchOptions(base_url="http://127.0.0.1:1")) == "url"


def test_a_server_that_only_the_clients_command_names_is_not_passed_over(model):
    far = read_source(serve=f"vllm serve {model}", bench=f"{BENCH} --base-url http://gpu7:8000", gpu="cpu")
    with pytest.raises(BadInput, match=r"http://gpu7:8000.*--base-url"):
        choose_kind(far, LaunchOptions())
    assert choose_kind(far, LaunchOptions(base_url="http://gpu7:8000")) == "url"
    assert choose_kind(far, LaunchOptions(kind="process")) == "process"
    near = read_source(serve=f"vllm serve {model}", bench=f"{BENCH} --port 8000", gpu="cpu")
    assert choose_kind(near, LaunchOptions()) == "process"


@pytest.mark.parametrize("options", [{"kind": "url"}, {"kind": "docker", "base_url": "http://x:1"}])
def test_options_that_contradict_each_other(model, options):
    with pytest.raises(BadInput, match="--base-url"):
        choose_kind(source_of(model), LaunchOptions(**options))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"gpus": ("0", "1")}, "--gpus"),
        ({"gpus": "all"}, "--gpus"),
        ({"mounts": ((Path("/data"), "/data"),)}, "--mount"),
        ({"shm_bytes": 1 << 30}, "--shm-size"),
        ({"network": "host"}, "--network"),
        ({"image": "repo/engine:v1"}, "--image"),
    ],
)
@pytest.mark.parametrize("where", [{"kind": "process"}, {"base_url": "http://127.0.0.1:1"}])
def test_options_of_a_container_are_refused_elsewhere(model, options, flag, where):
    with pytest.raises(BadInput, match="--launch docker") as refused:
        choose_kind(source_of(model), LaunchOptions(**options, **where))
    assert refused.value.field == flag
    assert choose_kind(source_of(model), LaunchOptions(**options, kind="docker")) == "docker"


def test_a_running_server_takes_no_probe(model, tmp_path):
    with pytest.raises(BadInput, match="--probe"):
        spec_of(model, tmp_path, base_url="http://127.0.0.1:1", probe=True)


def test_sglang_is_told_to_export_metrics(model, tmp_path):
    source = read_source(
        serve=f"python -m sglang.launch_server --model-path {model} --max-running-requests 4",
        bench=BENCH,
        gpu="H100",
    )
    launch = prepare(source, source.build(), LaunchOptions(), tmp_path, "run", has_gpus=False)
    words = launch.server._spec.command
    assert words[:5] == ("python3", "-m", "sglang.launch_server", "--model-path", str(model))
    assert words[-1] == "--enable-metrics"
    assert [note.subject for note in launch.notes] == ["--enable-metrics"]


@pytest.mark.parametrize("text", ["", "'open"])
def test_a_program_that_is_none(text):
    with pytest.raises(BadInput, match="--program"):
        split_program(text)


def test_one_engine_beside_itself_shows_what_differs(model):
    first = source_of(model, "--max-num-seqs 4").build()
    second = source_of(model, "--max-num-seqs 8").build()
    different = {line.names[0] for line in align(first, second) if line.same is False}
    assert different == {"max_num_seqs"}


def test_two_engines_are_lined_up_knob_by_knob(model):
    first = read_source(serve=f"vllm serve {model}", bench=BENCH, gpu="H100").build()
    second = read_source(
        serve=f"python -m sglang.launch_server --model-path {model} --page-size 16 --disable-radix-cache",
        bench=BENCH,
        gpu="H100",
    ).build()
    lines = {line.names: line for line in align(first, second)}
    assert lines["workload", "workload"].same
    assert lines["engine", "engine"].same is False
    assert lines["block_size", "page_size"].values == (16, 16)
    caching = lines["enable_prefix_caching", "disable_radix_cache"]
    assert (caching.values, caching.same) == ((True, False), False)
    assert lines["max_num_batched_tokens", "chunked_prefill_size"].caveat
    rows = {row[0]: row for row in table(align(first, second))}
    assert rows["enable_mixed_chunk"][1] == "no counterpart"
    assert Path(rows["model"][1]) == model


def test_loads_that_differ_are_said_to(model):
    first = source_of(model).build()
    second = source_of(model, sets=["bench.num-prompts=9"]).build()
    line = next(line for line in align(first, second) if line.names[0] == "workload")
    assert line.values == ("num_prompts=8", "num_prompts=9")
