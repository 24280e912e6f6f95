"""Estimates against checkpoints that stock torch saved, and counts of parameters against models that were built."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reshard.errors import CheckpointNotFound, UsageError
from reshard.verify.estimate.config_shapes import read_config
from reshard.verify.estimate.conventions import CONVENTIONS, Split
from reshard.verify.estimate.measure import measure
from reshard.verify.estimate.model_size import ModelSize, Unit

ROOT = Path(__file__).parents[2]
CONFIG_FILES = sorted((ROOT / "scripts" / "configs").glob("*.yaml"))
BY_NAME = {convention.name: convention for convention in CONVENTIONS}

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, heads alone": {**LLAMA, "num_key_value_heads": None},
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {**LLAMA, "head_dim": 48, "architectures": ["LlamaForCausalLM"]},
    "mistral": {**LLAMA, "model_type": "mistral", "head_dim": None},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 5},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3, biases": {**LLAMA, "model_type": "qwen3", "head_dim": 32, "attention_bias": True},
}


def save(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def trained(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 30, bias=False)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What stock torch gives to save."""
    model, optimizer = trained(dtype)
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def with_masters(moments: torch.dtype) -> dict[str, Any]:
    """As optimizers keep it that update fp32 copies of bf16 weights."""
    saved = state()
    for name, weight in saved["model"].items():
        entries = saved["optim"]["state"][name]
        entries["master_param"] = weight.clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            entries[moment] = entries[moment].to(moments)
        saved["model"][name] = weight.bfloat16()
    return saved


def with_bf16_moments() -> dict[str, Any]:
    saved = state()
    for entries in saved["optim"]["state"].values():
        entries.update({moment: entries[moment].bfloat16() for moment in ("exp_avg", "exp_avg_sq")})
    return saved


def with_8bit_moments(weights: torch.dtype) -> dict[str, Any]:
    """As bitsandbytes lays it out: a byte for each element, a scale for each block of 256."""
    weight = torch.zeros(512, 256, dtype=weights)
    blocks = weight.numel() // 256
    entries = {f"state{n}": torch.zeros(512, 256, dtype=torch.uint8) for n in (1, 2)}
    entries.update({f"absmax{n}": torch.zeros(blocks) for n in (1, 2)})
    entries.update({f"qmap{n}": torch.zeros(256) for n in (1, 2)})
    return {"model": {"w": weight}, "optim": {"state": {"w": {**entries, "step": 1}}}}


def tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    return sum(map(tensor_bytes, content.values())) if isinstance(content, dict) else 0


STATES = {
    ("fp32-adam", "fsdp-mixed"): state,
    ("bf16-master",): lambda: with_masters(torch.float32),
    ("bf16-master-bf16-moments",): lambda: with_masters(torch.bfloat16),
    ("fp32-bf16-moments",): with_bf16_moments,
    ("bf16-adam",): lambda: state(torch.bfloat16),
    ("fp32-8bit-moments",): lambda: with_8bit_moments(torch.float32),
    ("bf16-8bit-moments",): lambda: with_8bit_moments(torch.bfloat16),
}


@pytest.mark.parametrize("names", STATES, ids=lambda names: names[0])
def test_estimates_are_within_a_percent_of_what_stock_torch_saves(names: tuple[str, ...], tmp_path: Path) -> None:
    content = STATES[names]()
    parameters = sum(weight.numel() for weight in content["model"].values())
    found = measure(save(tmp_path / "x", content))
    assert tuple(convention.name for convention in found.matches) == names
    assert found.size.parameters == parameters
    # Counted from the tensors, not from the index.
    saved = {"weights": tensor_bytes(content["model"]), "all": tensor_bytes(content)}
    assert found.payload_bytes == saved["all"]
    assert next(total.length_bytes for total in found.kinds if total.kind == "weights") == saved["weights"]
    for convention in found.matches:
        assert convention.checkpoint.total_bytes(parameters) == pytest.approx(saved["all"], rel=0.01)
        assert found.total_per_parameter == pytest.approx(convention.checkpoint.per_parameter, rel=0.01)
    assert found.disk_bytes == sum(path.stat().st_size for path in (tmp_path / "x").glob("*.distcp"))


