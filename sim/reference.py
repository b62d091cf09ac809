"""Published measurements that ship with servecast: summary figures, their scenario, and their source."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sim.build import build_scenario
from sim.scenario import EngineName, Scenario
from sim.yamltext import load_yaml


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReferenceEngine(_Strict):
    """How one engine was started, and the KV pool that it logged [tokens]."""

    version: str
    serve: str
    kv_cache_tokens: int


class ReferenceRun(_Strict):
    """One load and what the client printed; keys of `vllm bench serve`, times in ms."""

    engine: Literal["vllm", "sglang"]
    max_concurrency: int
    num_prompts: int
    figures: dict[str, float]


class Reference(_Strict):
    """A published comparison."""

    source: str
    gpu: str
    model: str
    vllm: ReferenceEngine
    sglang: ReferenceEngine
    bench: str
    runs: tuple[ReferenceRun, ...]
    sglang_throughput_change_percent: dict[str, float]
    sglang_retractions_at_128: int

    def scenario(
        self,
        engine: EngineName,
        max_concurrency: int,
        num_prompts: int,
        settings: tuple[str, ...] = (),
    ) -> Scenario:
        """The scenario of one run, with further settings (`key=value`) on top."""
        setup = self.vllm if engine == "vllm" else self.sglang
        return build_scenario(
            serve=setup.serve,
            bench=f"{self.bench} --max-concurrency {max_concurrency} --num-prompts {num_prompts}",
            gpu=self.gpu,
            engine_version=setup.version,
            kv_cache_tokens=setup.kv_cache_tokens,
            sets=settings,
        )


@cache
def rtx5090_reference() -> Reference:
    """RTX 5090, Qwen2.5-7B-Instruct, vLLM 0.28.0 and SGLang 0.5.21."""
    path = resources.files("sim.data").joinpath("reference", "rtx5090_qwen2.5-7b.yaml")
    return Reference.model_validate(load_yaml(path.read_text(encoding="utf-8")))
