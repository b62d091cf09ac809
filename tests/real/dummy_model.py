"""Model folders without weights, for `vllm serve --load-format dummy`.

The tokenizer knows the words `w3`, `w4`, ... and word `w<i>` is exactly the token with id i, which decodes
back to itself: a prompt of N words is a prompt of N tokens, and token counts are facts to assert.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama-architecture model."""

    hidden: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    inter: int = 512
    vocab: int = 2048
    head_dim: int = 64
    max_pos: int = 8192


TINY = Shape()
HALF_B = Shape(hidden=896, layers=24, heads=14, kv_heads=2, inter=4864, vocab=32000)
SPECIAL = ("<s>", "</s>", "<unk>")


def config(shape: Shape) -> dict[str, object]:
    """Return a `config.json` of that shape, bf16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_pos,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def tokenizer(shape: Shape) -> dict[str, object]:
    """Return a `tokenizer.json` (Hugging Face `tokenizers`): word level, split at every word."""
    words = {word: index for index, word in enumerate(SPECIAL)}
    words |= {f"w{index}": index for index in range(len(SPECIAL), shape.vocab)}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, word in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"w\d+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }


def write(folder: Path, shape: Shape = TINY) -> Path:
    """Write the model's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, object]] = {
        "config.json": config(shape),
        "tokenizer.json": tokenizer(shape),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": shape.max_pos,
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]), HALF_B)