def test_what_a_rank_holds_in_memory_is_as_estimated() -> None:
    """fp32 and bf16 Adam, counted in a live run."""
    for dtype, name in ((torch.float32, "fp32-adam"), (torch.bfloat16, "bf16-adam")):
        model, optimizer = trained(dtype)
        parameters = list(model.parameters())
        moments = [entry for entries in optimizer.state.values() for entry in entries.values() if entry.ndim]
        held = {
            "weights": sum(map(tensor_bytes, parameters)),
            "masters": 0,
            "moments": sum(map(tensor_bytes, moments)),
            "gradients": sum(tensor_bytes(parameter.grad) for parameter in parameters),
        }
        count = sum(parameter.numel() for parameter in parameters)
        assert {part: count * each for part, each in BY_NAME[name].memory.parts.items()} == held


def shard_and_report(dtype: torch.dtype) -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False)).to(dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"local": sum(parameter.to_local().numel() for parameter in model.parameters())}


def test_the_largest_share_is_that_of_fsdps_first_rank() -> None:
    shares = [report["local"] for report in run_ranks(2, shard_and_report, torch.float32)]
    size = ModelSize.of_tensors({"0.weight": (5, 7), "0.bias": (5,), "1.weight": (3, 5)})
    assert size.parameters == sum(shares) == 55
    assert size.largest_share(2) == max(shares) == shares[0] == 3 * 7 + 3 + 2 * 5


def test_shares_of_many_ranks() -> None:
    size = ModelSize.of_units([Unit(((10, 3), (4,)), copies=2)], Unit(((7, 2), ())))
    assert size.parameters == 2 * 34 + 15
    assert size.largest_share(1) == size.parameters
    assert size.largest_share(4) == 2 * (3 * 3 + 1) + 2 * 2 + 1
    assert size.largest_share(100) == 2 * (3 + 1) + 2 + 1
    assert size.block_parameters == 34
    unknown = ModelSize(83)
    assert (unknown.largest_share(4), unknown.block_parameters, unknown.has_shapes) == (21, None, False)


def test_zero_as_in_its_paper() -> None:
    """Figure 1 of arXiv 1910.02054: 7.5 B parameters, 64 ranks: 31.4, 16.6 and 1.9 GB."""
    ranks, parameters = 64, 7_500_000_000
    share = ModelSize(parameters).largest_share(ranks)
    held_gb = [BY_NAME[f"zero-{stage}"].memory.rank_bytes(parameters, share) / 1e9 for stage in (1, 2, 3)]
    assert held_gb == pytest.approx([31.4, 16.6, 1.9], abs=0.05)


def test_every_convention_is_of_16_bytes_or_says_where_it_saves() -> None:
    assert len(BY_NAME) == len(CONVENTIONS)
    for convention in CONVENTIONS:
        assert convention.checkpoint.gradients == 0
        kept = dataclasses.replace(convention.memory, gradients=0, whole=frozenset())
        saved = dataclasses.replace(convention.checkpoint, whole=frozenset())
        # What is saved is what is kept; of ZeRO 3, all but the 16-bit weights.
        assert kept == saved or (convention.name == "zero-3" and dataclasses.replace(kept, weights=0) == saved)
    assert Split(weights=2, masters=4, whole=frozenset(["weights"])).rank_bytes(10, 3) == 2 * 10 + 4 * 3


def test_a_weight_without_state_is_told_apart(tmp_path: Path) -> None:
    content = state()
    content["model"]["head.weight"] = content["model"]["0.weight"].clone()
    content["model"]["seen"] = torch.zeros(5, dtype=torch.int64)
    found = measure(save(tmp_path / "x", content))
    assert found.unmeasured == ["model.head.weight", "model.seen"]
    assert found.unmeasured_bytes == 100 * 64 * 4 + 5 * 8
    assert [convention.name for convention in found.matches] == ["fp32-adam", "fsdp-mixed"]


