"""What the measured checkpoints hold: names and shapes of a training state with AdamW, without torch and numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping

Shapes = dict[str, tuple[int, ...]]

ELEMENT_BYTES = 4


def llama(wanted_bytes: float, layers: int = 12) -> tuple[dict[str, object], Shapes]:
    """The configuration of a Hugging Face Llama, and its weights in fp32, of about ``wanted_bytes``."""
    hidden = 64 * math.ceil(math.sqrt(wanted_bytes / ELEMENT_BYTES / (16 * layers + 16)) / 64)
    vocabulary = 8 * hidden
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (4 * hidden, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, 4 * hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
    return config, shapes


def transformer(wanted_bytes: float, layers: int = 12) -> Shapes:
    """A state of at least ``wanted_bytes``: a few large tensors, many middling ones, vectors, counters."""
    # Per parameter a weight and two moments; 12 h^2 parameters a layer and 32 h^2 in each of the embeddings.
    parameters = wanted_bytes / (3 * ELEMENT_BYTES)
    hidden = 8 * math.ceil(math.sqrt(parameters / (12 * layers + 64)) / 8)
    weights: Shapes = {
        "embed.weight": (32 * hidden, hidden),
        "norm.weight": (hidden,),
        "head.weight": (32 * hidden, hidden),
    }
    for layer in range(layers):
        for name in ("wq", "wk", "wv", "wo"):
            weights[f"layers.{layer}.attention.{name}.weight"] = (hidden, hidden)
        weights[f"layers.{layer}.mlp.up.weight"] = (4 * hidden, hidden)
        weights[f"layers.{layer}.mlp.down.weight"] = (hidden, 4 * hidden)
        for name in ("attention_norm", "mlp_norm"):
            weights[f"layers.{layer}.{name}.weight"] = (hidden,)
    return training_state(weights)


def with_a_large_tensor(budget_bytes: int) -> Shapes:
    """A state of ten times a memory budget, with a weight of twice the budget and moments of the same size."""
    weights: Shapes = {"large": (1000, math.ceil(2 * budget_bytes / 1000 / ELEMENT_BYTES))}
    weights |= {f"small.{number}": (100, math.ceil(budget_bytes / 3000 / ELEMENT_BYTES)) for number in range(40)}
    return training_state(weights)


def small_tensors(count: int) -> Shapes:
    """Tensors of 16 floats that eight ranks share."""
    return {f"model.part.{number // 100}.weight.{number % 100}": (8, 2) for number in range(count)}


def llama_405b(layers: int = 126) -> Shapes:
    """Llama 3.1 405B (or some layers of it), with AdamW."""
    hidden, inner, vocabulary, heads, kv_heads = 16384, 53248, 128256, 128, 8
    kv = hidden // heads * kv_heads
    weights: Shapes = {
        "tok_embeddings.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "output.weight": (vocabulary, hidden),
    }
    of_a_layer: Shapes = {
        "attention.wq.weight": (hidden, hidden),
        "attention.wk.weight": (kv, hidden),
        "attention.wv.weight": (kv, hidden),
        "attention.wo.weight": (hidden, hidden),
        "feed_forward.w1.weight": (inner, hidden),
        "feed_forward.w2.weight": (hidden, inner),
        "feed_forward.w3.weight": (inner, hidden),
        "attention_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
    }
    for layer in range(layers):
        weights |= {f"layers.{layer}.{name}": shape for name, shape in of_a_layer.items()}
    return training_state(weights)


def training_state(weights: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Weights, both moments and a step counter of each, under the keys of DCP."""
    state: Shapes = {f"model.{name}": shape for name, shape in weights.items()}
    for name, shape in weights.items():
        state[f"optim.state.{name}.exp_avg"] = shape
        state[f"optim.state.{name}.exp_avg_sq"] = shape
        state[f"optim.state.{name}.step"] = ()
    return state


def state_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of all elements."""
    return sum(math.prod(shape) for shape in shapes.values()) * ELEMENT_BYTES
