"""Records what the scheduler classes of an installed vLLM decide, call by call, without a model.

    python -m tests.real.vllm_recorder SEED COUNT OUT_DIR

writes `vllm.scenarios.jsonl.gz` and `vllm.traces.jsonl.gz` with COUNT scenarios of stream SEED, and
`vllm.depth4.*` with some of them again, played with up to four steps in flight. Scheduler,
block pool, queues and requests are the engine's own; the model is replaced by made-up tokens, and the loop
around it is that of `v1/engine/core.py`: with asynchronous scheduling a result is taken in only when the next
batch is already queued.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm_scenarios import draw

VERSION = vllm.__version__.split("+")[0]
DEEP = 4
STOP_TOKEN = 2
STREAM = 1 << 20
"""Distance between the token ids of two segments."""

init_none_hash(sha256)


class Tokens:
    """Token ids of a scenario: one stream per numbered segment and one per request's outputs."""

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        self.place = {request["id"]: place for place, request in enumerate(requests)}
        self.stops = {request["id"]: request["stop_after"] for request in requests}

    def output(self, request_id: str, index: int) -> int:
        """Generated token `index` (from 0) of a request."""
        if self.stops[request_id] == index + 1:
            return STOP_TOKEN
        return (1000 + self.place[request_id]) * STREAM + index

    def prompt(self, segments: list[tuple[int | str, int]]) -> list[int]:
        """All tokens of a prompt."""
        tokens: list[int] = []
        for key, length in segments:
            if isinstance(key, str):
                tokens += (self.output(key.removeprefix("out:"), index) for index in range(length))
            else:
                tokens += range((key + 1) * STREAM, (key + 1) * STREAM + length)
        return tokens


