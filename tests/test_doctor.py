import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import DockerException

from bench.doctor import (
    MIB,
    Subject,
    check_arch,
    check_disk,
    check_docker,
    check_gpus,
    check_kernel,
    check_model,
    check_shm,
    covers,
    environment_facts,
    examine,
    image_facts,
    is_wsl2,
)
from bench.driver_rule import allows, driver_rule
from bench.hf_cache import cache_root, find_model, inner_cache
from bench.telemetry import (
    GpuInfo,
    GpuProcess,
    GpuSample,
    GpusSilent,
    NvidiaSmi,
    Nvml,
    judge_memory,
    parse_memory,
    parse_processes,
    wait_freed,
)

WSL = "6.6.87.2-microsoft-standard-WSL2"
OLD_ARCHS = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0")


def test_an_image_without_code_for_the_gpu_is_refused_before_it_is_pulled():
    image = image_facts("engine:v1", [f"TORCH_CUDA_ARCH_LIST={' '.join(OLD_ARCHS)}"])
    failure = check_arch("NVIDIA GeForce RTX 5080", (12, 0), image)
    assert failure.kind == "gpu_arch_unsupported"
    assert not failure.retryable
    assert "sm_120" in failure.fix
    assert "CUDA>=12.8" in failure.fix
    assert check_arch("NVIDIA H100", (9, 0), image) is None


@pytest.mark.parametrize(
    ("archs", "wanted", "runs"),
    [
        (OLD_ARCHS, (6, 1), False),
        (OLD_ARCHS, (8, 7), True),  # 8.6 code runs on any later 8.x
        (("8.9",), (8, 6), False),
        (("9.0a",), (9, 0), True),
        (("10.0a",), (10, 3), False),
        (("9.0+PTX",), (12, 0), True),
        (("12.0",), (12, 1), True),
        ((), (9, 0), False),
    ],
)
def test_which_code_runs_where(archs, wanted, runs):
    assert covers(archs, wanted) is runs


def test_cuda_release_stands_in_for_an_arch_list():
    assert check_arch("RTX 5090", (12, 0), image_facts("x:cu124", [])) is not None
    assert check_arch("RTX 5090", (12, 0), image_facts("x:v1-cu129", [])) is None
    assert check_arch("RTX 5090", (12, 0), image_facts("x:v1", ["CUDA_VERSION=12.4.1"])) is not None
    assert check_arch("RTX 5090", (12, 0), image_facts("x:v1", [])) is None  # nothing known, nothing said


def test_what_an_image_asks_of_the_driver():
    facts = image_facts("x:v1", ["CUDA_VERSION=12.8.1", "NVIDIA_REQUIRE_CUDA=cuda>=12.8 brand=tesla"])
    assert (facts.cuda, facts.needs_driver_cuda) == ((12, 8), (12, 8))


def test_wsl2_is_told_by_its_kernel():
    assert is_wsl2(WSL)
    assert not is_wsl2("6.1.0-13-amd64")
    assert check_kernel(WSL, {}).status == "warn"
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY=1" in check_kernel(WSL, {}).fix
    assert check_kernel(WSL, {"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}).status == "ok"
    assert environment_facts(WSL, ("wsl2", "pin_memory=False")) == ("wsl2", "pin_memory=False")


def test_shm():
    assert check_shm(64 * MIB).status == "fail"
    assert check_shm(2048 * MIB).status == "ok"
    assert check_shm(None).status == "unknown"


def cached_model(root, *, shards=2, present=2, tokenizer=True, reference=True):
    repo = root / "models--org--Model-7B"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    if reference:
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("abc")
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"layer{i}": name for i, name in enumerate(names)}})
    )
    for name in names[:present]:
        (snapshot / name).write_text("")
    if tokenizer:
        (snapshot / "tokenizer.json").write_text("{}")
    return snapshot


def test_an_incomplete_snapshot_names_what_it_lacks(tmp_path):
    cached_model(tmp_path, shards=3, present=2, tokenizer=False)
    files = find_model("org/Model-7B", cache=tmp_path)
    assert files.missing == ("model-00003-of-00003.safetensors", "tokenizer.json|tokenizer.model")
    check = check_model("org/Model-7B", files)
    assert check.status == "fail"
    assert "hf_cache_incomplete" in check.detail


def test_a_complete_snapshot(tmp_path):
    snapshot = cached_model(tmp_path)
    files = find_model("org/Model-7B", cache=tmp_path)
    assert files.complete
    assert files.folder == snapshot


def test_a_link_to_a_blob_that_is_gone_is_missing(tmp_path):
    snapshot = cached_model(tmp_path)
    shard = snapshot / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(tmp_path / "blobs" / "gone")
    assert find_model("org/Model-7B", cache=tmp_path).missing == (shard.name,)


