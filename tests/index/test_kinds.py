from __future__ import annotations

import pytest

from reshard.index.kinds import (
    COUNTERS,
    MASTERS,
    MOMENTS,
    OTHERS,
    WEIGHTS,
    is_of_one_rank,
    kind_of,
    kinds_of,
    parameter_of,
)


@pytest.mark.parametrize(
    ("key", "shape", "kind"),
    [
        ("model.layers.0.w", (2,), WEIGHTS),
        ("layers.0.w", (2,), WEIGHTS),
        ("model.optimizer.weight", (2,), WEIGHTS),
        ("optim.state.w.exp_avg", (2,), MOMENTS),
        ("optim.state.w.step", (), COUNTERS),
        ("optim.state.w.step", (1,), COUNTERS),
        ("optim.state.w.master_param", (2,), MASTERS),
        ("optim.param_groups.0.lr", (), OTHERS),
        ("optimizer_0.state.w.exp_avg_sq", (2,), MOMENTS),
        ("optimizer_states.state.w.exp_avg", (2,), MOMENTS),
        ("optim_state.state.w.exp_avg", (2,), MOMENTS),
        ("optimizer_state_dict.state.0.momentum_buffer", (2,), MOMENTS),
        ("app.optim.state.w.step", (), COUNTERS),
        ("app.optim.state.w.exp_avg", (2,), MOMENTS),
        ("app.model.w", (2,), WEIGHTS),
        ("w.exp_avg", (2,), MOMENTS),
        ("rng.rank_0.torch", (5056,), OTHERS),
        ("extra.ema.w", (2,), OTHERS),
        ("scaler", (), WEIGHTS),
    ],
)
def test_keys(key: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_of(key, shape) == kind


def test_where_the_model_has_a_root_nothing_else_is_weights() -> None:
    names = ["model.w", "fp32_master_params.w", "best_loss", "optimizer.state.w.exp_avg"]
    assert kinds_of(names, [(2,), (2,), (), (2,)]) == [WEIGHTS, MASTERS, OTHERS, MOMENTS]
    assert kinds_of(names[1:3], [(2,), ()]) == [WEIGHTS, WEIGHTS]


def test_the_parameter_of_a_moment() -> None:
    weights = {"model.a.w", "b.w", "app.model.c"}
    assert parameter_of("optim.state.a.w.exp_avg", weights) == "model.a.w"
    assert parameter_of("optimizer.state.b.w.block_0.factor", weights) == "b.w"
    assert parameter_of("app.optim.state.c.step", weights) == "app.model.c"
    assert parameter_of("optim.state.z.step", weights) is None
    assert parameter_of("model.a.w", weights) is None


@pytest.mark.parametrize(
    ("key", "is_so"),
    [
        ("dataloader.dp_rank_3", True),
        ("rank_0", True),
        ("loader.shard_12.position", True),
        ("optim_world_size_4_rank_0.pt", True),
        ("checkpoint_3-shard0.pt", True),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", True),
        ("frank_3", False),
        ("model.ranking", False),
        ("rank", False),
        ("pytorch_model.bin", False),
    ],
)
def test_what_belongs_to_one_rank(key: str, is_so: bool) -> None:
    assert is_of_one_rank(key) is is_so
