"""Looks at this host before a run: what would fail after minutes of loading is told in a second."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.driver_rule import Rule, allows, driver_rule, least_cuda
from bench.failures import EngineFailed, Failure
from bench.hf_cache import ModelFiles, find_model
from bench.telemetry import MIB, TOLERANCE, GpuInfo, Gpus, GpusSilent, capability, open_gpus

GIB = 1 << 30
Status = Literal["ok", "warn", "fail", "unknown"]

# The first CUDA release whose compiler makes code for a compute capability (CUDA release notes).
_FIRST_CUDA: Mapping[tuple[int, int], tuple[int, int]] = {
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (12, 0): (12, 8),
    (10, 3): (12, 9),
    (12, 1): (12, 9),
}
MIN_SHM = 256 * MIB  # one vLLM worker group asks for 160 MiB
MIN_DISK = 5 * GIB


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What an image says of itself; None is "does not say".

    Attributes:
        cuda: the CUDA release that it was built with.
        arch_list: compute capabilities that it has code for, as torch writes them ("9.0", "12.0+PTX").
        needs_driver_cuda: the oldest CUDA of a driver that is enough on every GPU.
        driver_rule: all that it asks of the driver, exceptions for some cards included; () is nothing.
    """

    name: str
    cuda: tuple[int, int] | None = None
    arch_list: tuple[str, ...] | None = None
    needs_driver_cuda: tuple[int, int] | None = None
    driver_rule: Rule = ()


def image_facts(name: str, env: Sequence[str]) -> ImageFacts:
    """Facts from an image's environment (NVIDIA's base images) and, failing that, from its tag."""
    values = dict(item.partition("=")[::2] for item in env)
    cuda = _version(values.get("CUDA_VERSION", ""))
    if cuda is None and (tag := re.search(r"cu(?:da)?-?(1[1-9])\.?(\d)", name.rpartition(":")[2])):
        cuda = int(tag[1]), int(tag[2])
    archs = values.get("TORCH_CUDA_ARCH_LIST", "")
    rule = driver_rule(values.get("NVIDIA_REQUIRE_CUDA", ""))
    return ImageFacts(
        name,
        cuda,
        tuple(re.split(r"[ ;,]+", archs.strip())) if archs.strip() else None,
        least_cuda(rule),
        rule,
    )


def _version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def covers(arch_list: Sequence[str], wanted: tuple[int, int]) -> bool:
    """Whether code for one of `arch_list` runs on a GPU of capability `wanted`.

    Binary code runs on the same major and an equal or higher minor version (but "9.0a" on exactly that
    one); PTX ("+PTX") is compiled for anything newer.
    """
    for entry in arch_list:
        text = entry.lower().removesuffix("+ptx")
        exact = text.endswith(("a", "f"))
        has = capability(text.rstrip("af"))
        if has is None:
            continue
        if has == wanted or (not exact and has[0] == wanted[0] and has[1] <= wanted[1]):
            return True
        if entry.lower().endswith("+ptx") and has <= wanted:
            return True
    return False


def check_arch(gpu_name: str, wanted: tuple[int, int], image: ImageFacts) -> Failure | None:
    """Whether an image has code for a GPU; None if it has, or if the image does not tell."""
    sm = f"sm_{wanted[0]}{wanted[1]}"
    first = _FIRST_CUDA.get(wanted)
    hint = f"take an image with {sm}" + (f" / CUDA>={first[0]}.{first[1]}" if first else "")
    if wanted[0] == 12:
        hint += " (tags with cu129 or cu130)"
    if image.arch_list is not None:
        if covers(image.arch_list, wanted):
            return None
        line = f"{gpu_name} is {sm}; {image.name} has {', '.join(image.arch_list)}"
        return Failure("gpu_arch_unsupported", "startup", line, hint)
    if image.cuda is not None and first is not None and image.cuda < first:
        line = f"{gpu_name} is {sm}; {image.name} is built with CUDA {image.cuda[0]}.{image.cuda[1]}"
        return Failure("gpu_arch_unsupported", "startup", line, hint)
    return None


def is_wsl2(release: str) -> bool:
    """Whether a kernel release string is that of WSL2."""
    return "microsoft" in release.lower()


