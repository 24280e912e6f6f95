"""The model against what it claims: causal, relative positions, shared heads, the same weights and gradients again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from model import Decoder, ModelConfig, next_token_loss, parameter_count, parameter_groups, rotary_tables, rotate
from torch import Tensor

CONFIG = ModelConfig(
    vocabulary=50, layers=2, width=32, heads=4, kv_heads=2, hidden=48, max_length=16, dropout=0.0, tied_head=True
)
CONFIG_FILES = sorted((Path(__file__).parents[2] / "scripts" / "configs").glob("*.yaml"))


def build(config: ModelConfig = CONFIG, seed: int = 0, checkpoint_activations: bool = False) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(config, checkpoint_activations)


def some_tokens(batch: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(CONFIG.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: Decoder, seed: int = 2) -> list[Tensor]:
    """Of one training step; the seed fixes the dropout masks."""
    torch.manual_seed(seed)
    next_token_loss(model(some_tokens()), some_tokens(seed=3)).backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_token_changes_no_logits_before_it():
    model = build()
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % CONFIG.vocabulary
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    # Every later position sees it.
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_logits_have_one_row_for_each_token():
    assert build()(some_tokens(batch=3, length=5)).shape == (3, 5, CONFIG.vocabulary)


def test_rotated_scores_depend_on_the_distance_alone():
    length, head_width = 24, 8
    cos, sin = rotary_tables(length, head_width, 10000.0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(head_width, generator=generator).expand(1, 1, length, head_width)
    key = torch.randn(head_width, generator=generator).expand(1, 1, length, head_width)
    scores = (rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(-1, -2))[0, 0]
    for distance in range(-length + 1, length):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores[0].std() > 0.1, "the distance must matter"


def test_rotation_is_that_of_complex_numbers():
    cos, sin = rotary_tables(6, 4, 100.0, torch.device("cpu"))
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    numbers = torch.complex(x[..., :2], x[..., 2:])
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
    expected = numbers * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((expected.real, expected.imag), dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_in_half_precision_is_right_at_far_positions(dtype):
    # A position kept in bfloat16 would be off by up to 8 at 4000, and its angle by more than a turn.
    cos, sin = rotary_tables(4096, 16, 10000.0, torch.device("cpu"))
    x = torch.randn(1, 1, 4096, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(x.to(dtype), cos, sin).float(), rotate(x, cos, sin), rtol=0, atol=0.06)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_cast_to_half_precision_gives_about_the_same_logits(dtype):
    model = build()
    expected = model(some_tokens())
    logits = model.to(dtype)(some_tokens())
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.02)
    assert next_token_loss(logits, some_tokens()).dtype == torch.float32


def test_tied_head_shares_storage():
    model = build()
    assert model.head.weight is model.embedding.weight
    assert {"embedding.weight", "head.weight"} <= model.state_dict().keys()


def test_untied_head_has_its_own_weights():
    tied, untied = build(), build(replace(CONFIG, tied_head=False))
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()
    assert parameter_count(untied) == parameter_count(tied) + CONFIG.vocabulary * CONFIG.width


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    grouped = build()
    full = build(replace(CONFIG, kv_heads=CONFIG.heads))
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("key.weight", "value.weight")):
            heads = weight.unflatten(0, (CONFIG.kv_heads, CONFIG.head_width))
            state[name] = heads.repeat_interleave(CONFIG.heads // CONFIG.kv_heads, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(full(some_tokens()), grouped(some_tokens()))


@pytest.mark.parametrize("tied_head", [True, False])
def test_parameter_groups_hold_each_parameter_once(tied_head):
    model = build(replace(CONFIG, tied_head=tied_head))
    decayed, undecayed = parameter_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    grouped = [id(parameter) for group in (decayed, undecayed) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    norms = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.RMSNorm)}
    assert {id(parameter) for parameter in undecayed["params"]} == norms


def test_checkpointed_activations_give_the_same_gradients_bit_for_bit():
    config = replace(CONFIG, dropout=0.3)
    plain = gradients(build(config))
    assert_same(plain, gradients(build(config, checkpoint_activations=True)))
    assert not torch.equal(plain[0], gradients(build(config), seed=4)[0]), "dropout must have been on"


def test_dropout_is_off_in_evaluation():
    model = build(replace(CONFIG, dropout=0.5)).eval()
    assert torch.equal(model(some_tokens()), model(some_tokens()))


def test_the_same_seed_gives_the_same_weights():
    assert_same(list(build(seed=3).parameters()), list(build(seed=3).parameters()))
    assert not torch.equal(build(seed=3).embedding.weight, build(seed=4).embedding.weight)


@pytest.mark.parametrize("tied_head", [True, False])
def test_a_model_from_the_meta_device_gets_the_same_weights(tied_head):
    config = replace(CONFIG, tied_head=tied_head)
    built = build(config)
    torch.manual_seed(7)
    built.init_weights()

    with torch.device("meta"):
        emptied = Decoder(config)
    emptied.to_empty(device="cpu")
    torch.manual_seed(7)
    emptied.init_weights()

    assert_same(list(built.state_dict().values()), list(emptied.state_dict().values()))
    assert (emptied.head.weight is emptied.embedding.weight) == tied_head
    assert torch.equal(built(some_tokens()), emptied(some_tokens()))


def test_init_weights_leaves_no_parameter_out():
    model = build(replace(CONFIG, tied_head=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not list(model.buffers()), "a buffer would have to be initialised as well"


def test_loss_is_the_mean_negative_log_probability_of_the_targets():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 4, 2], [1, 1, 3]])
    probabilities = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    chosen = [probabilities[row, place, targets[row, place]].log() for row in range(2) for place in range(3)]
    torch.testing.assert_close(next_token_loss(logits, targets), -torch.stack(chosen).mean())


def test_parameter_count_is_the_sum_over_the_matrices():
    width, hidden, kv_width = CONFIG.width, CONFIG.hidden, CONFIG.kv_heads * CONFIG.head_width
    block = 2 * width * width + 2 * width * kv_width + 3 * width * hidden + 2 * width
    assert parameter_count(build()) == CONFIG.vocabulary * width + CONFIG.layers * block + width


def test_config_fills_in_what_is_left_out():
    config = ModelConfig(vocabulary=256, layers=1, width=128, heads=4, max_length=8)
    assert (config.kv_heads, config.hidden) == (4, 384)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "width 32 must be a multiple of 2 x heads"),
        ({"width": 36, "heads": 4}, "rotary embeddings rotate pairs"),
        ({"kv_heads": 3}, "heads 4 must be a multiple of kv_heads 3"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"dropout": 1.0}, "dropout must be in"),
    ],
)
def test_config_names_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_too_long_a_window_is_an_error():
    with pytest.raises(ValueError, match="17 tokens are more than the model's max_length of 16"):
        build()(some_tokens(length=17))


@pytest.mark.parametrize(
    ("name", "least", "most"), [("tiny", 0.3e6, 1e6), ("small", 20e6, 30e6), ("gpu8", 0.9e9, 1.1e9)]
)
def test_shipped_configurations_describe_a_model_of_the_size_they_state(name, least, most):
    (path,) = (path for path in CONFIG_FILES if path.stem == name)
    settings = yaml.safe_load(path.read_text())
    config = ModelConfig(**settings["model"])
    with torch.device("meta"):
        assert least <= parameter_count(Decoder(config)) <= most
    assert settings["data"]["length"] <= config.max_length
    assert settings["batch"]["global_batch"] % settings["batch"]["micro_batch"] == 0
    assert isinstance(settings["optimizer"]["lr"], float), "YAML reads 1e-3 as text: write 1.0e-3"


def test_every_shipped_configuration_has_the_same_sections():
    sections = {path.name: set(yaml.safe_load(path.read_text())) for path in CONFIG_FILES}
    expected = {"model", "data", "batch", "train", "optimizer", "schedule", "checkpoint", "trace"}
    assert sections == dict.fromkeys(("tiny.yaml", "small.yaml", "gpu8.yaml"), expected)
