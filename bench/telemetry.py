"""The GPU's own figures: memory, utilisation, clocks, power; and whether its memory came back.

From NVML (extra `[gpu]`), else from `nvidia-smi`; where neither is to be had, there is no telemetry, and
that is None, not zeros.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

from sim.errors import ServecastError

MIB = 1 << 20
TOLERANCE = 500 * MIB  # drivers and displays keep a little; engines hold gigabytes
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment; None is "not supported".

    Attributes:
        index: of the device.
        memory_used, memory_total: [bytes].
        utilisation: share of the last period in which a kernel ran, 0..1.
        sm_clock, memory_clock: [MHz].
        power: [W].
        temperature: [degrees C].
    """

    index: int
    memory_used: int
    memory_total: int
    utilisation: float | None = None
    sm_clock: float | None = None
    memory_clock: float | None = None
    power: float | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds GPU memory [bytes]."""

    pid: int
    memory: int | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """What does not change: product name, compute capability, driver and the newest CUDA that it runs."""

    index: int
    name: str
    compute_capability: tuple[int, int] | None
    memory_total: int
    driver: str
    cuda: tuple[int, int] | None


class GpusSilent(ServecastError):
    """The driver, or the tool that asks it, gave no answer that can be read."""


class Gpus(Protocol):
    """The GPUs of this host; each question may raise `GpusSilent`."""

    def info(self) -> tuple[GpuInfo, ...]:
        """One entry per GPU."""
        ...

    def sample(self) -> tuple[GpuSample, ...]:
        """All GPUs now."""
        ...

    def processes(self) -> tuple[GpuProcess, ...]:
        """Who holds memory on any of them."""
        ...


def open_gpus() -> Gpus | None:
    """NVML if the extra `[gpu]` is installed and a driver answers, else nvidia-smi, else None."""
    try:
        return Nvml(import_module("pynvml"))
    except (ImportError, OSError, RuntimeError):
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    smi = NvidiaSmi(program)
    try:
        return smi if smi.info() else None
    except GpusSilent:
        return None


class Nvml:
    """NVML through the module `pynvml` of nvidia-ml-py.

    Raises:
        RuntimeError: no driver answers.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except nvml.NVMLError as error:
            raise RuntimeError(str(error)) from error
        if not self._handles:
            raise RuntimeError("no GPU")

    def info(self) -> tuple[GpuInfo, ...]:
        """One entry per GPU."""
        nvml = self._nvml
        driver = _text(self._ask(nvml.nvmlSystemGetDriverVersion))
        version = self._ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        cuda = None if version is None else (version // 1000, version % 1000 // 10)
        found = []
        for index, handle in enumerate(self._handles):
            memory = self._memory(handle)
            capability = self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
            found.append(
                GpuInfo(
                    index,
                    _text(self._ask(nvml.nvmlDeviceGetName, handle)),
                    None if capability is None else (int(capability[0]), int(capability[1])),
                    int(memory.total),
                    driver,
                    cuda,
                )
            )
        return tuple(found)

    def sample(self) -> tuple[GpuSample, ...]:
        """All GPUs now."""
        nvml = self._nvml
        found = []
        for index, handle in enumerate(self._handles):
            memory = self._memory(handle)
            rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
            power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
            found.append(
                GpuSample(
                    index,
                    int(memory.used),
                    int(memory.total),
                    None if rates is None else rates.gpu / 100,
                    self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
                    self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
                    None if power is None else power / 1000,
                    self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                )
            )
        return tuple(found)

    def processes(self) -> tuple[GpuProcess, ...]:
        """Who holds memory on any of them."""
        found: dict[int, GpuProcess] = {}
        for handle in self._handles:
            for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
                name = _text(self._ask(self._nvml.nvmlSystemGetProcessName, process.pid))
                found[process.pid] = GpuProcess(int(process.pid), process.usedGpuMemory, name)
        return tuple(found.values())

    def _memory(self, handle: Any) -> Any:
        """What every GPU tells, unless it is lost."""
        try:
            return self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:
            raise GpusSilent(f"the GPU driver does not answer: {error}") from error

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None where this GPU or driver has none."""
        try:
            return function(*args)
        except self._nvml.NVMLError:
            return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


class NvidiaSmi:
    """The same from the command-line tool, which every driver brings; slower, so for single looks."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = program

    def info(self) -> tuple[GpuInfo, ...]:
        """One entry per GPU; the driver's CUDA version is not among nvidia-smi's CSV figures."""
        return self._query("--query-gpu=index,name,compute_cap,memory.total,driver_version", parse_info)

    def sample(self) -> tuple[GpuSample, ...]:
        """All GPUs now."""
        fields = (
            "index,memory.used,memory.total,utilization.gpu,clocks.sm,clocks.mem,power.draw,temperature.gpu"
        )
        return self._query(f"--query-gpu={fields}", parse_memory)

    def processes(self) -> tuple[GpuProcess, ...]:
        """Who holds memory on any of them."""
        return self._query("--query-compute-apps=pid,used_memory,name", parse_processes)

    def _query(self, query: str, read: Callable[[str], _Found]) -> _Found:
        words = [self._program, query, "--format=csv"]
        try:
            done = subprocess.run(  # noqa: S603 - fixed arguments
                words, capture_output=True, text=True, timeout=20, check=True
            )
            return read(done.stdout)
        except subprocess.CalledProcessError as error:
            said = " ".join((error.stdout + error.stderr).split())[:200]
            raise GpusSilent(f"nvidia-smi ended with status {error.returncode}: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise GpusSilent(f"nvidia-smi gave no answer within {error.timeout:.0f} s") from error
        except (OSError, LookupError, ValueError) as error:
            raise GpusSilent(f"nvidia-smi is of no use here: {error!r}") from error


def capability(text: str) -> tuple[int, int] | None:
    """ "12.0" -> (12, 0); None for anything else."""
    major, _, minor = text.strip().partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def parse_info(text: str) -> tuple[GpuInfo, ...]:
    """What does not change, from nvidia-smi's CSV; the newest CUDA is not among its figures."""
    return tuple(
        GpuInfo(
            int(row["index"]),
            row["name"],
            capability(row["compute_cap"]),
            _bytes(row["memory.total"]) or 0,
            row["driver_version"],
            None,
        )
        for row in _rows(text)
    )


def parse_memory(text: str) -> tuple[GpuSample, ...]:
    """Samples from nvidia-smi's CSV (`--format=csv`, with units); columns that are missing stay None."""
    return tuple(
        GpuSample(
            int(row.get("index", position)),
            _bytes(row.get("memory.used", "")) or 0,
            _bytes(row.get("memory.total", "")) or 0,
            None if (rate := _figure(row, "utilization.gpu")) is None else rate / 100,
            _figure(row, "clocks.current.sm", "clocks.sm"),
            _figure(row, "clocks.current.memory", "clocks.mem"),
            _figure(row, "power.draw"),
            _figure(row, "temperature.gpu"),
        )
        for position, row in enumerate(_rows(text))
    )


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Processes from nvidia-smi's CSV of compute apps."""
    found = []
    for row in _rows(text):
        used = next((row[key] for key in ("used_memory", "used_gpu_memory") if key in row), "")
        name = row.get("name", row.get("process_name", ""))
        found.append(GpuProcess(int(row["pid"]), _bytes(used), name))
    return tuple(found)


def _rows(text: str) -> list[dict[str, str]]:
    table = list(csv.reader(io.StringIO(text.strip()), skipinitialspace=True))
    if not table:
        return []
    # Headings carry their unit: "memory.used [MiB]".
    heads = [head.split(" [")[0].strip() for head in table[0]]
    return [dict(zip(heads, (cell.strip() for cell in row), strict=False)) for row in table[1:] if row]


def _figure(row: dict[str, str], *names: str) -> float | None:
    for name in names:
        words = row.get(name, "").split()
        if words:
            try:
                return float(words[0])
            except ValueError:
                return None
    return None


def _bytes(text: str) -> int | None:
    words = text.split()
    if not words or not words[0].isdigit():
        return None
    units = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}
    return int(words[0]) * units.get(words[1] if len(words) > 1 else "MiB", MIB)


@dataclass(frozen=True, slots=True)
class HostState:
    """Whether an engine's GPU memory came back after it was stopped.

    Attributes:
        clean: every GPU is back at its baseline, within the tolerance.
        leaked: memory above the baseline, over all GPUs that are not back [bytes].
        pids: who holds GPU memory now; none of them is touched by us.
        waited: how long it took, or how long we waited in vain [s].
    """

    clean: bool
    leaked: int
    pids: tuple[int, ...]
    waited: float = 0.0


def judge_memory(
    before: Sequence[GpuSample], after: Sequence[GpuSample], processes: Sequence[GpuProcess]
) -> HostState:
    """Compare the GPUs' memory after a stop with the baseline before the start."""
    baseline = {sample.index: sample.memory_used for sample in before}
    extra = [sample.memory_used - baseline.get(sample.index, sample.memory_used) for sample in after]
    leaked = sum(amount for amount in extra if amount > TOLERANCE)
    if not leaked:
        return HostState(True, 0, ())
    return HostState(False, leaked, tuple(process.pid for process in processes))


def wait_freed(
    gpus: Gpus,
    before: Sequence[GpuSample],
    *,
    timeout: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> HostState:
    """Poll until the memory is back, or the time is up: then the host is dirty.

    Raises:
        GpusSilent: the driver had no answer to the last poll either.
    """
    began = clock()
    while True:
        waited = clock() - began
        try:
            state = judge_memory(before, gpus.sample(), gpus.processes())
        except GpusSilent:
            if waited > timeout:
                raise
        else:
            waited = clock() - began
            if state.clean or waited > timeout:
                return HostState(state.clean, state.leaked, state.pids, waited)
        sleep(0.5)
