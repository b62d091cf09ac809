"""From what the user wrote (commands, a scenario file, options) to one `Scenario`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.commands import serve as serve_commands
from sim.commands.bench import BenchCommand, ClientName, default_spec, parse_bench_command
from sim.commands.serve import ServeCommand, mapping_words, parse_serve_command, serve_from_words
from sim.commands.settings import with_setting
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.hardware.visible import visible_notes
from sim.length_limits import check_lengths
from sim.models.table import load_model
from sim.models.weights import with_quantization
from sim.provenance import Note
from sim.scenario import EngineConfig, EngineName, Observed, Scenario

if TYPE_CHECKING:  # checking files takes a while to load, and pasted commands need none of it
    from sim.scenario_file import ScenarioInput


@dataclass(frozen=True, slots=True)
class NoFile:
    """What a `ScenarioInput` says where there is no scenario file."""

    name: str = ""
    serve: None = None
    engine: None = None
    bench: None = None
    workload: None = None
    model: None = None
    gpu: None = None
    gpu_count: None = None
    engine_version: None = None
    observed: Observed = field(default_factory=Observed)
    seed: None = None


@dataclass(frozen=True, slots=True)
class ScenarioSource:
    """The inputs of a scenario before they are resolved, so that single settings can still change."""

    serve: ServeCommand
    bench: BenchCommand
    gpu: str
    model: str
    gpu_count: int | None = None
    engine_version: str | None = None
    observed: Observed = field(default_factory=Observed)
    seed: int | None = None
    name: str = ""
    replaced: tuple[Note, ...] = ()

    def build(self) -> Scenario:
        """Resolve against model, GPU and the engine's rules.

        Raises:
            BadInput: an unknown model or GPU, or what the engine or the client would refuse.
        """
        model = load_model(self.model)
        gpu, gpu_notes = find_gpu(self.gpu)
        engine, notes = _resolver(self.serve.engine)(
            self.serve, model, gpu, self.gpu_count, self.engine_version
        )
        model = with_quantization(model, engine["quantization"], engine["dtype"])
        spec = self.bench.spec
        own_notes = (*self._model_notes(), *check_lengths(spec, engine), *self._visible_notes(engine))
        return Scenario(
            engine=engine,
            model=model,
            gpu=gpu,
            gpu_count=self.gpu_count or gpus_needed(engine),
            workload=spec if self.seed is None else replace(spec, seed=self.seed),
            seed=spec.seed if self.seed is None else self.seed,
            observed=self.observed,
            notes=(*self.replaced, *gpu_notes, *notes, *self.bench.notes, *own_notes),
            name=self.name,
        )

    def with_settings(self, settings: Iterable[str]) -> ScenarioSource:
        """Apply `key=value` settings; each key is an engine flag or a client flag.

        `serve.KEY=…` or `bench.KEY=…` tells which where both know it.

        Raises:
            BadInput: no `=`, an unknown key (named with the nearest), or one that both know.
        """
        source = self
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or not key:
                raise BadInput("--set", setting, "must be KEY=VALUE, e.g. max-num-seqs=64")
            serve, bench = with_setting(source.serve, source.bench, key.strip(), value.strip())
            changes: dict[str, Any] = {"serve": serve, "bench": bench}
            if serve.model is not None and serve.model != source.serve.model:
                changes["model"] = serve.model
            if bench is not source.bench and _sets_seed(key):
                changes["seed"] = None  # a seed on top is the client's, and the simulation's with it
            source = replace(source, **changes)
        return source

    def _model_notes(self) -> list[Note]:
        asked = self.bench.model
        names = {self.model, self.serve.model, _word(self.serve, "--served-model-name")}
        if asked is None or asked in names:
            return []
        return [Note("warning", "--model", f"the client asks for {asked}, the server has {self.model}")]

    def _visible_notes(self, engine: EngineConfig) -> tuple[Note, ...]:
        return () if engine["device"] == "cpu" else visible_notes(engine.env, gpus_needed(engine))


def build_scenario(
    *,
    file: str | Path | Mapping[str, Any] | None = None,
    serve: str | None = None,
    bench: str | None = None,
    gpu: str | None = None,
    gpu_count: int | None = None,
    model: str | None = None,
    engine_version: str | None = None,
    sets: Iterable[str] = (),
    kv_cache_tokens: int | None = None,
    num_gpu_blocks: int | None = None,
    seed: int | None = None,
) -> Scenario:
    """Build a scenario; arguments win over the file's content, `sets` over everything.

    `seed` is both the client's and the simulation's seed; without it both use the client's. A file's seed
    belongs to its load: it goes where `bench` replaces that.

    Raises:
        BadInput: anything that cannot be used, named by flag or key.
    """
    return read_source(
        file=file,
        serve=serve,
        bench=bench,
        gpu=gpu,
        gpu_count=gpu_count,
        model=model,
        engine_version=engine_version,
        sets=sets,
        kv_cache_tokens=kv_cache_tokens,
        num_gpu_blocks=num_gpu_blocks,
        seed=seed,
    ).build()


def read_source(
    *,
    file: str | Path | Mapping[str, Any] | None = None,
    serve: str | None = None,
    bench: str | None = None,
    gpu: str | None = None,
    gpu_count: int | None = None,
    model: str | None = None,
    engine_version: str | None = None,
    sets: Iterable[str] = (),
    kv_cache_tokens: int | None = None,
    num_gpu_blocks: int | None = None,
    seed: int | None = None,
) -> ScenarioSource:
    """As `build_scenario`, but unresolved: settings can be applied on top before `build`."""
    content = _content(file)
    command = _serve_command(serve, content)
    if serve is not None:
        engine, served = _file_deployment(content)
        if engine not in (None, command.engine):
            content = _without_engine(content)
        elif None not in (served, command.model) and served != command.model and model is None:
            content = _without_pool(content)
    client = _bench_command(bench, content)
    gpu = gpu or content.gpu
    if gpu is None:
        raise BadInput("--gpu", None, "name the GPU, e.g. --gpu H100 (`servecast gpus` lists them)")
    named = command.model if serve is not None else None
    model = model or named or content.model or command.model
    if model is None:
        raise BadInput("--model", None, "the serve command names no model; name it, or use --model")
    _positive("--gpu-count", gpu_count)
    _positive("--kv-cache-tokens", kv_cache_tokens)
    _positive("--num-gpu-blocks", num_gpu_blocks)
    _vllm_blocks(command.engine, num_gpu_blocks, None if kv_cache_tokens else content.observed.num_gpu_blocks)
    if seed is not None and seed < 0:
        raise BadInput("--seed", seed, "must be at least 0")
    of_file = content.engine_version or (content.engine.version if content.engine else None)
    # A pasted container image names its version itself.
    version = engine_version or (None if serve is not None and command.version else of_file)
    if version is not None and not re.fullmatch(r"v?\d+(\.\d+)+\S*", version):
        raise BadInput("--engine-version", version, "must be a version such as 0.28.0")
    source = ScenarioSource(
        serve=command,
        bench=client,
        gpu=gpu,
        model=model,
        gpu_count=gpu_count or content.gpu_count,
        engine_version=version.lstrip("v") if version else None,
        observed=Observed(kv_cache_tokens, num_gpu_blocks)
        if kv_cache_tokens or num_gpu_blocks
        else Observed(content.observed.kv_cache_tokens, content.observed.num_gpu_blocks),
        seed=seed if seed is not None else content.seed if bench is None else None,
        replaced=_replaced(content, serve, bench),
        name=content.name or (Path(file).stem if isinstance(file, str | Path) else ""),
    )
    return source.with_settings(sets)


def serve_of(file: str | Path | Mapping[str, Any]) -> ServeCommand:
    """The launch command of a scenario file, whether it is pasted there or its engine written out.

    Raises:
        BadInput: the file cannot be used, or says nothing of an engine.
    """
    content = _content(file)
    command = _serve_command(None, content)
    return replace(command, model=content.model or command.model)


def _resolver(engine: EngineName) -> Callable[..., tuple[EngineConfig, tuple[Note, ...]]]:
    """An engine's own rules for absent flags; those of the other one stay unloaded."""
    resolve: Callable[..., tuple[EngineConfig, tuple[Note, ...]]] = import_module(
        f"sim.engines.{engine}.args"
    ).resolve
    return resolve


