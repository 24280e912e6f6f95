"""A small decoder-only language model.

Shapes in this module: batch, length (tokens in a window), width (features of a token), heads, kv_heads,
head_width (width // heads), hidden (features inside the MLP), vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a `Decoder`. `kv_heads` and `hidden` are filled in where they are left at 0."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int = 0
    """Heads of keys and values, each shared by heads // kv_heads query heads. 0: as many as `heads`."""
    hidden: int = 0
    """Features inside the MLP. 0: 8/3 of `width`, rounded up to a multiple of 64."""
    max_length: int
    dropout: float = 0.0
    tied_head: bool = True
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        # A frozen dataclass can set its own fields only this way.
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.hidden:
            # Three matrices of 8/3 of the width hold as many parameters as the two of 4 times the width in a plain MLP.
            object.__setattr__(self, "hidden", 64 * math.ceil(self.width * 8 / 3 / 64))
        for name in ("vocabulary", "layers", "width", "heads", "kv_heads", "hidden", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads}): "
                "rotary embeddings rotate pairs of features of a head"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def rotary_tables(length: int, head_width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and pair of features, each (length, head_width // 2), in fp32."""
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    frequencies = base ** (-pairs / head_width)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the feature pairs of x (batch, heads, length, head_width) by their position: rotary embeddings.

    Feature i is paired with feature i + head_width // 2.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings and grouped keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.dropout = config.dropout
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, length, width) -> (batch, length, width). cos, sin: (length, head_width // 2)."""
        # (batch, length, heads x head_width) -> (batch, heads, length, head_width)
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return projected


class MLP(nn.Module):
    """SwiGLU: a gated two-layer network that sees each position alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width) -> (batch, length, width)."""
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """One layer: attention, then the MLP, each normalised first and added to its input.

    The unit to shard and to compile: `fully_shard(block)`, `block.compile()`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, length, width) -> (batch, length, width). cos, sin: (length, head_width // 2)."""
        attended = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        output: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return output


class Decoder(nn.Module):
    """The language model: tokens in, logits of the next token out.

    Seed, build on the CPU, then shard: the weights then are the same however many ranks there are.

        torch.manual_seed(seed)
        model = Decoder(config)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    With `checkpoint_activations`, only the input of each block is kept for the backward pass and the rest is computed
    again: less memory, about a third more time, the same gradients.
    """

    def __init__(self, config: ModelConfig, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every weight anew; the values follow from torch's seed alone.

        The constructor calls it. Call it again after `to_empty()` on a model built on the meta device.
        """
        if self.config.tied_head:
            # Here and not in the constructor: to_empty() gives the two names a tensor each.
            self.head.weight = self.embedding.weight
        # Every block adds to the residual stream twice; this keeps the variance of the sum independent of the depth.
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.ones_(parameter)
            elif name.endswith(("attention.output.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=residual_std)
            else:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 (batch, length) -> logits (batch, length, vocabulary)."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"{length} tokens are more than the model's max_length of {self.config.max_length}")
        # Computed at each call, not kept as a buffer: there is nothing that to_empty() can lose or .to(bfloat16) can
        # round, and the cost is that of a few thousand cosines.
        cos, sin = rotary_tables(length, self.config.head_width, self.config.rope_base, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, computed in fp32. logits: (batch, length, vocabulary); targets: (batch, length)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay, norms and other vectors do not. A tied parameter appears once."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, tied ones counted once; of a sharded model, those of all ranks together."""
    return sum(parameter.numel() for parameter in model.parameters())
