"""What `convert` writes, read by stock torch and by the safetensors library alone: every dtype, every kind of file."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rewriting import DTYPES, any_bits, bits, file_bytes, stock_tensors, write_boxes
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import reshard
from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats import torch_output
from reshard.formats.safetensors_header import HEADER_NAMES
from reshard.formats.zip_parts import ZIP64_BYTES
from reshard.rewrite import convert as converting

Tensors = dict[str, torch.Tensor]


def state() -> Tensors:
    """A training state of odd shapes."""
    shapes = {"emb.weight": (7, 3), "scale": (1,), "head.weight": (5, 4), "empty": (0, 3)}
    tensors = {
        f"model.{name}": any_bits(shape, torch.bfloat16, seed) for seed, (name, shape) in enumerate(shapes.items())
    }
    tensors["model.seen"] = torch.tensor(16777217)
    for seed, (name, shape) in enumerate(shapes.items(), 10):
        tensors[f"optim.state.{name}.exp_avg"] = any_bits(shape, torch.float32, seed)
        tensors[f"optim.state.{name}.step"] = torch.tensor(10000.0)
    return tensors


def saved(folder: Path, tensors: Tensors, objects: dict[str, Any] | None = None) -> Path:
    return write_boxes(folder, {key: (tensor, halves(tensor)) for key, tensor in tensors.items()}, objects)


def halves(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not tensor.ndim or tensor.shape[0] < 2:
        return [((0,) * tensor.ndim, tuple(tensor.shape))]
    middle, rest = tensor.shape[0] // 2, (0,) * (tensor.ndim - 1)
    tail = tuple(tensor.shape[1:])
    return [((0, *rest), (middle, *tail)), ((middle, *rest), (tensor.shape[0] - middle, *tail))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(found: dict[str, Any], expected: Tensors) -> None:
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(found[key]) == bits(tensor), key


OBJECTS = {"optim.param_groups.0.lr": 0.25, "optim.param_groups.0.params": ["emb.weight", "scale"]}


def test_a_whole_state_as_safetensors(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", state(), OBJECTS)
    reshard.convert(source, tmp_path / "made", to="safetensors")
    assert names(tmp_path / "made") == ["model.safetensors"]
    assert_same(load_file(tmp_path / "made" / "model.safetensors"), state())
    reshard.convert(source, tmp_path / "one.safetensors", to="safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "made" / "model.safetensors").read_bytes()


def test_a_whole_state_as_a_file_of_torch(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", state(), OBJECTS)
    for place in (tmp_path / "made.pt", tmp_path / "folder"):
        reshard.convert(source, place, to="torch")
        path = place if place.suffix else place / "pytorch_model.bin"
        found = torch.load(path, weights_only=True)
        assert {key: found.pop(key) for key in OBJECTS} == OBJECTS
        assert_same(found, state())
        assert_same({key: tensor for key, tensor in torch.load(path, mmap=True).items() if key not in OBJECTS}, state())
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            offsets = [
                archive.open(entry)._orig_compress_start for entry in archive.infolist() if "/data/" in entry.filename
            ]  # type: ignore[attr-defined]
        assert {offset % 64 for offset in offsets} == {0}
    with reshard.open_checkpoint(tmp_path / "made.pt") as opened:
        assert set(opened.keys) == set(state())


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_the_model_alone_has_bare_names(tmp_path: Path, to: str) -> None:
    source = saved(tmp_path / "source", state(), OBJECTS)
    model = {key.removeprefix("model."): tensor for key, tensor in state().items() if key.startswith("model.")}
    reshard.convert(source, tmp_path / "made", to=to, only="model")
    path = next((tmp_path / "made").iterdir())
    assert_same(load_file(path) if to == "safetensors" else torch.load(path, weights_only=True), model)
    reshard.convert(source, tmp_path / "single", to=to, only="model", dtype="fp32")
    found = (
        load_file(next((tmp_path / "single").iterdir()))
        if to == "safetensors"
        else torch.load(next((tmp_path / "single").iterdir()))
    )
    assert found["seen"].dtype == torch.int64 and int(found["seen"]) == 16777217
    assert bits(found["head.weight"]) == bits(model["head.weight"].float())


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {f"model.{dtype}".replace("torch.", ""): any_bits((5, 3), dtype, 1) for dtype in DTYPES}
    source = saved(tmp_path / "source", tensors)
    reshard.convert(source, tmp_path / "made.pt", to="torch")
    assert_same(torch.load(tmp_path / "made.pt", weights_only=True), tensors)
    with pytest.raises(UsageError, match="safetensors has no name for this dtype"):
        reshard.convert(source, tmp_path / "made", to="safetensors")
    assert not (tmp_path / "made").exists()
    named = {key: tensor for key, tensor in tensors.items() if key.partition(".")[2] in HEADER_NAMES}
    reshard.convert(saved(tmp_path / "named", named), tmp_path / "made", to="safetensors")
    assert_same(load_file(tmp_path / "made" / "model.safetensors"), named)


def test_numbered_files_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "FILE_BYTES", 100)
    reshard.convert(saved(tmp_path / "source", state()), tmp_path / "made", to="safetensors")
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        tensors = load_file(tmp_path / "made" / name)
        assert all(index["weight_map"][key] == name for key in tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 100
        found |= tensors
    assert_same(found, state())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state().values())
    count = len(set(index["weight_map"].values()))
    assert names(tmp_path / "made")[0] == f"model-00001-of-{count:05d}.safetensors"
    with reshard.open_checkpoint(tmp_path / "made") as opened:
        assert set(opened.keys) == set(state())


def test_dcp_by_default_has_a_file_for_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "source", state(), OBJECTS)
    reshard.convert(source, tmp_path / "one")
    assert sorted(file_bytes(tmp_path / "one")) == [".metadata", "__0_0.distcp", "reshard.json"]
    monkeypatch.setattr(converting, "FILE_BYTES", 200)
    reshard.convert(source, tmp_path / "several")
    assert len(file_bytes(tmp_path / "several")) > 3
    for made in ("one", "several"):
        assert_same(stock_tensors(tmp_path / made), state())


def test_configuration_and_tokenizer_come_along(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", state())
    (source / "huggingface").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / "huggingface" / name).write_text(f'"{name}"')
    (source / "huggingface" / "model.safetensors").write_bytes(b"stale")
    reshard.convert(source, tmp_path / "made", to="safetensors", only="model")
    assert names(tmp_path / "made") == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (tmp_path / "made" / "config.json").read_text() == '"config.json"'


def test_tied_weights_are_copied_or_recorded(tmp_path: Path) -> None:
    """Of two names of one storage, and a third tensor that is merely equal."""
    weight = torch.arange(6.0).reshape(3, 2)
    torch.save({"emb": weight, "head": weight, "equal": weight.clone()}, tmp_path / "source.pt")
    every = {"emb": weight, "head": weight, "equal": weight}
    reshard.convert(tmp_path / "source.pt", tmp_path / "copied.safetensors", to="safetensors", only="model")
    assert_same(load_file(tmp_path / "copied.safetensors"), every)
    reshard.convert(tmp_path / "source.pt", tmp_path / "once.safetensors", to="safetensors", only="model", tied="alias")
    assert_same(load_file(tmp_path / "once.safetensors"), {"emb": weight, "equal": weight})
    with safe_open(tmp_path / "once.safetensors", "pt") as file:
        assert json.loads(file.metadata()["tied"]) == {"head": "emb"}
    reshard.convert(tmp_path / "source.pt", tmp_path / "once.pt", to="torch", only="model", tied="alias")
    found = torch.load(tmp_path / "once.pt", weights_only=True)
    assert_same(found, every)
    assert found["head"].data_ptr() == found["emb"].data_ptr() != found["equal"].data_ptr()
    reshard.convert(tmp_path / "source.pt", tmp_path / "once", world_size=2, tied="alias")
    assert set(stock_tensors(tmp_path / "once")) == {"model.emb", "model.equal"}


def test_transformers_loads_what_was_converted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    config = transformers.LlamaConfig(**options, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    source = saved(tmp_path / "source", {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    config.save_pretrained(source)
    reshard.convert(source, tmp_path / "made", to="safetensors", only="model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert_same(loaded.state_dict(), model.state_dict())


def test_a_file_of_torch_beyond_four_gigabytes_has_the_wide_fields(tmp_path: Path) -> None:
    """Laid out only: what a reader needs of such a file is in its directory."""
    source = saved(tmp_path / "source", {"model.a": torch.zeros(2, 2)})
    with reshard.open_checkpoint(source) as opened:
        index = opened.index
        index.shapes[0] = (1 << 20, 1 << 11)
        files = torch_output.lay_out_torch(index, np.array([0]), {0: "a"}, ["float32"], {"n": 1})
    assert int(files.output.payload_bytes[0]) == 1 << 33 > ZIP64_BYTES
    ((file, position, content),) = files.output.frames.closing(np.array([7]))
    assert (file, position + len(content)) == (0, int(files.output.length_bytes[0]))
    sparse = tmp_path / "sparse.pt"
    with sparse.open("wb") as stream:
        stream.write(files.output.frames.head(0))
        stream.seek(int(files.output.payload_start[0] + files.output.payload_bytes[0]))
        stream.write(files.output.frames.tail(0, 7))
        stream.seek(position)
        stream.write(content)
    with zipfile.ZipFile(sparse) as archive:
        assert archive.getinfo("archive/data/0").file_size == 1 << 33
        assert archive.getinfo("archive/data/0").CRC == 7
    assert torch.load(sparse, mmap=True, weights_only=True)["a"].shape == (1 << 20, 1 << 11)


def test_a_destination_is_replaced_only_if_asked(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", state())
    (tmp_path / "made.pt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"):
        reshard.convert(source, tmp_path / "made.pt", to="torch")
    assert (tmp_path / "made.pt").read_bytes() == b"mine"
    reshard.convert(source, tmp_path / "made.pt", to="torch", force=True)
    assert_same(torch.load(tmp_path / "made.pt", weights_only=True), state())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="something else than a checkpoint"):
        reshard.convert(source, tmp_path / "notes.txt", to="dcp", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.pt", "notes.txt", "source"]


def test_from_a_consolidated_file(tmp_path: Path) -> None:
    """Nested as trainers save it, and flat: whichever it is, the model gets the keys of the model."""
    model = OrderedDict(
        (key.removeprefix("model."), tensor) for key, tensor in state().items() if key.startswith("model.")
    )
    torch.save({"model": model, "epoch": 3}, tmp_path / "nested.pt")
    torch.save(model, tmp_path / "flat.pt")
    # As a Llama of Hugging Face: its own names begin with "model".
    llama = {f"model.{key}": tensor for key, tensor in model.items()}
    save_file(llama, tmp_path / "llama.safetensors")
    torch.save(llama, tmp_path / "llama.pt")
    for name, expected in {"nested.pt": model, "flat.pt": model, "llama.safetensors": llama, "llama.pt": llama}.items():
        reshard.convert(tmp_path / name, tmp_path / f"{name}-made", world_size=3)
        assert_same(
            stock_tensors(tmp_path / f"{name}-made"), {f"model.{key}": tensor for key, tensor in expected.items()}
        )


def test_a_damaged_source_makes_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", state())
    data = source / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    # The first payload lies at the first multiple of 64 behind its local header.
    start = content.index(b"data/0")
    place = -(-(start + 6) // 64) * 64 + 1
    content[place] ^= 1
    data.write_bytes(bytes(content))
    for to in ("dcp", "safetensors", "torch"):
        with pytest.raises(CheckpointUnsound, match=r"checksum"):
            reshard.convert(source, tmp_path / "made", to=to)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_pickle_of_a_file_needs_no_class_beyond_torch(tmp_path: Path) -> None:
    reshard.convert(saved(tmp_path / "source", state(), OBJECTS), tmp_path / "made.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "made.pt") as archive:
        content = archive.read("archive/data.pkl")
    import pickletools

    names = {argument for code, argument, _ in pickletools.genops(content) if code.name == "GLOBAL"}
    assert all(str(name).startswith(("torch", "collections OrderedDict")) for name in names)
    assert content[:2] == pickle.PROTO + b"\x02"


@pytest.mark.parametrize("spoilt", [None, 5, 65_200], ids=["sound", "in a tensor", "between tensors"])
def test_a_storage_of_many_tensors_is_read_once_and_verified(tmp_path: Path, spoilt: int | None) -> None:
    """As the partitions of DeepSpeed are; between the tensors lies what none of them has."""
    flat = torch.arange(1 << 20, dtype=torch.float32)
    tensors = {f"p{number}": flat[number * 65536 :][:65000].view(650, 100) for number in range(16)}
    torch.save(tensors, tmp_path / "source.pt")
    if spoilt is not None:
        content = bytearray((tmp_path / "source.pt").read_bytes())
        content[content.index(flat[:16].numpy().tobytes()) + 4 * spoilt] ^= 1
        (tmp_path / "source.pt").write_bytes(bytes(content))
    source_bytes = (tmp_path / "source.pt").stat().st_size
    for ranks in (1, 3):
        if spoilt is not None:
            with pytest.raises(CheckpointUnsound, match="checksum"):
                reshard.convert(tmp_path / "source.pt", tmp_path / f"made-{ranks}", world_size=ranks)
            continue
        summary = reshard.convert(tmp_path / "source.pt", tmp_path / f"made-{ranks}", world_size=ranks)
        assert_same(
            stock_tensors(tmp_path / f"made-{ranks}"), {f"model.{key}": value for key, value in tensors.items()}
        )
        assert summary.read_bytes < 1.05 * source_bytes
