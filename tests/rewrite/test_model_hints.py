"""A model in place of names and shapes: real files of FSDP1 and verl with nothing else, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from legacy import fake_rank, sharded, write_ranks
from rewriting import bits, stock_tensors
from torch import nn
from torch.distributed.tensor import Shard

import reshard
from reshard.cli.main import main
from reshard.errors import UsageError
from reshard.formats.opening import open_checkpoint
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.model_order import names_in_model_order
from reshard.rewrite.model_hints import outline_of, read_model

FLAT, ORIG = "fsdp1_local_flat_nested_w4", "fsdp1_local_orig_nested_w4"
VERL_FLAT, VERL = "verl_fsdp1_flat_w4", "verl_fsdp2_w4"
HERE = Path(__file__).name.removesuffix(".py")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(24, 50), nn.Linear(50, 24)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = nn.LayerNorm(24), Attention(), nn.LayerNorm(24), Feed()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(13, 24), requires_grad=False)


class Model(nn.Module):
    """What the peers' checkpoints are of, by names and shapes."""

    def __init__(self, width: int = 97) -> None:
        super().__init__()
        self.small, self.scale = nn.Parameter(torch.zeros(3, 24)), nn.Parameter(torch.zeros(1))
        self.emb, self.frozen = nn.Embedding(width, 24), Frozen()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lnf, self.head = nn.LayerNorm(24), nn.Linear(24, width, bias=False)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("no weights here")


def not_a_model() -> int:
    return 3


def assert_expected(case: str, found: dict[str, torch.Tensor]) -> None:
    expected = peers.expected(case)
    assert {key for key in found if not key.startswith(("rng.", "train_state."))} == set(expected)
    for key, tensor in expected.items():
        assert (found[key].shape, bits(found[key])) == (tensor.shape, bits(tensor)), key


@pytest.mark.parametrize(
    ("case", "wrap"),
    [
        (FLAT, ()),
        (FLAT, ("Block", "Frozen")),
        (ORIG, ()),
        (ORIG, ("Block",)),
        (VERL_FLAT, ("Block", "frozen")),
        (VERL, ()),
    ],
)
def test_a_model_is_all_that_real_files_lack(tmp_path: Path, case: str, wrap: Sequence[str]) -> None:
    reshard.convert(peers.folder(case), tmp_path / "made", world_size=3, model=Model, wrap=wrap)
    assert_expected(case, stock_tensors(tmp_path / "made"))


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    made = tmp_path / "made"
    assert main(["convert", str(peers.folder(FLAT)), str(made), "--model", f"{HERE}:Model", "--wrap", "Block",
                 "--wrap", "Frozen"]) == 0  # fmt: skip
    assert_expected(FLAT, stock_tensors(made))


def test_a_live_model_with_wrappers(tmp_path: Path) -> None:
    live = Model()
    live.blocks[0] = nn.ModuleDict({"_checkpoint_wrapped_module": live.blocks[0]})
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": live})})
    assert outline_of(wrapped) == outline_of(Model())
    reshard.convert(peers.folder(FLAT), tmp_path / "made", model=wrapped, wrap=["Block", "Frozen"])
    assert_expected(FLAT, stock_tensors(tmp_path / "made"))


def test_the_outline_knows_ties_classes_and_what_is_frozen() -> None:
    tied = Model()
    tied.head.weight = tied.emb.weight
    outline = outline_of(nn.ModuleDict({"module": nn.ModuleDict({"_fsdp_wrapped_module": tied})}))
    assert outline.tied == (("head.weight", "emb.weight"),)
    assert outline.frozen == {"frozen.table"}
    assert outline.modules is not None
    assert (outline.modules[""], outline.modules["blocks.1"]) == ("Model", "Block")
    units = outline.units(["", "blocks.0", "blocks.1"], Path("x"))
    assert units[""].fqns == ("small", "scale", "emb.weight", "frozen.table", "lnf.weight", "lnf.bias")
    assert units[""].shared == (("head.weight", "emb.weight"),)
    assert units["blocks.1"].fqns[0] == "blocks.1.ln1.weight"