def gpus_needed(engine: EngineConfig) -> int:
    """GPUs of one deployment: TP x PP x DP (SGLang's DP attention shares the TP ranks)."""
    size = int(engine["tensor_parallel_size"]) * int(engine["pipeline_parallel_size"])
    shared = "enable_dp_attention" in engine.values and engine["enable_dp_attention"]
    return size if shared else size * int(engine["data_parallel_size"])


def _content(file: str | Path | Mapping[str, Any] | None) -> ScenarioInput | NoFile:
    if file is None:
        return NoFile()
    from sim.scenario_file import parse_scenario_mapping, read_scenario_file

    if isinstance(file, Mapping):
        return parse_scenario_mapping(file, "scenario")
    return read_scenario_file(file)


def _without_engine(content: ScenarioInput | NoFile) -> ScenarioInput | NoFile:
    content = _without_pool(content)
    if isinstance(content, NoFile):
        return content
    return content.model_copy(update={"engine": None, "engine_version": None})


def _without_pool(content: ScenarioInput | NoFile) -> ScenarioInput | NoFile:
    """The KV pool of another engine or model says nothing of this one."""
    if isinstance(content, NoFile):
        return content
    return content.model_copy(update={"observed": type(content.observed)()})


def _serve_command(serve: str | None, content: ScenarioInput | NoFile) -> ServeCommand:
    if serve is not None:
        return parse_serve_command(serve)
    if content.serve is not None:
        return parse_serve_command(content.serve)
    if content.engine is None:
        raise BadInput("--serve", None, "give the engine's launch command, or a scenario file with `serve:`")
    engine = content.engine
    flags = serve_commands.table(engine.name)
    words = [w for key, value in engine.args.items() for w in mapping_words(key, value, flags)]
    command = serve_from_words(
        engine.name,
        words,
        env=engine.env,
        image=engine.image,
        version=serve_commands.version_of_tag(engine.image or ""),
        entry="scenario file",
    )
    return replace(command, model=engine.model or command.model)