class Small(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layer = nn.Linear(64, 64)
        self.head = nn.Linear(64, 100, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(kind != "frozen")

    def groups(self, kind: str) -> list[dict[str, Any]]:
        """Biases apart, as weight decay has it, so that the optimizer's order is not the model's."""
        parameters = [each for each in self.parameters() if each.requires_grad]
        if kind != "groups":
            return [{"params": parameters}]
        return [{"params": [each for each in parameters if each.ndim == ndim]} for ndim in (1, 2)]


@pytest.mark.parametrize(("kind", "without_state"), [
    ("plain", []), ("groups", []), ("tied", ["model.head.weight"]), ("frozen", ["model.embedding.weight"]),
])  # fmt: skip
def test_a_state_that_numbers_its_parameters_is_measured_like_a_named_one(
    kind: str, without_state: list[str], tmp_path: Path
) -> None:
    model = Small(kind)
    optimizer = torch.optim.AdamW(model.groups(kind))
    model.head(model.layer(model.embedding(torch.arange(8)))).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    found = measure(tmp_path / "x.pt")
    assert found.size.parameters == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert found.unmeasured == without_state
    assert found.per_parameter == {"weights": 4, "masters": 0, "moments": 8}
    assert [convention.name for convention in found.matches] == ["fp32-adam", "fsdp-mixed"]


def test_weights_alone_and_other_optimizers_match_nothing(tmp_path: Path) -> None:
    content = state()
    alone = measure(save(tmp_path / "weights", {"model": content["model"]}))
    assert (alone.matches, alone.has_optimizer, alone.total_per_parameter) == ((), False, 4)
    momentum = {name: {"momentum_buffer": weight} for name, weight in content["model"].items()}
    sgd = measure(save(tmp_path / "sgd", {"model": content["model"], "optim": {"state": momentum}}))
    assert (sgd.matches, sgd.has_optimizer, sgd.total_per_parameter) == ((), True, 8)


def test_nothing_there_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        measure(tmp_path / "none")
    with pytest.raises(UsageError, match="no weights"):
        measure(save(tmp_path / "x", {"model": {"seen": torch.zeros(2, dtype=torch.int64)}}))


def save_zero(folder: Path, stage: int) -> None:
    """Two ranks' files of one flat group, as DeepSpeed lays them out."""
    folder.mkdir()
    weight = torch.zeros(64, 32)
    halves = weight.flatten().chunk(2)
    module = {"w": weight.bfloat16() if stage < 3 else torch.zeros(0, dtype=torch.bfloat16)}
    model = {"module": module, "buffer_names": [], "param_shapes": [{"w": torch.Size((64, 32))}],
             "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "optimizer": None,
             "global_steps": 3, "dp_world_size": 2, "mp_world_size": 1}  # fmt: skip
    for rank, half in enumerate(halves):
        moments = {"step": torch.tensor(3.0), "exp_avg": half.clone(), "exp_avg_sq": half.clone()}
        groups = [{"lr": 0.1, "params": [0]}]
        adam = {"state": {0: moments}, "param_groups": groups}
        inner: dict[str, Any] = {"zero_stage": stage, "loss_scaler": None}
        if stage == 3:
            inner.update(partition_count=2, fp32_flat_groups=[half.clone()], optimizer_state_dict=adam)
        else:
            inner.update(partition_count=[2], group_paddings=[0], single_partition_of_fp32_groups=[half.clone()],
                         base_optimizer_state=adam)  # fmt: skip
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(model, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(("stage", "names"), [(2, ["zero-1", "zero-2"]), (3, ["zero-3"])])
def test_files_of_zero(stage: int, names: list[str], tmp_path: Path) -> None:
    save_zero(tmp_path / "x", stage)
    found = measure(tmp_path / "x")
    assert [convention.name for convention in found.matches] == names
    assert found.size.parameters == 64 * 32
    # The files of torch.save are zip archives: some kilobytes more.
    expected = found.matches[0].checkpoint.total_bytes(64 * 32)
    assert expected < found.disk_bytes < expected + 20_000


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_our_configs_count_what_the_model_has(path: Path) -> None:
    assert read_config(path).parameters == decoder_parameters(yaml.safe_load(path.read_text())["model"])


def decoder_parameters(section: dict[str, Any]) -> int:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from model import Decoder, ModelConfig, parameter_count
    finally:
        sys.path.pop(0)
    with torch.device("meta"):
        model = Decoder(ModelConfig(**section))
    return int(parameter_count(model))


@pytest.mark.parametrize("changes", [
    {}, {"tied_head": False}, {"kv_heads": 1}, {"hidden": 48, "kv_heads": 0}, {"hidden": 0, "width": 104},
], ids=str)  # fmt: skip
def test_defaults_of_our_model(changes: dict[str, Any], tmp_path: Path) -> None:
    section = {"vocabulary": 50, "layers": 2, "width": 32, "heads": 4, "max_length": 16, **changes}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": section}))
    assert read_config(path).parameters == decoder_parameters(section)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_hugging_face_configs_count_what_transformers_builds(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIGS[name]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = {id(parameter): parameter.numel() for parameter in model.parameters()}
    size = read_config(tmp_path)
    assert size.parameters == sum(built.values()) == read_config(tmp_path / "config.json").parameters
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert size.blocks[0].parameters == block


@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 16])
def test_stacked_experts_are_shared_as_transformers_5_has_them(ranks: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIGS["mixtral"]))
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        model = transformers.AutoModelForCausalLM.from_config(config)
    if not any(parameter.ndim == 3 for parameter in model.parameters()):
        pytest.skip("this transformers has no stacked experts")
    # torch.chunk is what FSDP splits with.
    share = sum(parameter.chunk(ranks)[0].numel() for parameter in model.parameters())
    size = read_config(tmp_path)
    assert (size.stacked_share(ranks) or size.largest_share(ranks)) == share
    assert (size.stacked_share(ranks) is None) == (ranks == 1)
    assert size.stacked is not None and size.stacked.parameters == size.parameters


def test_published_counts(tmp_path: Path) -> None:
    """Llama 3 70B and Mixtral 8x7B, as their model cards give them."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "vocab_size": 128256, "num_attention_heads": 64, "num_key_value_heads": 8,
    }))  # fmt: skip
    assert read_config(path).parameters == 70_553_706_496
    path.write_text(json.dumps({
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    }))  # fmt: skip
    assert read_config(path).parameters == 46_702_792_704


@pytest.mark.parametrize(("name", "content", "said"), [
    ("config.json", {key: LLAMA[key] for key in LLAMA if key != "hidden_size"}, "hidden_size missing"),
    ("config.json", {"model_type": "llama"}, "hidden_size, intermediate_size, num_hidden_layers"),
    ("config.json", {**LLAMA, "model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads missing"),
    ("config.json", {**LLAMA, "model_type": "mixtral"}, "num_local_experts missing"),
    ("config.json", {**LLAMA, "model_type": "mamba"}, "model_type: a model type whose shapes are not known here"),
    ("config.json", {**LLAMA, "model_type": None}, "model_type missing"),
    ("config.json", {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    ("config.json", {**LLAMA, "hidden_size": "64"}, "hidden_size: not usable: expected a whole number above 0"),
    ("config.json", {**LLAMA, "hidden_size": True}, "hidden_size: not usable"),
    ("config.json", {**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: not usable"),
    ("config.json", {**LLAMA, "num_hidden_layers": 10**13}, "at most"),
    ("config.json", {**LLAMA, "hidden_size": 66}, "hidden_size: does not divide evenly"),
    ("config.json", {**LLAMA, "num_key_value_heads": 3}, "num_attention_heads: does not divide evenly"),
    ("config.json", {**LLAMA, "model_type": "mixtral", "num_local_experts": 70_000}, "at most 65,536"),
    ("config.json", {**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings: not usable: expected true or false"),
    ("config.json", [LLAMA], "not a configuration: expected keys and values, found list"),
    ("run.yaml", {"model": {"layers": 2}}, "model.vocabulary, model.width, model.heads missing"),
    ("run.yaml", {"model": {"vocabulary": 9, "layers": 2, "width": 30, "heads": 4}}, "model.width: does not divide"),
    ("run.yaml", {"model": {"vocabulary": 9, "layers": 2, "width": 32, "heads": 4, "experts": 8}}, "found experts"),
    ("run.yaml", {"train": {"steps": 4}}, "model_type missing"),
])  # fmt: skip
def test_configs_that_do_not_do(name: str, content: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError) as caught:
        read_config(path)
    line = str(caught.value)
    assert said in line and str(path) in line and "--params" in line and "\n" not in line


def test_all_settings_of_our_model_are_known(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from model import ModelConfig
    finally:
        sys.path.pop(0)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": dataclasses.asdict(ModelConfig(vocabulary=50, layers=2, width=32, heads=4,
                                                                            max_length=16))}))  # fmt: skip
    assert read_config(path).blocks[0].copies == 2


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "large.json").touch()
    os.truncate(tmp_path / "large.json", 10**10)
    cases = {tmp_path: "found no file", tmp_path / "config.json": "found no file", Path("/dev/zero"): "found no file",
             tmp_path / "large.json": "found 10000000000 bytes", Path("~no-such-user/x"): "cannot be read",
             tmp_path / ("x" * 5000): "File name too long"}  # fmt: skip
    for path, said in cases.items():
        with pytest.raises(UsageError, match=said):
            read_config(path)


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe\x00", b"", b"[" * 100_000], ids=["cut", "binary", "empty", "deep"]
)
@pytest.mark.parametrize("name", ["config.json", "run.yaml"])
def test_files_that_are_no_configuration(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert "--params" in str(caught.value) and "\n" not in str(caught.value)