def check_kernel(release: str, env: Mapping[str, str]) -> Check:
    """WSL2 has no pinned memory unless told so; bare Linux is fine."""
    if not is_wsl2(release):
        return Check("kernel", "ok", release)
    if env.get("VLLM_WSL2_ENABLE_PIN_MEMORY") == "1":
        return Check("kernel", "ok", f"WSL2 ({release}), pinned memory enabled")
    return Check(
        "kernel",
        "warn",
        f"WSL2 ({release}): without pinned memory vLLM is slower, or fails with 'UVA is not available'",
        "set VLLM_WSL2_ENABLE_PIN_MEMORY=1; figures measured so do not carry over to bare Linux",
    )


def environment_facts(release: str, log_facts: Sequence[str] = ()) -> tuple[str, ...]:
    """Short facts of the host that decide whether a calibration carries over to another."""
    facts = ["wsl2"] if is_wsl2(release) else []
    return tuple(dict.fromkeys([*facts, *log_facts]))


def check_gpus(gpus: Gpus | None) -> list[Check]:
    """Driver, GPUs, and who holds their memory."""
    if gpus is None:
        return [
            Check(
                "gpu",
                "unknown",
                "no NVIDIA driver answers (NVML and nvidia-smi)",
                "for a GPU: install its driver, and in servecast's folder: pip install '.[gpu]'",
            )
        ]
    try:
        return _gpu_checks(gpus)
    except GpusSilent as error:
        return [Check("gpu", "warn", str(error), "nvidia-smi must answer before an engine finds its GPU")]


def _gpu_checks(gpus: Gpus) -> list[Check]:
    checks = []
    for info, sample in zip(gpus.info(), gpus.sample(), strict=True):
        sm = "" if info.compute_capability is None else f", sm_{''.join(map(str, info.compute_capability))}"
        cuda = "" if info.cuda is None else f", CUDA up to {info.cuda[0]}.{info.cuda[1]}"
        total = info.memory_total / GIB
        text = f"{info.name}{sm}, {total:.1f} GiB, driver {info.driver}{cuda}"
        checks.append(Check(f"gpu {info.index}", "ok", text))
        if sample.memory_used > TOLERANCE:
            pids = ", ".join(f"{p.pid} {p.name}".strip() for p in gpus.processes()) or "none that NVML names"
            checks.append(
                Check(
                    f"gpu {info.index} memory",
                    "warn",
                    f"{sample.memory_used / GIB:.1f} GiB are in use (processes: {pids})",
                    "an engine would start with a smaller KV pool: stop them first",
                )
            )
    return checks


def check_shm(free: int | None) -> Check:
    """Shared memory of this host: engines pass batches to their workers through it."""
    if free is None:
        return Check("shm", "unknown", "there is no /dev/shm")
    if free < MIN_SHM:
        return Check(
            "shm", "fail", f"{free // MIB} MiB free in /dev/shm", "mount -o remount,size=1g /dev/shm"
        )
    return Check("shm", "ok", f"{free / GIB:.1f} GiB free in /dev/shm")


def check_disk(folder: Path) -> Check:
    """Room for logs and results, and for what an engine compiles; and whether they may be written there."""
    fix = "choose another --result-dir"
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        is_folder = existing.is_dir()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Check("disk", "fail", f"{folder} cannot be looked at: {error.strerror or error}", fix)
    if not is_folder or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written to" if is_folder else "is no folder"
        return Check("disk", "fail", f"{existing} {why}, and results are to go to {folder}", fix)
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if free < MIN_DISK:
        return Check("disk", "warn", text, f"engines and results want {MIN_DISK // GIB} GiB")
    return Check("disk", "ok", text)


def check_docker(image: str | None, gpus: Sequence[GpuInfo]) -> tuple[list[Check], ImageFacts | None]:
    """The Docker engine, what it can do, what an earlier run left in it, and the image."""
    from bench.servers.docker import connect, image_env
    from bench.servers.docker_asking import asked

    try:
        client = connect()
    except EngineFailed as error:
        status: Status = "fail" if image else "warn"
        return [Check("docker", status, error.failure.line or "no Docker", error.failure.fix)], None
    facts: ImageFacts | None = None
    checks: list[Check] = []
    try:
        questions: list[tuple[str, Callable[[], list[Check]]]] = [
            ("docker", lambda: _docker_version(client)),
            ("docker gpu", lambda: _docker_gpus(client) if gpus else []),
            ("docker leftovers", lambda: _docker_leftovers(client)),
        ]
        for name, question in questions:
            try:
                checks += asked(question)
            except EngineFailed as error:
                text = f"Docker says nothing: {error.failure.line}"
                checks.append(Check(name, "warn", text, error.failure.fix))
        if image:
            try:
                env = asked(lambda: image_env(client, image))
            except EngineFailed as error:
                checks.append(Check("image", "warn", f"{image}: {error.failure.line}", error.failure.fix))
            else:
                facts = None if env is None else image_facts(image, env)
                checks += _check_image(image, facts, gpus)
        return checks, facts
    finally:
        client.close()