def _file_deployment(content: ScenarioInput | NoFile) -> tuple[EngineName | None, str | None]:
    """Engine and model that a scenario file describes; its version and observations are theirs."""
    if content.engine is not None:
        return content.engine.name, content.model or content.engine.model
    if content.serve is None:
        return None, content.model
    command = parse_serve_command(content.serve)
    return command.engine, content.model or command.model


def _bench_command(bench: str | None, content: ScenarioInput | NoFile) -> BenchCommand:
    text = bench if bench is not None else content.bench
    if text is not None:
        command = parse_bench_command(text)
    else:
        client: ClientName = (content.workload.client if content.workload else None) or "vllm"
        command = BenchCommand(client, default_spec(client), None, None)
        if content.workload is None:
            note = Note("info", "--bench", "not given: the bare `vllm bench serve` load")
            command = replace(command, notes=(note,))
    if content.workload is not None and bench is None:
        from sim.scenario_file import workload_from_input

        command = replace(command, spec=workload_from_input(content.workload, command.spec))
    return command


def _replaced(content: ScenarioInput | NoFile, serve: str | None, bench: str | None) -> tuple[Note, ...]:
    """What of a scenario file gave way to an option."""
    found = []
    if serve is not None and (content.serve is not None or content.engine is not None):
        found.append(Note("info", "--serve", "replaces the launch command of the scenario file"))
    if bench is not None and (content.bench is not None or content.workload is not None):
        found.append(Note("info", "--bench", "replaces the load of the scenario file"))
    return tuple(found)


def _positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BadInput(flag, value, "must be at least 1")


def _vllm_blocks(engine: EngineName, option: int | None, of_file: int | None) -> None:
    """Refuse a count of KV blocks for SGLang, whose log has tokens."""
    if engine == "sglang" and (option or of_file):
        field, instead = "--num-gpu-blocks", "--kv-cache-tokens"
        if option is None:
            field, instead = "observed.num_gpu_blocks", "observed.kv_cache_tokens"
        hint = f"is vLLM's count; SGLang logs max_total_num_tokens: give {instead}"
        raise BadInput(field, option or of_file, hint)


def _sets_seed(key: str) -> bool:
    return key.strip().rpartition(".")[2].lstrip("-") == "seed"


def _word(command: ServeCommand, flag: str) -> str | None:
    item = command.get(flag)
    return item.text if item else None
