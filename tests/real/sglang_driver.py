"""The scheduler classes of an installed SGLang, played call by call without a model.

Scheduler, batches, policy, prefix tree, pools and the processing of results are the engine's own. Replaced
are the model, whose tokens are made up; the processes, sockets and metrics around the scheduler, which are
blanks; and the GPU kernels that number the slots of pages, for which the engine's own PyTorch routine stands
in. Import this through `sglang_recorder.load`.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VERSION = version("sglang").split("+")[0]
STOP_TOKEN = 2
STREAM = 1 << 20
"""Distance between the token ids of two segments."""
PATIENCE = 20
"""Calls without a batch, beyond the forced decode rounds, after which the engine counts as hanging."""
KINDS = {"EXTEND": "prefill", "DECODE": "decode", "MIXED": "mixed"}


class Stuck(Exception):
    """The engine dies, hangs, aborts or loses a request in this scenario."""


class Blank:
    """Stands for whatever has no influence on scheduling: false, callable, and every attribute is a blank."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Blank:
        if name.startswith("__"):
            raise AttributeError(name)
        return Blank()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __bool__(self) -> bool:
        return False


class _PageKernel:
    """A launchable that numbers the next slots of each request with the engine's PyTorch routine."""

    def __init__(self, decode: bool) -> None:
        self.decode = decode

    def __getitem__(self, grid: Any) -> Any:
        return self.launch_decode if self.decode else self.launch_extend

    def launch_decode(self, lens: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
        self.launch_extend(lens - 1, lens, last, free, out, 0, page)

    def launch_extend(
        self, before: Any, after: Any, last: Any, free: Any, out: Any, _: int, page: int
    ) -> None:
        # With no page left the allocator reports failure itself, after this.
        pages = free if free.numel() else torch.zeros(1, dtype=torch.int64)
        paged.alloc_extend_naive(before, after, last, pages, out, page, "cpu")


paged.alloc_extend_kernel, paged.alloc_decode_kernel = _PageKernel(False), _PageKernel(True)

_victims: list[str] = []
_aborted: list[str] = []


def _watch_victims() -> None:
    retract, preempt = ScheduleBatch.retract_decode, PrefillAdder.preempt_to_schedule

    def on_retract(batch: Any) -> Any:
        retracted, ratio, aborted = retract(batch)
        _victims.extend(req.rid for req in retracted)
        _aborted.extend(req.rid for req in aborted)
        return retracted, ratio, aborted

    def on_preempt(adder: Any, req: Any) -> Any:
        before = list(adder.running_batch.reqs)
        done = preempt(adder, req)
        gone = [other for other in before if other not in adder.running_batch.reqs]
        _victims.extend(other.rid for other in gone)
        if gone:  # the engine queues them in the order of a set of objects, which is not reproducible
            adder.preempt_list[-len(gone) :] = gone
        return done

    ScheduleBatch.retract_decode, PrefillAdder.preempt_to_schedule = on_retract, on_preempt


_watch_victims()


class BareScheduler(Scheduler):
    """The engine's scheduler without its processes: every optional feature that is not set up here is off."""

    def __init__(self, args: dict[str, Any]) -> None:
        page, tokens, context = args["page_size"], args["max_total_tokens"], args["context_length"]
        chunk = args["chunked_prefill_size"]
        slots = min(args["max_running_requests"], tokens // 2)
        model = SimpleNamespace(
            vocab_size=1 << 31,
            context_len=context,
            is_encoder_decoder=False,
            is_multimodal=False,
            num_key_value_heads=1,
            hf_config=SimpleNamespace(architectures=["none"]),
        )
        pool = {"dtype": torch.float16, "device": "cpu", "kvcache": None, "need_sort": False}
        kv = (
            TokenToKVPoolAllocator(tokens, **pool)
            if page == 1
            else paged.PagedTokenToKVPoolAllocator(tokens, page, **pool)
        )
        rows = ReqToTokenPool(
            size=slots, max_context_len=context + 4, device="cpu", enable_memory_saver=False
        )
        tree = registry.create_tree_cache(
            registry.TreeCacheBuildContext(
                server_args=None,
                params=CacheInitParams(
                    disable=args["disable_radix_cache"],
                    req_to_token_pool=rows,
                    token_to_kv_pool_allocator=kv,
                    page_size=page,
                    chunked_prefill_size=chunk,
                ),
                is_hybrid_swa=False,
                is_hybrid_ssm=False,
                enable_hierarchical_cache=False,
                disable_radix_cache=args["disable_radix_cache"],
                effective_chunked_prefill_size=chunk,
                tp_worker=None,
                model_config=model,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
            )
        )
        beams = Blank(pending_member_rows=lambda batch: 0, commit_decode=lambda batch: set())
        by_priority = args["enable_priority_scheduling"]
        low_first = args["schedule_low_priority_values_first"]
        self.__dict__.update(
            page_size=page,
            max_total_num_tokens=tokens,
            max_running_requests=slots,
            max_prefill_tokens=args["max_prefill_tokens"],
            max_req_len=min(context, tokens) - 1,
            chunked_prefill_size=chunk if chunk > 0 else None,
            is_mixed_chunk=args["enable_mixed_chunk"] and chunk > 0,
            enable_overlap=not args["disable_overlap_schedule"],
            enable_priority_scheduling=by_priority,
            enable_priority_preemption=by_priority,
            schedule_low_priority_values_first=low_first,
            priority_scheduling_preemption_threshold=args["priority_scheduling_preemption_threshold"],
            prefill_decode_interval=args["prefill_decode_interval"],
            _prefill_decode_interval_remaining=0,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.NULL,
            model_config=model,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=kv,
            tree_cache=tree,
            policy=SchedulePolicy(args["schedule_policy"], tree, False, by_priority, low_first),
            new_token_ratio_tracker=NewTokenRatioTracker.from_config(),
            waiting_queue=[],
            running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
            last_batch=None,
            chunked_req=None,
            result_queue=deque(),
            kv_shard_widening=1,
            is_generation=True,
            processed_tokens_counter=0,
            max_prefill_bs=0,
            device="cpu",
            grammar_manager=Blank(grammar_queue=[]),
            dllm_manager=Blank(),
            beam_coordinator=beams,
            ipc_channels=Blank(),
            load_inquirer=Blank(_get_num_pending_tokens=lambda **given: 0),
            metrics_reporter=Blank(enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0),
            dp_attn_adapter=Blank(
                maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
                maybe_convert_decode_to_extend=lambda batch: batch,
            ),
            ngram_embedding_manager=Blank(prepare_for_forward=lambda batch, chunked_req=None: batch),
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(attn_backend=SimpleNamespace(), prefill_aware_swa=False)
            ),
        )
        self.batch_result_processor = batch_result_processor.SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_overlap=self.enable_overlap,
            enable_overlap_mlx=False,
            model_config=model,
            token_to_kv_pool_allocator=kv,
            tree_cache=tree,
            hisparse_coordinator=None,
            req_to_token_pool=rows,
            decode_offload_manager=None,
            metrics_collector=Blank(),
            metrics_reporter=self.metrics_reporter,
            draft_worker=None,
            model_worker=Blank(),
            logprob_result_processor=Blank(),
            output_streamer=Blank(),
            beam_coordinator=beams,
            abort_request=None,
        )

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Recorder:
    """Plays one scenario and notes every call."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.args, self.specs = scenario["args"], scenario["requests"]
        self.place = {spec["id"]: place for place, spec in enumerate(self.specs)}
        self.stops = {spec["id"]: spec["stop_after"] for spec in self.specs}
        self.scheduler = BareScheduler(self.args)
        self.evicted = 0
        self.outcome: dict[str, list[Any]] = {}
        self.retractions: Counter[str] = Counter()
        self._watch_evictions()

    def _watch_evictions(self) -> None:
        tree = self.scheduler.tree_cache
        nested = [False]

        def watched(evict: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if nested[0]:
                    return evict(*args, **kwargs)
                nested[0], before = True, tree.evictable_size()
                try:
                    return evict(*args, **kwargs)
                finally:
                    nested[0] = False
                    self.evicted += before - tree.evictable_size()

            return call

        tree.evict, tree.evict_for_alloc = watched(tree.evict), watched(tree.evict_for_alloc)

    def output(self, request_id: str, index: int) -> int:
        """Generated token `index` (from 0) of a request."""
        if self.stops[request_id] == index + 1:
            return STOP_TOKEN
        return (1000 + self.place[request_id]) * STREAM + index

    def add(self, spec: dict[str, Any]) -> None:
        """Hand a request over."""
        prompt: list[int] = []
        for key, length in spec["prompt"]:
            if isinstance(key, str):
                prompt += (self.output(key.removeprefix("out:"), index) for index in range(length))
            else:
                prompt += range((key + 1) * STREAM, (key + 1) * STREAM + length)
        stops = spec["stop_after"] is not None
        sampling = SamplingParams(
            max_new_tokens=spec["max_tokens"],
            ignore_eos=not stops,
            stop_token_ids=[STOP_TOKEN] if stops else None,
        )
        sampling.normalize(None)
        req = Req(spec["id"], "", array("q", prompt), sampling, eos_token_ids=None, vocab_size=1 << 31)
        req.priority = spec["priority"]
        self.scheduler.init_req_max_new_tokens(req)
        self.scheduler._add_request_to_queue(req)

    def call(self, step: int) -> tuple[dict[str, Any], Any]:
        """One scheduling call: its line and the batch to run."""
        engine = self.scheduler
        waiting = {req.rid for req in engine.waiting_queue}
        _victims.clear()
        plan = engine.get_next_batch_to_run(engine.running_batch, engine.last_batch)
        if _aborted:
            raise Stuck("aborts")
        engine.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.retractions.update(_victims)
        scheduled, cached, kind = [], [], "idle"
        if batch is not None:
            kind = KINDS[batch.forward_mode.name]
            decoding = batch.reqs if kind == "decode" else batch.decoding_reqs or ()
            for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
                start = length - 1 if req in decoding else len(req.prefix_indices)
                scheduled.append([req.rid, start, length - start])
                if req.rid in waiting:
                    cached.append([req.rid, start])
            # What a forward pass consumes.
            batch.input_ids = batch.prefill_input_ids_cpu = batch.mix_running_indices = None
        line = {
            "step": step,
            "scheduled": scheduled,
            "kind": kind,
            "retracted": list(_victims),
            "new_tokens": [],
            "finished": [],
            "running": [req.rid for req in engine.running_batch.reqs],
            "waiting": [req.rid for req in engine.waiting_queue],
            "available": engine.token_to_kv_pool_allocator.available_size(),
            "evictable": engine.tree_cache.evictable_size(),
            "cached": cached,
            "new_token_ratio": round(engine.new_token_ratio_tracker.current, 6),
        }
        return line, batch

    def take_in(self, batch: Any, line: dict[str, Any]) -> None:
        """Give the engine the result of a batch and note what it made of it."""
        before = [(len(req.output_ids), req.finished()) for req in batch.reqs]
        sampled = [self.output(req.rid, len(req.output_ids)) for req in batch.reqs]
        result = batch_result(sampled)
        processor = self.scheduler.batch_result_processor
        if batch.forward_mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            processor.process_batch_result_prefill(batch, result)
        for req, (outputs, was_finished) in zip(batch.reqs, before, strict=True):
            if len(req.output_ids) > outputs:
                line["new_tokens"].append([req.rid, len(req.output_ids)])
            if req.finished() and not was_finished:
                line["finished"].append(req.rid)
                reason = req.finished_reason.to_json()["type"]
                self.outcome[req.rid] = [reason, len(req.output_ids), self.retractions[req.rid]]

    def run(self) -> list[dict[str, Any]]:
        """Play the scenario to its end. Returns the header and the lines of its trace."""
        engine = self.scheduler
        pending = deque(sorted(self.specs, key=lambda spec: spec["arrival_step"]))
        lines: list[dict[str, Any]] = []
        step = nothing = 0
        idle = True
        while pending or not idle:
            if idle:
                step = max(step, pending[0]["arrival_step"])
            idle = False
            while pending and pending[0]["arrival_step"] <= step:
                self.add(pending.popleft())
            line, batch = self.call(step)
            lines.append(line)
            step += 1
            if batch is not None:
                engine.result_queue.append(batch.copy() if engine.enable_overlap else batch)
            if engine.result_queue and (not engine.enable_overlap or engine.last_batch is not None):
                self.take_in(engine.result_queue.popleft(), line)
            done = batch is None and (not engine.enable_overlap or engine.last_batch is None)
            if done and engine.is_fully_idle():
                engine.new_token_ratio_tracker.reset()
                idle = True
            engine.last_batch = batch
            nothing = nothing + 1 if done and not idle else 0
            if nothing > PATIENCE:
                raise Stuck("hangs")
        if len(self.outcome) < len(self.specs):
            raise Stuck("loses")
        header = {
            "engine": "sglang",
            "engine_version": VERSION,
            "steps": len(lines),
            "evicted_tokens": self.evicted,
            "outcome": {spec["id"]: self.outcome[spec["id"]] for spec in self.specs},
        }
        return [header, *lines]


def batch_result(sampled: list[int]) -> Any:
    """What a forward pass hands back."""
    names = ("hidden_states", "customized_info", "sampling_mask_output", "next_token_sampling_mask_status")
    logits = SimpleNamespace(**dict.fromkeys(names))
    return GenerationBatchResult(
        logits_output=logits, next_token_ids=torch.tensor(sampled), can_run_cuda_graph=False
    )


def record(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """Header and lines of the trace of one scenario; every argument of our scheduler must be given.

    Raises:
        Stuck: its text says what the engine does: "dies", "hangs", "aborts" or "loses".
    """
    args, context = scenario["args"], get_context()
    random.seed(args["seed"])  # the engine shuffles with the global generator
    _aborted.clear()
    backends = dict.fromkeys(
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend"), "torch_native"
    )
    names = args.keys() - {"max_total_tokens", "context_length", "seed"}
    override = context.override_server_args(device="cpu", **backends, **{name: args[name] for name in names})
    override.install()
    try:
        slots = min(args["max_running_requests"], args["max_total_tokens"] // 2)
        context.override("recorder", pp_max_micro_batch_size=slots)
        header, *lines = Recorder(scenario).run()
    except RuntimeError as error:
        if "out of memory" in str(error).lower():
            raise Stuck("dies") from error
        raise
    finally:
        override.restore()
    return [{"scenario": scenario["id"], **header}, *lines]
