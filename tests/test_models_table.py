"""The shipped models: names, and parameter totals against what their makers publish."""

from __future__ import annotations

import pytest

from sim.errors import BadInput
from sim.models import table
from sim.models.table import load_model, model_names
from sim.models.weights import active_parameters, count_parameters, weight_bytes

# Totals [10^9]: the safetensors index of the HF repository where it is exact, else the model card or report.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494032768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.543714304,
    "Qwen/Qwen2.5-3B-Instruct": 3.085938688,
    "Qwen/Qwen2.5-7B-Instruct": 7.615616512,
    "Qwen/Qwen2.5-14B-Instruct": 14.770033664,
    "Qwen/Qwen2.5-32B-Instruct": 32.763876352,
    "Qwen/Qwen2.5-72B-Instruct": 72.706203648,
    "Qwen/Qwen3-0.6B": 0.596049920,
    "Qwen/Qwen3-1.7B": 1.720574976,
    "Qwen/Qwen3-4B": 4.022468096,
    "Qwen/Qwen3-8B": 8.190735360,
    "Qwen/Qwen3-14B": 14.768307200,
    "Qwen/Qwen3-32B": 32.762123264,
    "Qwen/Qwen3-30B-A3B": 30.532122624,
    "Qwen/Qwen3-235B-A22B": 235.093634560,
    "Qwen/Qwen3.5-9B": 9.0,
    "Qwen/Qwen3.5-27B": 27.0,
    "Qwen/Qwen3.5-35B-A3B": 35.0,
    "Qwen/Qwen3.5-122B-A10B": 122.0,
    "Qwen/Qwen3.5-397B-A17B": 397.0,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.315784192,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030261248,
    "meta-llama/Llama-3.1-70B-Instruct": 70.553706496,
    "meta-llama/Llama-3.1-405B-Instruct": 405.853388800,
    "meta-llama/Llama-3.2-1B-Instruct": 1.235814400,
    "meta-llama/Llama-3.2-3B-Instruct": 3.212749824,
    "meta-llama/Llama-2-7b-chat-hf": 6.738415616,
    "meta-llama/Llama-2-13b-chat-hf": 13.015864320,
    "meta-llama/Llama-2-70b-chat-hf": 68.976648192,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108.6,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 401.6,
    "codellama/CodeLlama-34b-Instruct-hf": 33.743970304,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.248023552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12.247782400,
    "mistralai/Ministral-8B-Instruct-2410": 8.019808256,
    "mistralai/Mistral-Small-Instruct-2409": 22.247282688,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23.572403200,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 24.011361280,
    "mistralai/Mistral-Large-Instruct-2407": 122.610069504,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.702792704,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140.620634112,
    "deepseek-ai/DeepSeek-V3": 671.026419200,
    "deepseek-ai/DeepSeek-V2-Lite": 15.706484224,
    "deepseek-ai/DeepSeek-V2": 235.741434880,
    "openai/gpt-oss-20b": 20.914757184,
    "openai/gpt-oss-120b": 116.829156672,
    "google/gemma-2-2b-it": 2.614341888,
    "google/gemma-2-9b-it": 9.241705984,
    "google/gemma-2-27b-it": 27.227128320,
    "google/gemma-3-1b-it": 0.999885952,
    "google/gemma-3-4b-it": 4.300079472,
    "google/gemma-3-12b-it": 12.187325040,
    "google/gemma-3-27b-it": 27.432406640,
    "google/gemma-4-31B-it": 30.7,
    "google/gemma-4-26B-A4B-it": 25.2,
    "zai-org/GLM-4-9B-0414": 9.400279040,
    "zai-org/GLM-4.5-Air": 106.852,
    "zai-org/GLM-4.5": 355.0,
    "zai-org/GLM-4.7-Flash": 30.0,
    "zai-org/GLM-5": 744.0,
    "moonshotai/Kimi-K2-Instruct": 1026.0,
    "MiniMaxAI/MiniMax-M2": 228.7,
    "microsoft/phi-4": 14.659507200,
    "microsoft/Phi-4-mini-instruct": 3.836021760,
    "microsoft/Phi-3-mini-4k-instruct": 3.821079552,
    "microsoft/Phi-3-medium-4k-instruct": 13.960238080,
    "microsoft/Phi-3.5-MoE-instruct": 41.873153344,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "ibm-granite/granite-3.3-8b-instruct": 8.170864640,
    "allenai/OLMo-2-1124-7B-Instruct": 7.298617344,
    "allenai/OLMo-2-1124-13B-Instruct": 13.716198400,
    "allenai/OLMo-2-0325-32B-Instruct": 32.234279936,
    "01-ai/Yi-1.5-34B-Chat": 34.388917248,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.711376384,
    "HuggingFaceTB/SmolLM3-3B": 3.075098624,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.151104512,
}

# Active parameters per token [10^9] as model cards round them.
ACTIVE = {
    "Qwen/Qwen3-30B-A3B": 3.3,
    "Qwen/Qwen3-235B-A22B": 22.0,
    "deepseek-ai/DeepSeek-V3": 37.5,
    "openai/gpt-oss-120b": 5.7,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 12.9,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 39.0,
    "moonshotai/Kimi-K2-Instruct": 32.6,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 3.6,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_those_published(name: str) -> None:
    assert count_parameters(load_model(name)).total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_published(name: str) -> None:
    assert active_parameters(load_model(name)) / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("name", model_names())
def test_every_row_is_complete_and_says_its_source(name: str) -> None:
    model = load_model(name)
    assert model.source
    assert model.missing == ()
    assert model.num_full_attention_layers + model.num_sliding_layers > 0
    assert 0 < weight_bytes(model) <= 2.2 * count_parameters(model).total


def test_families_are_complete() -> None:
    sizes = {
        "Qwen/Qwen2.5-{}B-Instruct": ("0.5", "1.5", "3", "7", "14", "32", "72"),
        "Qwen/Qwen2.5-Coder-{}B-Instruct": ("0.5", "1.5", "3", "7", "14", "32"),
        "Qwen/Qwen3-{}": ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"),
    }
    wanted = {pattern.format(size) for pattern, each in sizes.items() for size in each}
    assert wanted <= set(model_names())


def test_a_short_name_in_any_case_is_enough() -> None:
    assert load_model("qwen2.5-7b-instruct").name == "Qwen/Qwen2.5-7B-Instruct"
    assert load_model("QWEN/qwen3-14b").name == "Qwen/Qwen3-14B"


def test_an_unknown_name_gets_neighbours_and_a_way_out() -> None:
    with pytest.raises(BadInput, match=r"Qwen/Qwen3-14B.*config\.json"):
        load_model("Qwen/Qwen3-14C")


@pytest.mark.parametrize("name", ["", "   ", "/no/such/folder", "./missing.json"])
def test_no_model_at_all(name: str) -> None:
    with pytest.raises(BadInput):
        load_model(name)


def test_quantised_twins_weigh_less() -> None:
    for twin in ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B-AWQ"):
        full, quantised = load_model("Qwen/Qwen3-8B"), load_model(twin)
        assert count_parameters(full).total == count_parameters(quantised).total
        assert weight_bytes(quantised) < 0.65 * weight_bytes(full)


def test_a_row_is_the_same_whether_its_file_alone_is_parsed_or_all_of_them() -> None:
    for name in model_names():
        assert table._table(name)[name] == table._table()[name]
