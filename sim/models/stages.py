"""Layers of a model on one stage of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from sim.models.model import ModelConfig


def largest_stage(model: ModelConfig, pipeline_parallel_size: int) -> ModelConfig:
    """The layers of the largest of equal stages; weights outside the layers are not shared out."""
    stages = pipeline_parallel_size
    if stages == 1:
        return model
    state = model.state
    if state is not None:
        layers = -(-state.num_layers // stages)
        state = replace(
            state,
            num_layers=layers,
            bytes_per_sequence=state.bytes_per_sequence // state.num_layers * layers,
        )
    return replace(
        model,
        num_full_attention_layers=-(-model.num_full_attention_layers // stages),
        num_sliding_layers=-(-model.num_sliding_layers // stages),
        state=state,
    )