def _docker_version(client: Any) -> list[Check]:
    return [Check("docker", "ok", f"engine {client.version().get('Version', 'of unknown version')}")]


def _docker_gpus(client: Any) -> list[Check]:
    if "nvidia" in (client.info().get("Runtimes") or {}):
        return []
    return [
        Check(
            "docker gpu",
            "warn",
            "the engine names no nvidia runtime",
            "install nvidia-container-toolkit (unless it hands GPUs on through CDI)",
        )
    ]


def _docker_leftovers(client: Any) -> list[Check]:
    from bench.servers.docker import leftovers

    names = " ".join(leftovers(client))
    text, fix = f"of an earlier run: {names}", f"docker rm -f {names}"
    return [Check("docker leftovers", "warn", text, fix)] if names else []


def _check_image(name: str, facts: ImageFacts | None, gpus: Sequence[GpuInfo]) -> list[Check]:
    if facts is None:
        # Its tag may still tell that it is the wrong one, before gigabytes are pulled.
        facts, checks = image_facts(name, []), [Check("image", "warn", f"{name} is not on this host: pulled")]
    else:
        checks = [Check("image", "ok", f"{name} is on this host")]
    for gpu in gpus:
        if gpu.compute_capability and (failure := check_arch(gpu.name, gpu.compute_capability, facts)):
            checks.append(Check("image arch", "fail", failure.line, failure.fix))
        checks += _check_driver(name, facts, gpu)
    return checks


def _check_driver(name: str, facts: ImageFacts, gpu: GpuInfo) -> list[Check]:
    """Whether a GPU's driver is new enough for an image; nothing is said where its CUDA is not known."""
    if gpu.cuda is None or (may := allows(facts.driver_rule, gpu)):
        return []
    least = facts.needs_driver_cuda
    need = " or ".join(map(",".join, facts.driver_rule)) if least is None else f"{least[0]}.{least[1]}"
    text = f"driver {gpu.driver} runs CUDA up to {gpu.cuda[0]}.{gpu.cuda[1]}; {name} needs {need}"
    fix = "update the driver, or take an image of an older CUDA"
    if may is None:
        text += ", or for some cards an older driver, as this one may be"
        return [Check("driver", "warn", text, f"if it does not start: {fix}")]
    return [Check("driver", "fail", text, fix)]


def check_model(model: str, files: ModelFiles) -> Check:
    """The model's files."""
    if files.complete:
        return Check("model", "ok", f"{model} is complete in {files.folder}")
    if files.unreadable is not None:
        text = f"whether {model} is complete is not known ({files.unreadable})"
        fix = "let this user read it, or set HF_HOME to a cache that it may read"
        return Check("model", "warn", text, fix)
    if files.folder is None:
        return Check(
            "model",
            "warn",
            f"{model} is not on this host ({', '.join(files.missing)})",
            f"hf download {model}; offline engines cannot start without it",
        )
    return Check(
        "model",
        "fail",
        f"hf_cache_incomplete: {model} lacks {', '.join(files.missing)}",
        f"hf download {model}",
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """What a run would use, as far as known."""

    model: str | None = None
    image: str | None = None
    weights: bool = True
    result_dir: Path = Path("servecast-results")
    env: Mapping[str, str] = field(default_factory=dict)


def examine(subject: Subject, *, gpus: Gpus | None = None, with_docker: bool = True) -> list[Check]:
    """All checks that apply."""
    found = gpus if gpus is not None else open_gpus()
    checks = [check_kernel(platform.release(), {**os.environ, **subject.env}), *check_gpus(found)]
    checks += [check_shm(_shm_free()), check_disk(subject.result_dir.absolute())]
    if with_docker:
        checks += check_docker(subject.image, _infos(found))[0]
    if subject.model is not None:
        checks.append(check_model(subject.model, find_model(subject.model, weights=subject.weights)))
    return checks


def _infos(gpus: Gpus | None) -> tuple[GpuInfo, ...]:
    """The GPUs that an image is held against; none where the driver is silent, which its own check tells."""
    try:
        return () if gpus is None else gpus.info()
    except GpusSilent:
        return ()


def _shm_free() -> int | None:
    shm = Path("/dev") / "shm"
    try:
        return shutil.disk_usage(shm).free if shm.is_dir() else None
    except OSError:
        return None
