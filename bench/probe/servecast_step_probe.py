"""Runs inside vLLM: writes one line per scheduling step. Put this folder on PYTHONPATH and launch with

    --scheduler-cls servecast_step_probe.make_scheduler        (SERVECAST_STEPS names the file)

It stands alone: only the standard library and vLLM (V1, 0.10 to 0.33) may be imported here. The engine's own
scheduler decides; this only notes what it decided, and when. Lines are kept in memory and written by a
thread, so that a step waits for no disk. Each line carries what noting it took (`probe_ms`), which the
engine spends within the step.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_clock = time.monotonic
_FLUSH_S = 0.2  # a short rest lets lines gather: fewer wake-ups beside the engine's loop


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What the engine calls in place of a scheduler class: returns the kind it would have made, observed."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if getattr(config.scheduler_config, "async_scheduling", False):
        kind = import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    else:
        kind = import_module("vllm.v1.core.sched.scheduler").Scheduler
    scheduler = kind(*args, **kwargs)
    StepProbe(scheduler, Path(os.environ.get("SERVECAST_STEPS", "servecast-steps.jsonl")))
    return scheduler


class Writer:
    """Appends records to a file from a thread; what a kill loses is the last moment's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="servecast-steps", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, record: dict[str, Any]) -> None:
        """Hand a record over; it must not change any more."""
        self._queue.put(record)

    def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            while True:
                records = [self._queue.get()]
                time.sleep(_FLUSH_S)
                while not self._queue.empty():
                    records.append(self._queue.get())
                for record in records:
                    if record is None:
                        return
                    file.write(json.dumps(record, separators=(",", ":")) + "\n")
                file.flush()


class StepProbe:
    """Stands before a scheduler's `add_request`, `schedule`, `update_from_output` and `shutdown`."""

    def __init__(self, scheduler: Any, path: Path) -> None:
        self._scheduler = scheduler
        self._add, self._schedule = scheduler.add_request, scheduler.schedule
        self._update, self._shutdown = scheduler.update_from_output, scheduler.shutdown
        rank = getattr(getattr(scheduler, "parallel_config", None), "data_parallel_rank", 0) or 0
        self._writer = Writer(path if not rank else path.with_name(f"{path.name}.dp{rank}"))
        self._step = 0
        self._last_end = 0.0
        # Scheduled and not yet answered: with async scheduling there are two.
        self._open: list[tuple[Any, dict[str, Any]]] = []
        scheduler.add_request, scheduler.schedule = self.add_request, self.schedule
        scheduler.update_from_output, scheduler.shutdown = self.update_from_output, self.shutdown
        self._writer.put(
            {
                "ev": "start",
                "t": _clock(),
                "unix": time.time(),
                "scheduler": type(scheduler).__name__,
                "max_num_scheduled_tokens": getattr(scheduler, "max_num_scheduled_tokens", None),
                "max_num_running_reqs": getattr(scheduler, "max_num_running_reqs", None),
                "num_gpu_blocks": getattr(getattr(scheduler, "cache_config", None), "num_gpu_blocks", None),
                "block_size": getattr(scheduler, "block_size", None),
            }
        )

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Note when the engine core takes a request in."""
        self._writer.put(
            {
                "ev": "add",
                "t": _clock(),
                "step": self._step,
                "id": request.request_id,
                "prompt_len": request.num_prompt_tokens,
                "max_tokens": request.max_tokens,
            }
        )
        return self._add(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Note the batch."""
        began = _clock()
        output = self._schedule(*args, **kwargs)
        decided = _clock()
        if output.num_scheduled_tokens:
            cached = output.scheduled_cached_reqs
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            record = {
                "ev": "step",
                "step": self._step,
                "t": began,
                "total": output.total_num_scheduled_tokens,
                "scheduled": dict(output.num_scheduled_tokens),
                "computed": computed,
                "new": [new.req_id for new in output.scheduled_new_reqs],
                "preempted": sorted(getattr(output, "preempted_req_ids", None) or ()),
                "n_running": len(self._scheduler.running),
                "n_waiting": len(self._scheduler.waiting),
                "free_blocks": self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "sched_ms": (decided - began) * 1e3,
                "probe_ms": 0.0,
            }
            self._open.append((output, record))
            record["probe_ms"] = (_clock() - decided) * 1e3
        self._step += 1
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the end of the step."""
        began = _clock()
        result = self._update(scheduler_output, *args, **kwargs)
        ended = _clock()
        for index, (output, record) in enumerate(self._open):
            if output is scheduler_output:
                del self._open[index]
                # With two steps in flight, a step's own time begins when the one before it ends.
                record["dt_ms"] = (ended - max(record["t"], self._last_end)) * 1e3
                record["upd_ms"] = (ended - began) * 1e3
                record["end"] = ended
                record["probe_ms"] += (_clock() - ended) * 1e3
                self._last_end = ended
                self._writer.put(record)
                break
        return result

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """Write what is left, then let the scheduler go."""
        self._writer.close()
        return self._shutdown(*args, **kwargs)
