"""Known ways for an engine to die, each with the one thing to change.

The last words of an engine are long and name the wrong cause ("engine core failed"); here the line that
matters is found, put into a class, and answered with one line of advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sim.errors import ServecastError
from sim.secrets import without_secrets

Phase = Literal["launch", "startup", "run", "stop"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine (or its container) is not there.

    Attributes:
        kind: class name, e.g. "oom_weights".
        phase: when it happened.
        line: the log line that says so, its secrets masked, or "".
        fix: one line: what to change.
        retryable: whether the same launch may work at another time without changing anything.
        flag: the engine flag to change, if it is one.
        env: environment variables that would help.
        facts: facts about the host worth keeping with a result.
    """

    kind: str
    phase: Phase
    line: str
    fix: str
    retryable: bool = False
    flag: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()

    def __str__(self) -> str:
        cause = f" ({self.line})" if self.line else ""
        return f"{self.kind}{cause}: {self.fix}"


class EngineFailed(ServecastError):
    """An engine did not start, or died. `failure` says why and what to do.

    A port that is taken or a flag that does not fit is the user's to mend, but none of it is a
    malformed input, so the exit status is 1.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"engine {failure.phase}: {failure}")


def classify(log: str, *, phase: Phase = "startup", exit_code: int | None = None) -> Failure:
    """Find the known failure in a log; an unknown one is "engine_exited_during_startup" or "..._run".

    Args:
        log: what the engine (or the Docker daemon) printed.
        phase: when it happened.
        exit_code: negative is a signal; above 128 a shell's way to say the same.
    """
    lines = log.splitlines()
    for kind, pattern, build in _RULES:
        for index, line in enumerate(lines):
            if match := pattern.search(line):
                # A rule may look at the lines before its match to tell the phase, and decline.
                failure = build(kind, phase, without_secrets(line.strip())[-400:], match, lines[:index])
                if failure is not None:
                    return failure
    return _unknown(lines, phase, exit_code)


_Build = Callable[[str, Phase, str, re.Match[str], Sequence[str]], Failure | None]


def _simple(
    fix: str, *, retryable: bool = False, flag: str | None = None, env: Mapping[str, str] | None = None
) -> _Build:
    def build(
        kind: str, phase: Phase, line: str, match: re.Match[str], before: Sequence[str]
    ) -> Failure | None:
        return Failure(kind, phase, line, fix, retryable, flag, env or {})

    return build


def _wsl2(kind: str, phase: Phase, line: str, match: re.Match[str], before: Sequence[str]) -> Failure | None:
    facts = ["wsl2"] if any("WSL" in text for text in before) else []
    facts += ["pin_memory=False"] if any("pin_memory=False" in text for text in before) else []
    return Failure(
        kind,
        phase,
        line,
        "set VLLM_WSL2_ENABLE_PIN_MEMORY=1 (or VLLM_USE_V2_MODEL_RUNNER=0); figures measured so do not carry "
        "over to bare Linux",
        env={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"},
        facts=tuple(facts),
    )


def _negative_kv(
    kind: str, phase: Phase, line: str, match: re.Match[str], before: Sequence[str]
) -> Failure | None:
    left = next((m[1] for text in reversed(before) if (m := _KV_MEMORY.search(text))), None)
    amount = f" ({left} GiB)" if left else ""
    return Failure(
        kind,
        phase,
        line,
        f"nothing is left for the KV cache{amount}: raise --gpu-memory-utilization, take a smaller or "
        "quantised model, or spread it with --tensor-parallel-size",
        flag="gpu_memory_utilization",
    )


def _kv_lt_one_request(
    kind: str, phase: Phase, line: str, match: re.Match[str], before: Sequence[str]
) -> Failure | None:
    longest = re.search(r"estimated maximum model length is ([\d,]+)", line)
    limit = f"--max-model-len {longest[1].replace(',', '')} or less" if longest else "a lower --max-model-len"
    return Failure(
        kind, phase, line, f"one request of full length does not fit: {limit}", flag="max_model_len"
    )


def _not_free(
    kind: str, phase: Phase, line: str, match: re.Match[str], before: Sequence[str]
) -> Failure | None:
    fix = "something else holds GPU memory: stop it (servecast doctor names the processes)"
    free, total = float(match[1]), float(match[2])
    if total > 0:
        fix += f", or --gpu-memory-utilization {int(100 * free / total) / 100:.2f}"
    return Failure(kind, phase, line, fix, retryable=True, flag="gpu_memory_utilization")


def _oom(kind: str, phase: Phase, line: str, match: re.Match[str], before: Sequence[str]) -> Failure | None:
    """Tell which allocation failed by what the engine had announced before."""
    if phase == "run":
        return Failure(
            "oom_run",
            phase,
            line,
            "no room left for activations: lower --gpu-memory-utilization or --max-num-batched-tokens",
            flag="gpu_memory_utilization",
        )
    seen = "\n".join(before)
    if re.search(r"[Cc]apturing|[Cc]apture (?:cuda )?graph|CUDA graphs?:", seen):
        return Failure(
            "oom_graph_capture",
            phase,
            line,
            "graph capture does not fit: lower --gpu-memory-utilization or --max-cudagraph-capture-size",
            flag="max_cudagraph_capture_size",
        )
    if re.search(r"[Ll]oading (?:model )?weights took|Model loading took|Load weight end", seen):
        return Failure(
            "oom_activations",
            phase,
            line,
            "profiling does not fit: lower --max-num-batched-tokens (SGLang: --chunked-prefill-size)",
            flag="max_num_batched_tokens",
        )
    return Failure(
        "oom_weights",
        phase,
        line,
        "the weights do not fit: a smaller or quantised model, a larger GPU, or more --tensor-parallel-size",
        flag="tensor_parallel_size",
    )


_KV_MEMORY = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")

# Order matters: the first rule that fits anywhere in the log wins, so the specific ones lead.
_RULES: tuple[tuple[str, re.Pattern[str], _Build], ...] = (
    (
        "gpu_arch_unsupported",
        re.compile(r"no kernel image is available|sm_\d+\w? is not compatible with the current PyTorch"),
        _simple(
            "the image has no kernels for this GPU: take an image built for it (RTX 50xx is sm_120 and needs "
            "CUDA 12.8 or later, tags with cu129 or cu130)"
        ),
    ),
    ("wsl2_no_uva", re.compile(r"UVA is not available"), _wsl2),
    (
        "hf_cache_incomplete",
        re.compile(
            r"LocalEntryNotFoundError|outgoing traffic has been disabled|OfflineModeIsEnabled"
            r"|couldn't connect to 'https://[\w.]*huggingface|Can't load tokenizer for"
        ),
        _simple(
            "the host is offline and the model is not complete on disk: fetch it with hf download, or mount "
            "the cache where HF_HOME points in the container (servecast doctor names the missing files)"
        ),
    ),
    (
        "oom_sampler_warmup",
        re.compile(r"out of memory occurred when warming up sampler with (\d+) dummy requests"),
        _simple("lower --max-num-seqs: the sampler warms up with that many requests", flag="max_num_seqs"),
    ),
    ("kv_lt_one_request", re.compile(r"[Tt]o serve at least one request with the model"), _kv_lt_one_request),
    ("negative_kv", re.compile(r"No available memory for the cache blocks"), _negative_kv),
    (
        "negative_kv",
        re.compile(r"Not enough memory\. Please try to increase --mem-fraction-static"),
        _simple("nothing is left for the KV cache: raise --mem-fraction-static", flag="mem_fraction_static"),
    ),
    (
        "gpu_memory_not_free",
        re.compile(r"Free memory on device \S* ?\(([\d.]+)/([\d.]+) GiB\) on startup is less than"),
        _not_free,
    ),
    (
        "shm_too_small",
        re.compile(
            r"(?:No space left|[Ii]nsufficient)[^\n]*/dev/shm|[Ii]nsufficient shared memory"
            r"|/dev/shm[^\n]*(?:No space left|too small|not enough|insufficient)"
            r"|unable to (?:allocate|write to) (?:file </torch|shared memory)|shared memory size is too small"
            r"|Bus error.*shm|Error while creating shared memory segment",
        ),
        _simple("the container's shared memory is too small: --shm-size 1g or more, or --ipc host"),
    ),
    (
        "port_taken",
        re.compile(r"[Aa]ddress already in use|port is already allocated|Errno 98|ports are not available"),
        _simple("the port is taken: stop what listens there, or leave --port out and a free one is taken"),
    ),
    (
        "name_taken",
        re.compile(r"container name \"?/?[\w.-]+\"? is already in use|Conflict\. The container name"),
        _simple("a container of that name exists: docker rm it, or leave the name to servecast"),
    ),
    (
        "image_missing",
        re.compile(r"No such image|pull access denied|manifest (?:for \S+ )?(?:not found|unknown)"),
        _simple("the image is not on this host and could not be pulled: check its name and tag"),
    ),
    (
        "no_gpu_runtime",
        re.compile(
            r"could not select device driver \"?\"? ?with capabilities: \[\[gpu\]\]"
            r"|nvidia-container-cli: initialization error|libcuda\.so\.1: cannot open"
        ),
        _simple("Docker cannot hand GPUs on: install nvidia-container-toolkit and restart Docker"),
    ),
    (
        "driver_too_old",
        re.compile(r"NVIDIA driver on your system is too old|unsatisfied condition: cuda[>=]+[\d.]+"),
        _simple("the driver is older than the image's CUDA: update it, or take an image of an older CUDA"),
    ),
    ("oom", re.compile(r"CUDA out of memory|OutOfMemoryError|hipErrorOutOfMemory"), _oom),
    (
        "bad_flag",
        re.compile(r"error: (?:unrecognized arguments?|argument |the following arguments|ambiguous option)"),
        _simple("this engine version does not know the flag or its value"),
    ),
    (
        "bad_flag",
        re.compile(r"No such option: (\S+)|Unknown option"),
        _simple("this engine version does not know the flag"),
    ),
    (
        "model_missing",
        re.compile(r"is not a local folder and is not a valid model identifier|Repo id must be in the form"),
        _simple("the model's folder is not there (in a container: is it mounted at that path?)"),
    ),
)

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def _unknown(lines: Sequence[str], phase: Phase, exit_code: int | None) -> Failure:
    signal = None
    if exit_code is not None:
        signal = -exit_code if exit_code < 0 else exit_code - 128 if exit_code > 128 else None
    last = next((line.strip() for line in reversed(lines) if _ERROR.search(line)), "")
    last = last or next((line.strip() for line in reversed(lines) if line.strip()), "")
    if signal == 9:
        fix = "killed with SIGKILL, by someone or by the kernel for want of memory (see dmesg)"
    elif signal == 4:
        fix = "an instruction that this CPU or kernel does not allow (SIGILL): the build is for another CPU"
    elif signal == 7:
        fix = "SIGBUS, mostly shared memory that ran out: --shm-size 1g or more"
    elif signal is not None:
        fix = f"ended by {_SIGNALS.get(signal, f'signal {signal}')}; {_more(last)}"
    else:
        status = "" if exit_code is None else f" with status {exit_code}"
        fix = f"it exited{status} for a reason that is not known here; {_more(last)}"
    return Failure(
        "engine_exited_during_startup" if phase in ("launch", "startup") else f"engine_exited_during_{phase}",
        phase,
        without_secrets(last)[-400:],
        fix,
        retryable=False,
    )


def _more(last: str) -> str:
    return "the log's last lines say more" if last else "its own log, where it was started, may say more"


_ERROR = re.compile(r"(?:^|\W)(?:[A-Z]\w*Error|[A-Z]\w*Exception|ERROR|error):?\s")