@pytest.mark.parametrize(
    ("model", "reference", "missing"),
    [
        ("org/Other", True, "models--org--Other"),
        ("org/Model-7B", False, "refs/main"),
    ],
)
def test_a_model_that_is_not_here(tmp_path, model, reference, missing):
    cached_model(tmp_path, reference=reference)
    files = find_model(model, cache=tmp_path)
    assert files.folder is None
    assert files.missing == (missing,)
    assert check_model(model, files).status == "warn"


def test_dummy_weights_need_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_model(str(tmp_path), weights=False).complete
    assert find_model(str(tmp_path)).missing == ("*.safetensors",)


def test_where_the_cache_is():
    assert str(cache_root({"HF_HOME": "/data/hf"})) == "/data/hf/hub"
    assert str(cache_root({"HF_HUB_CACHE": "/data/hub"})) == "/data/hub"


def test_a_cache_mounted_elsewhere_than_the_engine_looks(tmp_path):
    cache = tmp_path / "hub"
    at_home = ((tmp_path, "/root/.cache/huggingface"),)
    assert inner_cache(at_home, {}, cache) is None
    assert inner_cache(((tmp_path, "/data"),), {"HF_HOME": "/data"}, cache) is None
    assert "looks in /data/hub" in inner_cache(at_home, {"HF_HOME": "/data"}, cache)
    assert "not mounted" in inner_cache((), {}, cache)


BEFORE = "index,memory.used,memory.total\n0, 20 MiB, 24576 MiB\n1, 10 MiB, 24576 MiB\n"
AFTER = "index, memory.used [MiB], memory.total [MiB]\n0, 12020 MiB, 24576 MiB\n1, 200 MiB, 24576 MiB\n"
APPS = "pid,used_memory,name\n777, 11990 MiB, VLLM::Worker\n"


def test_memory_that_did_not_come_back_makes_the_host_dirty():
    state = judge_memory(parse_memory(BEFORE), parse_memory(AFTER), parse_processes(APPS))
    assert not state.clean
    assert state.leaked == 12000 * MIB
    assert state.pids == (777,)


def test_a_little_above_the_baseline_is_clean():
    after = AFTER.replace("12020", "500")
    assert judge_memory(parse_memory(BEFORE), parse_memory(after), ()).clean


def test_memory_that_was_never_free_is_not_ours():
    assert judge_memory(parse_memory(AFTER), parse_memory(AFTER), parse_processes(APPS)).clean


class Gpus:
    """Memory that falls by so much per look."""

    def __init__(self, used, step):
        self.used, self.step, self.now = used, step, 0.0

    def info(self):
        return (GpuInfo(0, "NVIDIA H100", (9, 0), 80 << 30, "570.1", (12, 8)),)

    def sample(self):
        self.used -= self.step
        return (GpuSample(0, max(0, self.used), 80 << 30),)

    def processes(self):
        return (GpuProcess(42, self.used, "VLLM::Worker"),)

    def sleep(self, seconds):
        self.now += seconds


def test_waiting_ends_when_memory_is_back():
    gpus = Gpus(40 << 30, 8 << 30)
    state = wait_freed(gpus, (GpuSample(0, 0, 80 << 30),), clock=lambda: gpus.now, sleep=gpus.sleep)
    assert state.clean
    assert 0 < state.waited < 5


def test_waiting_ends_when_time_is_up():
    gpus = Gpus(40 << 30, 0)
    state = wait_freed(
        gpus, (GpuSample(0, 0, 80 << 30),), timeout=30, clock=lambda: gpus.now, sleep=gpus.sleep
    )
    assert not state.clean
    assert state.pids == (42,)
    assert state.waited == pytest.approx(30, abs=1)


class Silent(Gpus):
    """A driver that answers only from `back` on."""

    def __init__(self, back):
        super().__init__(0, 0)
        self.back = back

    def sample(self):
        if self.now < self.back:
            raise GpusSilent("nvidia-smi gave no answer within 20 s")
        return super().sample()


def test_a_driver_that_is_silent_for_a_moment_is_waited_for_and_no_longer():
    gpus = Silent(5)
    before = (GpuSample(0, 0, 80 << 30),)
    assert wait_freed(gpus, before, clock=lambda: gpus.now, sleep=gpus.sleep).clean
    gpus = Silent(1000)
    with pytest.raises(GpusSilent):
        wait_freed(gpus, before, timeout=30, clock=lambda: gpus.now, sleep=gpus.sleep)
    assert gpus.now == pytest.approx(30, abs=1)