def test_a_parameter_that_was_not_to_be_wrapped(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    source.mkdir()
    for rank, file in enumerate(sorted(peers.folder(FLAT).glob("*rank*"))):
        with fake_rank(rank, 4):
            content = torch.load(file, weights_only=False)
            content["model"]["extra.w"] = torch.ones(2, 3)
            torch.save(content, source / file.name)

    def model() -> Model:
        made = Model()
        made.add_module("extra", nn.ParameterDict({"w": torch.ones(2, 3)}).requires_grad_(False))
        return made

    reshard.convert(source, tmp_path / "made", model=model)
    found = stock_tensors(tmp_path / "made")
    assert found.pop("model.extra.w").tolist() == [[1.0] * 3] * 2
    assert_expected(FLAT, found)


def test_shapes_that_another_part_of_the_checkpoint_has(tmp_path: Path) -> None:
    expected = peers.expected(ORIG)
    shapes = {
        key.removeprefix("model."): tuple(tensor.shape) for key, tensor in expected.items() if key[:6] == "model."
    }
    order = peers.hints(ORIG).param_order
    with open_checkpoint(
        peers.folder(ORIG), hints=Hints(shapes=shapes, param_order=order, optimizer="named")
    ) as opened:
        assert_expected(ORIG, {key: opened.read(key) for key in opened.keys})
    del shapes["frozen.table"]
    with pytest.raises(UsageError, match=r"no shape of what lies.*frozen\.table"):
        open_checkpoint(peers.folder(ORIG), hints=Hints(shapes=shapes, optimizer="named"))
    open_checkpoint(peers.folder(ORIG), hints=Hints(shapes=shapes)).close()
    with pytest.raises(UsageError, match="--model"):
        open_checkpoint(peers.folder(FLAT), hints=Hints(shapes=shapes, optimizer="named"))


def refused(case: str, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        reshard.convert(peers.folder(case), tmp_path / "made", **options)
    assert not (tmp_path / "made").exists()
    return str(raised.value)


def test_other_units_than_the_files_name(tmp_path: Path) -> None:
    message = refused(FLAT, tmp_path, model=Model, wrap=["Attention"])
    assert "'blocks.0', 'blocks.1', 'frozen'" in message
    assert "'blocks.0.attn', 'blocks.1.attn'" in message
    assert "Block" in message and "Frozen" in message
    assert "Bluck" in refused(FLAT, tmp_path, model=Model, wrap=["Bluck"])
    assert "optimizer has" in refused(VERL_FLAT, tmp_path, model=Model, wrap=["Block"])
    assert "--wrap CLASS" in refused(VERL_FLAT, tmp_path, model=Model)
    assert "the files name" in refused(FLAT, tmp_path, model=nn.ModuleDict({"blocks": Block()}))


@pytest.mark.parametrize("case", [FLAT, ORIG, VERL])
def test_other_shapes(tmp_path: Path, case: str) -> None:
    message = refused(case, tmp_path, model=lambda: Model(98))
    # The emb and the head, and what the files have.
    found = {FLAT: ("4777", "4825"), ORIG: ("5092", "5137"), VERL: ("(98, 24)", "(97, 24)")}[case]
    assert all(number in message for number in found), message


def test_a_hint_that_is_not_needed_is_checked(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    torch.save({"w": torch.ones(2, 3)}, source / "model.pt")
    reshard.convert(source, tmp_path / "made", model=lambda: nn.ParameterDict({"w": torch.ones(2, 3)}))
    with pytest.raises(UsageError, match=r"w: \(3, 3\) in the model, \(2, 3\) in the checkpoint"):
        reshard.convert(source, tmp_path / "other", model=lambda: nn.ParameterDict({"w": torch.ones(3, 3)}))


def two_linear(folder: Path, groups: Callable[[dict[str, nn.Parameter]], list[list[str]]]) -> Path:
    """FSDP2's files of ranks with integer ids, and moments that say whose they are."""
    whole = {name: torch.full(parameter.shape, float(number)) for number, (name, parameter) in
             enumerate(two().named_parameters())}  # fmt: skip
    order = [name for group in groups(dict(two().named_parameters())) for name in group]
    lengths = [len(group) for group in groups(dict(two().named_parameters()))]
    begins = [sum(lengths[:number]) for number in range(len(lengths))]

    def content(mesh: Any, rank: int) -> dict[str, Any]:
        parts = {name: sharded(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
        state = {number: {"step": torch.tensor(3.0), "exp_avg": parts[name]} for number, name in enumerate(order)}
        param_groups = [
            {"lr": 0.1, "params": list(range(begin, begin + length))}
            for begin, length in zip(begins, lengths, strict=True)
        ]
        return {
            "model_world_size_{world}_rank_{rank}.pt": parts,
            "optim_world_size_{world}_rank_{rank}.pt": {"state": state, "param_groups": param_groups},
        }

    return write_ranks(folder, 2, content)


def two() -> nn.Module:
    model = nn.ModuleDict({"p1": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "p2": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    return model


def test_weights_then_biases_go_where_they_belong(tmp_path: Path) -> None:
    source = two_linear(
        tmp_path / "ranks", lambda own: [[name for name in own if name.startswith("p") and name.endswith(kind)]
                                         for kind in ("weight", "bias")]
    )  # fmt: skip
    with pytest.raises(UsageError, match="several assignments"):
        reshard.convert(source, tmp_path / "made")
    reshard.convert(source, tmp_path / "made", model=two)
    found = stock_tensors(tmp_path / "made")
    for number, name in enumerate(dict(two().named_parameters())):
        if name.startswith("p"):
            assert found[f"optim.state.{name}.exp_avg"].unique().tolist() == [number]


def test_two_of_one_shape_in_two_groups_are_refused(tmp_path: Path) -> None:
    source = two_linear(
        tmp_path / "ranks", lambda own: [[name for name in own if name.startswith(part)] for part in ("p2", "p1")]
    )
    with pytest.raises(UsageError) as raised:
        reshard.convert(source, tmp_path / "made", model=two)
    assert "several assignments" in str(raised.value)
    assert "0: any of p1.weight, p2.weight" in str(raised.value)
    reshard.convert(source, tmp_path / "model", model=two, only="model")


def test_the_order_of_a_model_over_groups() -> None:
    shapes = {"a": (2,), "b": (3,), "c": (2,), "d": (3,)}
    path = Path("optimizer.pt")
    assert names_in_model_order([[0, 1, 2, 3]], {}, shapes, list(shapes), path) == {0: "a", 1: "b", 2: "c", 3: "d"}
    ids = {0: (2,), 1: (2,), 2: (3,), 3: (3,)}
    assert names_in_model_order([[0, 1], [2, 3]], ids, shapes, list(shapes), path) == {0: "a", 1: "c", 2: "b", 3: "d"}
    # An id without a state takes what is left.
    del ids[3]
    assert names_in_model_order([[0, 1], [2, 3]], ids, shapes, list(shapes), path)[3] == "d"
    with pytest.raises(UsageError, match="several assignments"):
        names_in_model_order([[0, 1], [2, 3]], {}, shapes, list(shapes), path)
    with pytest.raises(UsageError, match=r"b, id 1: \(3,\) in the model, \(5,\) of the moments"):
        names_in_model_order([[0, 1, 2, 3]], {1: (5,)}, shapes, list(shapes), path)
    with pytest.raises(UsageError, match=r"parameter 1 of \(3,\)"):
        names_in_model_order([[0, 1], [2, 3]], dict.fromkeys(range(4), (2,)), shapes, list(shapes), path)
    with pytest.raises(UsageError, match="other names"):
        names_in_model_order([[0]], {}, shapes, ["z"], path)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no.such.module:f", "ModuleNotFoundError"),
        (f"{HERE}:Missing", "AttributeError"),
        (HERE, "package.module:factory"),
        (f"{HERE}:Broken", "RuntimeError: no weights here"),
        (f"{HERE}:not_a_model", "found int"),
        (f"{HERE}:FLAT", "found str"),
    ],
)
def test_what_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["convert", str(peers.folder(FLAT)), str(tmp_path / "made"), "--model", model]) == 2
    errors = capsys.readouterr().err
    assert said in errors and "Traceback" not in errors


def test_hints_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two models"):
        read_model(Model, tmp_path)
    with pytest.raises(UsageError, match="needs the model"):
        read_model(wrap=["Block"])
    assert read_model() is None


def llama(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_model(hf_config=tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'reshard\[hf\]'"):
        read_model(hf_config=llama(tmp_path))


def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    outline = read_model(hf_config=llama(tmp_path), wrap=["LlamaDecoderLayer"])
    assert outline is not None and outline.modules is not None
    assert outline.parameters["model.embed_tokens.weight"] == (11, 16)
    assert outline.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert outline.modules["model.layers.0"] == "LlamaDecoderLayer"
    assert set(outline.wrapped_units()) == {"", "model.layers.0"}
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(UsageError, match="transformers cannot build"):
        read_model(hf_config=tmp_path)
