"""The roofline model against its contract, its physics, and flags that must change the price."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.base import StepShape
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu, gpu_rows
from sim.models.model import QuantConfig
from sim.models.table import load_model
from sim.models.weights import with_quantization
from sim.provenance import Origin
from sim.steptime.base import FrontEnd
from sim.steptime.buckets import NO_GRAPHS, GraphBuckets
from sim.steptime.cost import ModelCost, model_cost
from sim.steptime.defaults import default_efficiencies
from sim.steptime.efficiencies import BOUNDS, Efficiencies
from sim.steptime.gate import decodes_of, faults, prefill
from sim.steptime.roofline import Peaks, RooflineModel

H100 = find_gpu("H100")[0]
QWEN = load_model("Qwen/Qwen2.5-7B-Instruct")
VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
VLLM = GraphBuckets(decode=VLLM_SIZES, other=VLLM_SIZES)


def roofline(model=QWEN, gpu=H100, tp=1, kv="auto", buckets=VLLM, **changes):
    cost = model_cost(model, tp, kv)
    efficiencies = replace(default_efficiencies(gpu).efficiencies, **changes)
    return RooflineModel(efficiencies, cost, Peaks.of(gpu, cost), buckets, tp)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"])
def test_defaults_pass_the_gate(name):
    assert faults(roofline(load_model(name))) == ()


shapes = st.tuples(
    st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 20000)), max_size=3),
    st.lists(st.integers(1, 30000), max_size=300),
)


def shape_of(chunks, contexts):
    return StepShape(
        "mixed",
        sum(n for n, _ in chunks),
        len(chunks),
        len(contexts),
        sum(n * start + n * (n + 1) // 2 for n, start in chunks),
        sum(n + start for n, start in chunks),
        sum(contexts),
        len(chunks) + len(contexts),
    )


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(2, 4000), st.integers(1, 20000))
def test_more_work_never_takes_less_time(parts, tokens, context):
    model = roofline(mixed_kv_reread=0.2)
    chunks, contexts = parts
    base = model.gpu(shape_of(chunks, contexts))
    assert model.gpu(shape_of([*chunks, (tokens, 0)], contexts)) >= base
    assert model.gpu(shape_of(chunks, [*contexts, context])) >= base
    if contexts:
        assert model.gpu(shape_of(chunks, [contexts[0] + context, *contexts[1:]])) >= base


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 500))
def test_time_is_affine_in_decode_context(parts, growth):
    chunks, contexts = parts
    if not contexts:
        contexts = [100]
    model = roofline()
    at = [model.gpu(shape_of(chunks, [c + k * growth for c in contexts])) for k in (0, 1, 2)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0], rel=1e-6, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_parts_add_up(parts):
    model = roofline(tp=2, gpu=H100)
    shape = shape_of(*parts)
    assert model.gpu(shape) == pytest.approx(model.parts(shape).total, rel=1e-12, abs=1e-15)


def test_same_shape_costs_the_same_whatever_came_before():
    model, fresh = roofline(), roofline()
    for n in range(1, 100):
        model.gpu(decodes_of(n, 500))
    assert model.gpu(decodes_of(42, 4321)) == fresh.gpu(decodes_of(42, 4321))


def test_decodes_are_padded_to_the_next_graph():
    def gemm(decodes, **changes):
        shape = decodes_of(decodes, 100)._replace(num_sampled=1)  # the output projection is not padded
        return roofline(**changes).parts(shape).gemm

    assert gemm(41) == gemm(48)
    assert gemm(40) < gemm(41)
    assert gemm(41, buckets=NO_GRAPHS, eager_launch=0.0) < gemm(41)


def test_a_batch_above_the_largest_graph_is_not_padded():
    assert VLLM.pad(decodes_of(513, 1)) == (513, "eager")
    assert VLLM.pad(prefill(500)) == (512, "piecewise")
    assert GraphBuckets(other=(4, 64), max_padding=2.0).pad(prefill(20)) == (20, "eager")
    # A decode graph is taken however much of it stays empty.
    assert GraphBuckets(decode=(1, 32), max_padding=2.0).pad(decodes_of(9, 1)) == (32, "graph")


def test_a_prefill_of_single_tokens_takes_no_decode_graph() -> None:
    buckets = GraphBuckets(decode=(1, 2), other=(4, 8), max_padding=2.0)
    one = StepShape("prefill", 0, 0, 1, 0, 0, 900, 1)
    assert buckets.pad(one) == (1, "eager")
    assert buckets.pad(one._replace(num_decode_seqs=3)) == (4, "piecewise")
    assert buckets.pad(one._replace(kind="decode")) == (1, "graph")
    assert buckets.pad(one._replace(kind="mixed")) == (1, "graph")


def test_sglang_decodes_beyond_the_largest_graph_do_not_use_prefill_graphs():
    buckets = GraphBuckets(decode=(8, 16), other=(32, 64))
    assert buckets.pad(decodes_of(20, 1, "decode")) == (20, "eager")


def test_eager_steps_are_no_shorter_than_their_launches():
    model = roofline(buckets=NO_GRAPHS, eager_launch=0.001)
    parts = model.parts(decodes_of(1, 1))
    # Launches overlap everything that the device does, but not what reads the context.
    assert parts.total - parts.kv_read == pytest.approx(28 * 0.001)
    assert model.assess(decodes_of(1, 1))[1] == "overhead"
    assert model.parts(prefill(8192)).gemm > 28 * 0.001


def test_tile_edges_cost_a_step():
    model = roofline(tile=256, tile_edge=0.85, buckets=NO_GRAPHS)
    flat = roofline(tile_edge=0.0, buckets=NO_GRAPHS)
    jump = model.gpu(prefill(1025)) - model.gpu(prefill(1024))
    per_token = flat.gpu(prefill(1025)) - flat.gpu(prefill(1024))
    assert jump > 100 * per_token
    assert model.gpu(prefill(1024)) == pytest.approx(flat.gpu(prefill(1024)))


def test_fp8_kv_halves_the_kv_read_and_nothing_else():
    plain, fp8 = roofline().parts(decodes_of(8, 4096)), roofline(kv="fp8").parts(decodes_of(8, 4096))
    assert fp8.kv_read == pytest.approx(plain.kv_read / 2)
    assert fp8.gemm == plain.gemm


def test_fp8_weights_read_faster_and_compute_faster():
    quantised = roofline(with_quantization(QWEN, "fp8"))
    plain = roofline()
    assert quantised.parts(decodes_of(1, 1)).gemm < 0.6 * plain.parts(decodes_of(1, 1)).gemm
    assert quantised.parts(prefill(8192)).gemm < 0.6 * plain.parts(prefill(8192)).gemm


def test_tensor_parallelism_divides_work_and_pays_for_the_wire():
    one, two = roofline(), roofline(tp=2)
    assert two.parts(prefill(4096)).gemm == pytest.approx(one.parts(prefill(4096)).gemm / 2, rel=0.02)
    assert one.parts(prefill(4096)).communication == 0.0
    latency = 2 * 28 * one.efficiencies.allreduce_latency
    assert two.parts(decodes_of(1, 1)).communication > latency
    assert two.gpu(prefill(4096)) > one.gpu(prefill(4096)) / 2


def test_kv_heads_are_replicated_beyond_their_number():
    llama = load_model("meta-llama/Llama-3.1-8B-Instruct")
    assert model_cost(llama, 8).kv_bytes_per_token == model_cost(llama, 16).kv_bytes_per_token


def test_experts_are_read_as_tokens_reach_them():
    cost = model_cost(load_model("Qwen/Qwen3-30B-A3B"))
    routed = cost.moe_layers * cost.expert_bytes
    fixed = cost.dense_bytes + cost.lm_head_bytes
    assert cost.weight_bytes(1, 1) == pytest.approx(fixed + routed * 8)
    assert cost.weight_bytes(100_000, 1) == pytest.approx(fixed + routed * 128)
    assert fixed + routed * 8 < cost.weight_bytes(4, 1) < fixed + routed * 32


def test_dense_cost_is_that_of_the_tensors():
    cost = model_cost(QWEN)
    layer = 3584 * 3584 * 2 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert cost.dense_flops_per_token == pytest.approx(2 * 28 * layer, rel=1e-3)
    assert cost.dense_bytes == pytest.approx(2 * 28 * layer, rel=1e-3)
    assert cost.lm_head_bytes == 2 * 152064 * 3584
    assert cost.kv_bytes_per_token == 57344
    assert cost.pair_flops == 4 * 28 * 128 * 28


def test_sliding_layers_stop_reading_at_the_window():
    cost = ModelCost(1e9, 1e8, 1e9, 1e8, 1e5, 1000.0, 10, 8192.0)
    cost = replace(cost, sliding_kv_bytes_per_token=1000.0, sliding_window=128, sliding_pair_flops=1e5)
    model = RooflineModel(default_efficiencies(H100).efficiencies, cost, Peaks.of(H100, cost))
    near, far = model.parts(decodes_of(1, 128)).kv_read, model.parts(decodes_of(1, 256)).kv_read
    assert far - near == pytest.approx(near / 2)


def test_mixed_batches_reread_kv_per_further_query_head():
    mixed = shape_of([(100, 0)], [4000])
    once, more = roofline(mixed_kv_reread=0.0), roofline(mixed_kv_reread=0.15)
    assert more.parts(mixed).kv_read == pytest.approx(once.parts(mixed).kv_read * (1 + 0.15 * 6))
    assert more.parts(decodes_of(1, 4000)) == once.parts(decodes_of(1, 4000))


def test_what_bounds_a_step():
    model = roofline()
    assert model.assess(decodes_of(1, 100))[1] == "bandwidth"
    assert model.assess(prefill(8192))[1] == "compute"


@pytest.mark.parametrize(
    ("name", "value"), [("weight_bandwidth", 1.2), ("kv_bandwidth", 0.0), ("ridge", 0.5)]
)
def test_coefficients_beyond_physics_are_refused(name, value):
    with pytest.raises(BadInput, match=f"efficiencies.{name}"):
        replace(default_efficiencies(H100).efficiencies, **{name: value})


def test_nan_is_refused():
    with pytest.raises(BadInput):
        replace(default_efficiencies(H100).efficiencies, step_overhead=float("nan"))


def test_coefficients_survive_a_dictionary():
    efficiencies = default_efficiencies(H100).efficiencies
    assert Efficiencies.from_dict(efficiencies.to_dict()) == efficiencies
    assert set(efficiencies.to_dict()) == set(BOUNDS)


@pytest.mark.parametrize("values", [{"speed": 1.0}, {"weight_bandwidth": 0.8}])
def test_unknown_and_missing_coefficients_are_named(values):
    with pytest.raises(BadInput, match=r"efficiencies\.(speed|kv_bandwidth)"):
        Efficiencies.from_dict(values)


def test_every_gpu_has_efficiencies_with_a_source_each():
    for gpu in gpu_rows():
        defaults = default_efficiencies(gpu)
        assert set(defaults.sources) == set(BOUNDS)
        assert all(source.rule for source in defaults.sources.values())


def test_only_unmeasured_gpus_say_that_they_are_assumed():
    assert default_efficiencies(find_gpu("RTX-5090")[0]).sources["kv_bandwidth"].origin is Origin.FITTED
    known = default_efficiencies(find_gpu("RTX-5090")[0])
    unmeasured = default_efficiencies(find_gpu("B200")[0])
    assert not known.assumed
    assert not known.notes()
    assert known.step_error == pytest.approx(0.086, abs=1e-3)
    assert {"kv_bandwidth", "gemm_flops"} & set(unmeasured.assumed)
    assert "calibrates them" in unmeasured.notes()[0].text
    assert unmeasured.step_error == pytest.approx(0.28, abs=1e-3)


def test_front_end_is_part_of_the_model():
    model = roofline(front_request=0.001, front_prompt_token=2e-6, output_delay=0.003, output_token=1e-5)
    assert model.front_end == FrontEnd(0.001, 2e-6, 0.003, 1e-5)


class NoPrefillTerm:
    front_end = FrontEnd()

    def gpu(self, shape):
        return 0.01 + 1e-4 * shape.num_decode_seqs if shape.num_tokens > 1 else 0.01 * shape.num_tokens

    def host_before(self, shape):
        return 0.0

    def host_after(self, shape):
        return 0.0

    def out_of_range(self, shape):
        return None


def test_a_model_without_a_prefill_term_is_rejected():
    assert faults(NoPrefillTerm()) == ("no sensitivity to prefill tokens",)


def test_a_gpu_without_the_dtype_is_refused():
    t4 = find_gpu("T4")[0]
    with pytest.raises(BadInput, match="bf16"):
        Peaks.of(t4, model_cost(QWEN))


@pytest.mark.parametrize(("card", "quantization"), [("A100", "fp8"), ("T4", "fp8"), ("A100", "nvfp4")])
def test_quantised_weights_without_units_are_multiplied_in_the_dtype_of_the_model(card, quantization):
    gpu = find_gpu(card)[0]
    dtype = "bf16" if "bf16" in gpu.dense_flops else "fp16"
    model = replace(QWEN, dtype=dtype, quant=QuantConfig(quantization, 8.0, quantization[-3:], ()))
    peaks = Peaks.of(gpu, model_cost(model))
    assert peaks.gemm_flops == peaks.attention_flops == gpu.dense_flops[dtype]
    assert model_cost(model).dense_bytes < model_cost(replace(QWEN, dtype=dtype)).dense_bytes


def test_weight_only_schemes_run_where_there_is_no_bf16():
    t4 = find_gpu("T4")[0]
    awq = replace(load_model("Qwen/Qwen2.5-7B-Instruct-AWQ"), dtype="fp16")
    assert Peaks.of(t4, model_cost(awq)).gemm_flops == t4.dense_flops["fp16"]