def test_a_silent_driver_is_a_warning_of_the_doctors():
    (check,) = check_gpus(Silent(1000))
    assert (check.status, "no answer" in check.detail) == ("warn", True)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo lost >&2; exit 15", "status 15: lost"),
        ("echo index", "of no use"),
    ],
)
def test_nvidia_smi_that_fails_is_one_clear_error(tmp_path, script, words):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\necho nonsense\n")
    program.chmod(0o755)
    with pytest.raises(GpusSilent, match=words):
        NvidiaSmi(str(program)).info()
    with pytest.raises(GpusSilent, match="of no use"):
        NvidiaSmi("/no/such/program").sample()


def test_gpus_that_are_in_use_are_told():
    checks = {check.name: check for check in check_gpus(Gpus(40 << 30, 0))}
    assert "sm_90" in checks["gpu 0"].detail
    assert checks["gpu 0 memory"].status == "warn"
    assert "42 VLLM::Worker" in checks["gpu 0 memory"].detail


def test_no_gpu_is_unknown_and_no_failure():
    assert [check.status for check in check_gpus(None)] == ["unknown"]


class FakeNvml:
    """As much of pynvml as is used; power is not supported."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    class Memory:
        used, total = 5 << 30, 24 << 30

    class Rates:
        gpu = 75

    class Process:
        pid, usedGpuMemory = 9, 4 << 30  # noqa: N815 - NVML's own name

    def __init__(self, count=1):
        self.count = count

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        raise self.NVMLError("not supported")

    def __getattr__(self, name):
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetMemoryInfo": self.Memory,
            "nvmlDeviceGetUtilizationRates": self.Rates,
            "nvmlDeviceGetClockInfo": 1500,
            "nvmlDeviceGetTemperature": 60,
            "nvmlDeviceGetComputeRunningProcesses": [self.Process],
            "nvmlSystemGetProcessName": b"python",
            "nvmlSystemGetDriverVersion": "570.1",
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
            "nvmlDeviceGetCudaComputeCapability": (8, 9),
            "nvmlDeviceGetName": b"NVIDIA L40S",
        }
        return lambda *args: answers[name]


def test_nvml_in_our_units_and_unsupported_is_unknown():
    nvml = Nvml(FakeNvml())
    (sample,) = nvml.sample()
    assert (sample.memory_used, sample.utilisation, sample.sm_clock, sample.power) == (
        5 << 30,
        0.75,
        1500,
        None,
    )
    (info,) = nvml.info()
    assert (info.name, info.compute_capability, info.cuda) == ("NVIDIA L40S", (8, 9), (12, 8))
    assert nvml.processes() == (GpuProcess(9, 4 << 30, "python"),)


def test_nvml_without_gpus_is_no_nvml():
    with pytest.raises(RuntimeError, match="no GPU"):
        Nvml(FakeNvml(count=0))


def test_a_gpu_that_is_lost_is_no_traceback():
    class Lost(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
            raise self.NVMLError("GPU is lost")

    for ask in (Nvml(Lost()).sample, Nvml(Lost()).info):
        with pytest.raises(GpusSilent, match="GPU is lost"):
            ask()


def test_nvidia_smi_columns():
    text = (
        "index, memory.used [MiB], memory.total [MiB], utilization.gpu [%], clocks.current.sm [MHz], "
        "power.draw [W]\n0, 1 MiB, 24576 MiB, 50 %, 1410 MHz, [N/A]\n"
    )
    (sample,) = parse_memory(text)
    assert (sample.utilisation, sample.sm_clock, sample.power) == (0.5, 1410.0, None)


def test_examining_a_host_looks_at_all_that_applies(tmp_path):
    subject = Subject(model=str(tmp_path), result_dir=tmp_path / "deep" / "er")
    checks = {check.name: check.status for check in examine(subject, gpus=Gpus(0, 0), with_docker=False)}
    assert {"kernel", "gpu 0", "shm", "disk", "model"} <= set(checks)
    assert checks["model"] == "fail"


# -- a host that does not let itself be looked at


def denied(*_args, **_more):
    raise PermissionError(13, "Permission denied", "/secret")


def test_results_that_cannot_be_written_fail_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found = check_disk(tmp_path / "file" / "deep")
    assert (found.status, "is no folder" in found.detail) == ("fail", True)
    with monkeypatch.context() as patch:
        patch.setattr("bench.doctor.os.access", lambda *_: False)
        found = check_disk(tmp_path / "new")
    assert (found.status, f"{tmp_path} cannot be written to" in found.detail) == ("fail", True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", denied)
        found = check_disk(tmp_path / "new")
    assert (found.status, "Permission denied" in found.detail) == ("fail", True)
    assert "--result-dir" in found.fix


def test_a_cache_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    cached_model(tmp_path)
    for name in ("is_dir", "read_text"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, denied)
            files = find_model("org/Model-7B", cache=tmp_path)
        assert files.unreadable == "/secret: Permission denied"
        assert not files.complete
        check = check_model("org/Model-7B", files)
        assert (check.status, "/secret: Permission denied" in check.detail) == ("warn", True)


@pytest.mark.parametrize(
    "index", ["[]", "null", "{", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": [1]}}']
)
def test_a_damaged_index_is_a_missing_one(tmp_path, index):
    name = "model.safetensors.index.json"
    (cached_model(tmp_path) / name).write_text(index)
    assert find_model("org/Model-7B", cache=tmp_path).missing == (name,)


class FakeEngine:
    """A Docker engine that is asked through a proxy: all but some questions are refused."""

    def __init__(self, refuses):
        self.refuses = refuses
        self.containers = self.images = self

    def _answer(self, question, answer):
        if question in self.refuses:
            raise self.refuses[question]
        return answer

    def version(self):
        return self._answer("version", {"Version": "27.1"})

    def info(self):
        return self._answer("info", {"Runtimes": {}})

    def list(self, **_):
        return self._answer("list", [])

    def get(self, name):
        return self._answer("get", SimpleNamespace(attrs={"Config": {"Env": ["CUDA_VERSION=12.8"]}}))

    def close(self):
        pass


@pytest.mark.parametrize(
    ("question", "check"),
    [("version", "docker"), ("info", "docker gpu"), ("list", "docker leftovers"), ("get", "image")],
)
@pytest.mark.parametrize("error", [DockerException("403 Forbidden"), TimeoutError("timed out")])
def test_a_docker_engine_that_refuses_one_question_answers_others(monkeypatch, question, check, error):
    monkeypatch.setattr("bench.servers.docker.connect", lambda: FakeEngine({question: error}))
    checks, _ = check_docker("x:cu128", Gpus(0, 0).info())
    found = {check.name: check for check in checks}
    assert {"docker", "docker gpu", "image"} <= set(found)
    assert found[check].status == "warn"
    if question != "get":
        assert str(error) in found[check].detail


def test_gpus_that_fall_silent_do_not_end_the_examination(tmp_path):
    class Mute(Gpus):
        def info(self):
            raise GpusSilent("nvidia-smi gave no answer within 20 s")

    checks = {check.name: check.status for check in examine(Subject(result_dir=tmp_path), gpus=Mute(0, 0))}
    assert checks["gpu"] == "warn"
    assert {"kernel", "shm", "disk", "docker"} <= set(checks)


REQUIRE = (
    "NVIDIA_REQUIRE_CUDA=cuda>=12.8 brand=unknown,driver>=535,driver<536 brand=tesla,driver>=535,driver<536 "
    "brand=tesla,driver>=550,driver<551"
)


@pytest.mark.parametrize(
    ("gpu", "driver", "cuda", "status"),
    [
        ("NVIDIA H100", "570.86.15", (12, 8), None),
        ("NVIDIA H100", "535.104.05", (12, 2), "warn"),  # as a Tesla it is allowed; its brand is not known
        ("NVIDIA H100", "550.54", (12, 4), "warn"),
        ("NVIDIA H100", "545.23.08", (12, 3), "fail"),  # between the alternatives
        ("NVIDIA H100", "525.60", (12, 0), "fail"),
        ("NVIDIA GeForce RTX 4090", "535.104.05", (12, 2), "fail"),  # certainly no Tesla
        ("NVIDIA H100", "535.104.05", None, None),
    ],
)
def test_an_image_may_allow_older_drivers_for_some_cards(monkeypatch, gpu, driver, cuda, status):
    engine = FakeEngine({})
    engine.get = lambda name: SimpleNamespace(attrs={"Config": {"Env": [REQUIRE]}})
    monkeypatch.setattr("bench.servers.docker.connect", lambda: engine)
    checks, facts = check_docker("x:v1", (GpuInfo(0, gpu, (9, 0), 80 << 30, driver, cuda),))
    assert facts.needs_driver_cuda == (12, 8)
    found = [check for check in checks if check.name == "driver"]
    assert [check.status for check in found] == ([] if status is None else [status])
    assert all("needs 12.8" in check.detail for check in found)


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        ("", True),
        ("cuda>=9.0,driver>=384", True),
        ("driver>=570,driver<571", True),
        ("driver>=570.2", False),
        ("arch>=10.0", False),
        ("weather=fine", None),
        ("weather=fine,driver<500", False),
    ],
)
def test_conditions_of_one_alternative_hold_together(rule, answer):
    assert allows(driver_rule(rule), Gpus(0, 0).info()[0]) is answer
