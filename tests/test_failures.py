import pytest

from bench.failures import EngineFailed, classify

LINES = {
    "gpu_arch_unsupported": "RuntimeError: CUDA error: no kernel image is available for execution "
    "on the device",
    "wsl2_no_uva": "ERROR [core.py:1] RuntimeError: UVA is not available",
    "hf_cache_incomplete": "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an "
    "appropriate cached "
    "snapshot folder",
    "oom_sampler_warmup": "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy "
    "requests.",
    "shm_too_small": "RuntimeError: Insufficient space in /dev/shm: 160 MiB required, 64 MiB free.",
    "port_taken": "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', "
    "8101): address "
    "already in use",
    "name_taken": 'Conflict. The container name "/bench" is already in use by container "0f".',
    "gpu_memory_not_free": "ValueError: Free memory on device cuda:0 (20.0/80.0 GiB) on startup is less than "
    "desired GPU memory utilization (0.9, 72.0 GiB).",
    "no_gpu_runtime": 'could not select device driver "" with capabilities: [[gpu]]',
    "bad_flag": "vllm serve: error: unrecognized arguments: --max-num-sequences 4",
    "negative_kv": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
}


@pytest.mark.parametrize(("kind", "line"), LINES.items())
def test_known_failures_are_named_with_a_fix(kind, line):
    failure = classify(f"INFO all well\n{line}\nRuntimeError: Engine core initialization failed.\n")
    assert failure.kind == kind
    assert failure.line == line
    assert failure.fix
    assert "\n" not in str(failure)


def test_a_sampler_that_does_not_fit_names_max_num_seqs():
    assert classify(LINES["oom_sampler_warmup"]).flag == "max_num_seqs"


def test_a_failure_does_not_tell_a_key():
    failure = classify("EngineError: could not start with {'api_key': ['S3CRET'], 'port': 1}")
    assert "S3CRET" not in str(failure)
    assert "'port': 1" in failure.line


def test_negative_kv_says_by_how_much():
    log = "INFO Available KV cache memory: -0.75 GiB\nValueError: No available memory for the cache blocks."
    failure = classify(log)
    assert (failure.kind, failure.flag) == ("negative_kv", "gpu_memory_utilization")
    assert "-0.75 GiB" in failure.fix


def test_a_request_that_does_not_fit_names_the_longest_that_does():
    failure = classify(
        "ValueError: To serve at least one request with the model's max seq len (65536), (8.00 "
        "GiB KV cache is "
        "needed ...). Based on the available memory, the estimated maximum model length is 30,720."
    )
    assert failure.kind == "kv_lt_one_request"
    assert "--max-model-len 30720" in failure.fix


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."


@pytest.mark.parametrize(
    ("before", "phase", "kind"),
    [
        ("INFO Starting to load model m...", "startup", "oom_weights"),
        ("INFO Loading weights took 3.1 seconds", "startup", "oom_activations"),
        (
            "INFO Loading weights took 3.1 seconds\nCapturing CUDA graphs: 10%",
            "startup",
            "oom_graph_capture",
        ),
        ("INFO Application startup complete.", "run", "oom_run"),
    ],
)
def test_out_of_memory_is_told_apart_by_phase(before, phase, kind):
    assert classify(f"{before}\n{OOM}", phase=phase).kind == kind


def test_memory_that_others_hold_gives_the_share_that_is_left():
    failure = classify(LINES["gpu_memory_not_free"])
    assert failure.retryable
    assert "--gpu-memory-utilization 0.25" in failure.fix


def test_wsl2_suggests_the_variable_and_keeps_the_facts():
    warning = "WARNING [interface.py:1] Using 'pin_memory=False' as WSL is detected."
    log = f"{warning}\nRuntimeError: UVA is not available"
    failure = classify(log)
    assert failure.env == {"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}
    assert failure.facts == ("wsl2", "pin_memory=False")


@pytest.mark.parametrize(
    ("code", "word"), [(-9, "SIGKILL"), (137, "SIGKILL"), (-4, "SIGILL"), (135, "SIGBUS"), (3, "status 3")]
)
def test_an_unknown_end_tells_what_is_known(code, word):
    failure = classify("INFO loading\n", exit_code=code)
    assert failure.kind == "engine_exited_during_startup"
    assert word in failure.fix


def test_only_a_log_that_is_there_is_pointed_to():
    assert "the log's last lines" in classify("INFO loading\n", exit_code=3).fix
    for code in (None, 3, -11):
        told = classify("", phase="run", exit_code=code).fix
        assert "last lines" not in told
        assert "where it was started" in told


def test_an_unknown_end_quotes_the_last_error():
    assert classify("ValueError: odd thing\nINFO bye\n", exit_code=1).line == "ValueError: odd thing"
    assert classify("", phase="run").kind == "engine_exited_during_run"


def test_it_prints_as_one_line():
    assert str(EngineFailed(classify(LINES["port_taken"], phase="launch"))).startswith(
        "engine launch: port_taken"
    )