def _model_folder() -> str:
    """A folder that the configuration accepts as a small dense decoder."""
    folder = tempfile.mkdtemp(prefix="vllm-recorder-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "max_position_embeddings": STREAM,
        "torch_dtype": "float16",
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


_MODEL = _model_folder()


def build_scheduler(args: dict[str, Any]) -> Any:
    """The scheduler that the engine itself would pick for these arguments."""
    shared = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "async_scheduling")
    exact = {name: args[name] for name in (*shared, "enable_chunked_prefill")}
    config = VllmConfig(
        model_config=ModelConfig(
            model=_MODEL, skip_tokenizer_init=True, dtype="float16", max_model_len=args["max_model_len"]
        ),
        scheduler_config=SchedulerConfig(
            **exact,
            max_model_len=args["max_model_len"],
            is_encoder_decoder=False,
            policy=args["scheduling_policy"],
            scheduler_reserve_full_isl=args["scheduler_reserve_full_isl"],
            watermark=args["watermark"],
        ),
        cache_config=CacheConfig(
            block_size=args["block_size"], enable_prefix_caching=args["enable_prefix_caching"]
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    for name, value in exact.items():  # the platform has opinions of its own; the scenario's values count
        setattr(config.scheduler_config, name, value)
    config.cache_config.block_size = args["block_size"]
    config.cache_config.enable_prefix_caching = args["enable_prefix_caching"]
    config.cache_config.num_gpu_blocks = args["num_gpu_blocks"]
    layer = FullAttentionSpec(block_size=args["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=args["num_gpu_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=args["block_size"],
        log_stats=False,
    )


class Recorder:
    """Plays one scenario and notes every call."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.args, self.specs = scenario["args"], scenario["requests"]
        self.tokens = Tokens(self.specs)
        self.scheduler = build_scheduler(self.args)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.requests: dict[str, Any] = {}
        self.preempted: list[str] = []
        self.num_evicted = 0
        self.outcome: dict[str, list[Any]] = {}
        self._watch()

    def _watch(self) -> None:
        """Listen to the two decisions that the scheduler's output does not tell in order."""
        preempt, evict = self.scheduler._preempt_request, self.pool._maybe_evict_cached_block

        def on_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        def on_evict(block: Any) -> Any:
            evicted = evict(block)
            self.num_evicted += bool(evicted)
            return evicted

        self.scheduler._preempt_request, self.pool._maybe_evict_cached_block = on_preempt, on_evict

    def add(self, spec: dict[str, Any], order: int) -> None:
        """Hand a request over."""
        stops = spec["stop_after"] is not None
        request = Request(
            request_id=spec["id"],
            prompt_token_ids=self.tokens.prompt(spec["prompt"]),
            sampling_params=SamplingParams(
                max_tokens=spec["max_tokens"],
                ignore_eos=not stops,
                stop_token_ids=[STOP_TOKEN] if stops else None,
            ),
            pooling_params=None,
            arrival_time=float(order),
            priority=spec["priority"],
            block_hasher=get_request_block_hasher(self.args["block_size"], sha256),
        )
        self.requests[spec["id"]] = request
        self.scheduler.add_request(request)

    def call(self, step: int) -> tuple[dict[str, Any], Any, list[str]]:
        """One scheduling call: its line, the engine's output, and the ids that sample a token in it."""
        known = {request.request_id for request in self.scheduler.running}
        self.preempted = []
        output = self.scheduler.schedule()
        counts = output.num_scheduled_tokens
        starts = {key: self.requests[key].num_computed_tokens - count for key, count in counts.items()}
        line = {
            "step": step,
            "scheduled": [[key, starts[key], count] for key, count in counts.items()],
            "kind": "mixed",
            "preempted": self.preempted,
            "new_tokens": [],
            "finished": [],
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self._waiting()],
            "free_blocks": self.pool.get_num_free_blocks(),
            "cached": [[key, starts[key]] for key in counts if key not in known],
        }
        return line, output, [key for key in counts if not self.requests[key].is_prefill_chunk]

    def _waiting(self) -> Iterable[Any]:
        names = ("skipped_waiting", "kv_holding_waiting", "waiting")
        waiting = [request for name in names for request in getattr(self.scheduler, name, ())]
        return sorted(waiting) if self.args["scheduling_policy"] == "priority" else waiting

    def take_in(self, output: Any, sampling: list[str], line: dict[str, Any] | None) -> None:
        """Give the scheduler the result of a batch and note what it made of it."""
        ids = list(output.num_scheduled_tokens)
        sampled = [
            [self.tokens.output(key, self.requests[key].num_output_tokens)] if key in sampling else []
            for key in ids
        ]
        made = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={key: index for index, key in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for entry in (entry for outputs in made.values() for entry in outputs.outputs):
            request = self.requests[entry.request_id]
            if entry.finish_reason is not None:
                outcome = [str(entry.finish_reason), request.num_output_tokens, request.num_preemptions]
                self.outcome[entry.request_id] = outcome
            if line is not None:
                if entry.new_token_ids:
                    line["new_tokens"].append([entry.request_id, request.num_output_tokens])
                if entry.finish_reason is not None:
                    line["finished"].append(entry.request_id)

    def run(self, pipeline_depth: int | None) -> list[dict[str, Any]]:
        """Play the scenario to its end. Returns the header and the lines of its trace."""
        pending = deque(enumerate(sorted(self.specs, key=lambda spec: spec["arrival_step"])))
        depth = pipeline_depth or (2 if self.args["async_scheduling"] else 1)
        queue: deque[tuple[Any, list[str]]] = deque()
        lines: list[dict[str, Any]] = []
        step = 0
        while pending or queue or self.scheduler.has_requests():
            if not queue and not self.scheduler.has_requests():
                step = max(step, pending[0][1]["arrival_step"])
            while pending and pending[0][1]["arrival_step"] <= step:
                order, spec = pending.popleft()
                self.add(spec, order)
            line = None
            if self.scheduler.has_requests():
                line, output, sampling = self.call(step)
                lines.append(line)
                step += 1
                if line["scheduled"]:
                    queue.append((output, sampling))
                    if len(queue) < depth:
                        continue
            if queue:
                self.take_in(*queue.popleft(), line)
        header = {
            "engine": "vllm",
            "engine_version": VERSION,
            "steps": len(lines),
            "evicted_blocks": self.num_evicted,
            "outcome": {spec["id"]: self.outcome[spec["id"]] for spec in self.specs},
        }
        return [header, *lines]


def record(scenario: dict[str, Any], pipeline_depth: int | None = None) -> list[dict[str, Any]]:
    """Header and lines of the trace of one scenario.

    A `pipeline_depth` above the engine's own (2 with asynchronous scheduling) makes results late enough for a
    preempted request to wait for its stale output, which otherwise takes pipeline parallelism.
    """
    header, *lines = Recorder(scenario).run(pipeline_depth)
    return [{"scenario": scenario["id"], **header}, *lines]


def _write(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(item, separators=(",", ":")) + "\n" for item in objects)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(seed: str, count: int, folder: Path) -> None:
    """Draw and record scenarios, and the first asynchronous ones a second time with a deeper pipeline."""
    scenarios = [draw(seed, number) for number in range(count)]
    _write(folder / "vllm.scenarios.jsonl.gz", scenarios)
    _write(folder / "vllm.traces.jsonl.gz", (line for scenario in scenarios for line in record(scenario)))
    deep = [scenario for scenario in scenarios if scenario["args"]["async_scheduling"]][: count // 3]
    _write(folder / f"vllm.depth{DEEP}.scenarios.jsonl.gz", deep)
    _write(folder / f"vllm.depth{DEEP}.traces.jsonl.gz", (line for sc in deep for line in record(sc, DEEP)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
