"""The shapes of a model's parameters from its configuration, without building it.

Two kinds are read: the ``config.json`` of a causal language model of Hugging Face whose blocks are those of Llama, and
the ``model:`` section of a YAML file for scripts/train_fsdp.py. The count has to be exact, so a model type that is not
in the table is refused rather than guessed at. Experts count as matrices of their own, as in the files of Hugging Face;
what a rank has at most where they are not, as in a model of transformers 5, is told besides.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from reshard.errors import UsageError
from reshard.verify.estimate.model_size import ModelSize, Shape, Unit

_HINT = "give the number of parameters with --params"
_MOST = 10**12
_MOST_BYTES = 10_000_000
_MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class _Family:
    """How a model type differs from Llama.

    Attributes:
        always: keys that have no default that could be relied on.
        qkv_bias, output_bias, mlp_bias: the key that says so, or whether there are biases at all.
        has_qk_norm: queries and keys of a head are normalised.
    """

    always: tuple[str, ...] = ("num_key_value_heads",)
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    has_qk_norm: bool = False
    has_experts: bool = False


_FAMILIES = {
    "llama": _Family(always=(), qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _Family(),
    "mixtral": _Family(always=("num_key_value_heads", "num_local_experts"), has_experts=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(
        always=("num_key_value_heads", "head_dim"),
        qkv_bias="attention_bias", output_bias="attention_bias", has_qk_norm=True,
    ),
}  # fmt: skip
_HF_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
_OUR_KEYS = ("vocabulary", "layers", "width", "heads")
_OUR_OPTIONS = ("kv_heads", "hidden", "tied_head", "max_length", "dropout", "rope_base", "norm_eps")


def read_config(path: Path) -> ModelSize:
    """The model that a configuration describes.

    Args:
        path: a ``config.json``, a folder with one, or a YAML file with a ``model`` section.

    Raises:
        UsageError: it cannot be read, lacks something, or describes a model that is not known.
    """
    path = _located(path)
    content = _read(path)
    section = content.get("model")
    if isinstance(section, Mapping):
        return _ours(_Config(section, path, "model."))
    return _hugging_face(_Config(content, path))


@dataclass(frozen=True)
class _Config:
    content: Mapping[str, Any]
    path: Path
    prefix: str = ""

    def require(self, *keys: str) -> None:
        missing = [f"{self.prefix}{key}" for key in keys if self.content.get(key) is None]
        if missing:
            raise UsageError(f"{', '.join(missing)} missing", path=self.path, hint=f"add what is missing, or {_HINT}")

    def count(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            self._refuse(key, "a whole number above 0", value)
        if value > most:
            self._refuse(key, f"at most {most:,}", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        raise UsageError(
            "not usable",
            path=self.path,
            key=f"{self.prefix}{key}",
            expected=expected,
            found=repr(value),
            hint=f"correct it, or {_HINT}",
        )


def _located(path: Path) -> Path:
    """The file itself, which is one that ends."""
    try:
        path = path.expanduser()
        if path.is_dir():
            path = path / "config.json"
        status = path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be read: {reason}", path=path, hint=f"name a config.json, or {_HINT}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise UsageError(
            "not a configuration",
            path=path,
            expected=f"a file of up to {_MOST_BYTES} bytes",
            found=f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no file",
            hint=f"name a config.json, or {_HINT}",
        )
    return path


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}", path=path, hint=f"name a config.json, or {_HINT}"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else f"line {mark.line + 1}"
        raise UsageError("not YAML", path=path, key=line, found=getattr(error, "problem", None), hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("not a configuration", path=path, found=str(error), hint=_HINT) from error
    if not isinstance(content, Mapping):
        raise UsageError(
            "not a configuration", path=path, expected="keys and values", found=type(content).__name__, hint=_HINT
        )
    return content


def _ours(config: _Config) -> ModelSize:
    """As scripts/model.py builds it, with its defaults."""
    config.require(*_OUR_KEYS)
    if unknown := sorted(map(str, config.content.keys() - {*_OUR_KEYS, *_OUR_OPTIONS})):
        raise UsageError("no such settings of this model", path=config.path, key="model",
                         expected=", ".join([*_OUR_KEYS, *_OUR_OPTIONS]), found=", ".join(unknown),
                         hint=f"delete them, or {_HINT}")  # fmt: skip
    vocabulary, layers, width, heads = (config.count(key) for key in _OUR_KEYS)
    # There, 0 is how to leave them out.
    kv_heads = heads if config.content.get("kv_heads") == 0 else config.count("kv_heads", heads)
    usual = 64 * math.ceil(width * 8 / 3 / 64)
    hidden = usual if config.content.get("hidden") == 0 else config.count("hidden", usual)
    _require_multiple(config, "width", width, "2 x heads", 2 * heads)
    _require_multiple(config, "heads", heads, "kv_heads", kv_heads)
    block = [*_attention(width, heads, kv_heads, width // heads), *_mlp(width, hidden), (width,), (width,)]
    return _decoder(vocabulary, width, layers, block, config.flag("tied_head", True))


def _hugging_face(config: _Config) -> ModelSize:
    config.require("model_type")
    family = _FAMILIES.get(str(config.content["model_type"]))
    if family is None:
        raise UsageError("a model type whose shapes are not known here", path=config.path, key="model_type",
                         expected=", ".join(_FAMILIES), found=config.content["model_type"], hint=_HINT)  # fmt: skip
    architectures = config.content.get("architectures") or []
    if not isinstance(architectures, list) or not all(str(name).endswith("ForCausalLM") for name in architectures):
        raise UsageError("not a causal language model", path=config.path, key="architectures",
                         expected="...ForCausalLM", found=architectures, hint=_HINT)  # fmt: skip
    config.require(*_HF_KEYS, *family.always)
    width, hidden, layers, vocabulary, heads = (config.count(key) for key in _HF_KEYS)
    kv_heads = config.count("num_key_value_heads", heads)
    if config.content.get("head_dim") is None:
        _require_multiple(config, "hidden_size", width, "num_attention_heads", heads)
    _require_multiple(config, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_width = config.count("head_dim", width // heads)

    is_tied = config.flag("tie_word_embeddings", False)

    def has(bias: str | bool) -> bool:
        return bias if isinstance(bias, bool) else config.flag(bias, False)

    block = [(width,), (width,), *_attention(width, heads, kv_heads, head_width)]
    if has(family.qkv_bias):
        block += [(heads * head_width,), (kv_heads * head_width,), (kv_heads * head_width,)]
    if has(family.output_bias):
        block.append((width,))
    if family.has_qk_norm:
        block += [(head_width,), (head_width,)]
    if family.has_experts:
        experts = config.count("num_local_experts", most=_MOST_EXPERTS)
        block.append((experts, width))
        whole = _decoder(vocabulary, width, layers, [*block, *_stacked_mlps(experts, width, hidden)], is_tied)
        return replace(
            _decoder(vocabulary, width, layers, [*block, *(_mlp(width, hidden) * experts)], is_tied), stacked=whole
        )
    block += _mlp(width, hidden)
    if has(family.mlp_bias):
        block += [(hidden,), (hidden,), (width,)]
    return _decoder(vocabulary, width, layers, block, is_tied)


def _require_multiple(config: _Config, key: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise UsageError("does not divide evenly", path=config.path, key=f"{config.prefix}{key}",
                         expected=f"a multiple of {of} ({divisor})", found=value,
                         hint=f"correct it, or {_HINT}")  # fmt: skip


def _attention(width: int, heads: int, kv_heads: int, head_width: int) -> list[Shape]:
    """Query, key, value, output."""
    query, keys = heads * head_width, kv_heads * head_width
    return [(query, width), (keys, width), (keys, width), (width, query)]


def _mlp(width: int, hidden: int) -> list[Shape]:
    """Gate, up, down."""
    return [(hidden, width), (hidden, width), (width, hidden)]


def _stacked_mlps(experts: int, width: int, hidden: int) -> list[Shape]:
    """Gate with up, and down, of all experts in one tensor each."""
    return [(experts, 2 * hidden, width), (experts, width, hidden)]


def _decoder(vocabulary: int, width: int, layers: int, block: list[Shape], is_tied: bool) -> ModelSize:
    """Blocks, embedding, the last norm, and a head where it is not the embedding."""
    embeddings = [(vocabulary, width)] * (1 if is_tied else 2)
    return ModelSize.of_units([Unit(tuple(block), layers)], Unit((*embeddings, (width,))))
