"""Optimizers and schedules by the names and arguments that users have in their files."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, lr_scheduler

from mizzen.config import optimizer as names
from mizzen.config.optimizer import UNBUILT
from mizzen.errors import ConfigError
from mizzen.optim.build import OPTIMIZERS, build_optimizer, build_scheduler
from mizzen.optim.own_rules import Lamb, Lion, Muon
from mizzen.optim.rules import ELEMENTWISE
from mizzen.optim.schedules import VALID_LR_SCHEDULES, WarmupLR


def group_of(*shapes, dtype=torch.float32, **keys):
    return {"params": [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes], **keys}


def build(name, /, device_type="cpu", groups=None, **arguments):
    return build_optimizer(name, arguments, groups or [group_of(3)], device_type=device_type)


def stepped(optimizer, gradient=1.0, steps=3):
    """The values after a few steps with a constant gradient."""
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]


class TestNames:
    @pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
    def test_every_elementwise_rule_of_torch_is_there_in_any_case(self, kind):
        expected = AdamW if kind is Adam else kind
        for name in (kind.__name__, kind.__name__.lower(), kind.__name__.upper()):
            assert type(build(name, lr=0.1)) is expected
        moved = stepped(build(kind.__name__, lr=0.1))
        assert not torch.equal(moved[0], torch.ones(3))

    @pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam", "CPUAdam", "fusedadamw"])
    def test_names_of_other_implementations_mean_the_rule(self, name):
        assert type(build(name)) is AdamW

    def test_adagrad_too(self):
        assert type(build("DeepSpeedCPUAdagrad")) is Adagrad

    @pytest.mark.parametrize(
        ("name", "kind"), [("FusedLamb", Lamb), ("lamb", Lamb), ("DeepSpeedCPULion", Lion), ("MuonWithAuxAdam", Muon)]
    )
    def test_so_do_those_of_our_own_rules(self, name, kind):
        assert type(build(name, lr=0.1)) is kind

    @pytest.mark.parametrize("name", [*UNBUILT, "OneBitAdam", "ZeroOneAdam"])
    def test_what_is_not_built_says_why(self, name):
        with pytest.raises(
            ConfigError, match=rf"^optimizer\.type: {name} is not built yet: .+; known: .*ASGD, "
        ) as info:
            build(name)
        assert info.value.path == "optimizer.type"

    def test_every_name_has_a_class(self):
        assert {*OPTIMIZERS} == {name.lower() for name in names.OPTIMIZERS}
        of_torch = {*lr_scheduler.__all__} - {"LRScheduler"}
        assert {*names.SCHEDULES} >= {*VALID_LR_SCHEDULES}
        assert {name.lower() for name in {*names.SCHEDULES} - {*VALID_LR_SCHEDULES}} | names.NOT_FROM_JSON.keys() == {
            name.lower() for name in of_torch
        }

    def test_no_rule_is_both(self):
        assert not OPTIMIZERS.keys() & UNBUILT.keys()

    def test_every_optimizer_of_torch_is_one_or_the_other(self):
        kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
        names = {kind.__name__.lower() for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"optimizer"}
        assert names <= OPTIMIZERS.keys() | UNBUILT.keys()

    def test_a_slip_of_the_keyboard(self):
        with pytest.raises(
            ConfigError, match=r"^optimizer\.type: no optimizer is called \"AdanW\"; did you mean 'AdamW'"
        ):
            build("AdanW")
        with pytest.raises(ConfigError, match="known: ASGD, Adadelta, Adafactor, Adagrad"):
            build("xyzzy")


class TestArguments:
    def test_they_reach_torch(self):
        optimizer = build("AdamW", lr=0.25, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.1, amsgrad=True)
        (group,) = optimizer.param_groups
        assert (group["lr"], tuple(group["betas"]), group["eps"]) == (0.25, (0.8, 0.95), 1e-6)
        assert (group["weight_decay"], group["amsgrad"]) == (0.1, True)

    def test_a_group_has_its_own(self):
        optimizer = build("SGD", groups=[group_of(2, lr=0.5), group_of(3, weight_decay=0.1)], lr=0.25)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.1]

    def test_the_given_groups_stay_as_they_are(self):
        groups = [group_of(2)]
        build("SGD", groups=groups, lr=0.25)
        assert list(groups[0]) == ["params"]

    def test_unknown_ones_are_named(self):
        with pytest.raises(
            ConfigError,
            match=r"^optimizer\.params\.wieght_decay: unknown argument of AdamW; did you mean 'weight_decay'",
        ):
            build("AdamW", wieght_decay=0.1)
        with pytest.raises(ConfigError, match=r"^optimizer\.params\.params: unknown argument of SGD"):
            build("SGD", params=[])

    @pytest.mark.parametrize("value", ["auto", "1e-3"])
    def test_a_string_is_no_number(self, value):
        with pytest.raises(ConfigError, match=rf'^optimizer\.params\.lr: "{value}" is not a number'):
            build("AdamW", lr=value)

    def test_what_torch_refuses_is_an_error_of_ours(self):
        with pytest.raises(ConfigError, match=r"^optimizer\.params: AdamW cannot be built: Invalid learning rate: -1"):
            build("AdamW", lr=-1)
        with pytest.raises(ConfigError, match=r"^optimizer\.params: SGD cannot be built"):
            build("SGD", fused=True, foreach=True)

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("Adam", {"betas": [0.9]}, "optimizer.params.betas: [0.9] is not a list of 2 numbers"),
            ("Lion", {"betas": [0.9, 0.9, 0.9]}, "optimizer.params.betas: [0.9, 0.9, 0.9] is not a list of 2 numbers"),
            ("Lamb", {"betas": {}}, "optimizer.params.betas: {} is not a list of 2 numbers"),
            ("Muon", {"betas": [0.9, "x"]}, 'optimizer.params.betas.1: "x" is not a number'),
            ("AdamW", {"lr": True}, "optimizer.params.lr: true is not a number"),
            ("SGD", {"dampening": [1]}, "optimizer.params.dampening: [1] is not a number"),
            ("Adam", {"amsgrad": 1}, "optimizer.params.amsgrad: 1 is not true or false"),
            ("Muon", {"weight_decay": None}, "optimizer.params.weight_decay: null is not a number"),
        ],
        ids=str,
    )
    def test_values_are_compared_with_the_defaults_of_the_rule(self, name, arguments, message):
        with pytest.raises(ConfigError) as caught:
            build(name, **arguments)
        assert str(caught.value) == message


class TestAdam:
    """Which of torch's two is meant depends on arguments that torch does not have."""

    @pytest.mark.parametrize(
        ("name", "arguments", "kind", "decay"),
        [
            ("Adam", {}, AdamW, 0.0),
            ("AdamW", {}, AdamW, 0.0),
            ("Adam", {"adam_w_mode": True}, AdamW, 0.0),
            ("Adam", {"adam_w_mode": False}, Adam, 0.0),
            ("Adam", {"adamw_mode": False, "weight_decay": 0.5}, Adam, 0.5),
            ("Adam", {"torch_adam": True}, AdamW, 0.01),
            ("Adam", {"torch_adam": True, "adam_w_mode": False}, Adam, 0.0),
            ("AdamW", {"torch_adam": True, "weight_decay": 0.5}, AdamW, 0.5),
            ("FusedAdam", {"bias_correction": True, "set_grad_none": True}, AdamW, 0.0),
            ("DeepSpeedCPUAdam", {"fp32_optimizer_states": True, "adamw_mode": False}, Adam, 0.0),
        ],
    )
    def test_kind_and_decay(self, name, arguments, kind, decay):
        optimizer = build(name, **arguments)
        assert type(optimizer) is kind
        assert optimizer.param_groups[0]["weight_decay"] == decay

    def test_decay_is_decoupled_under_the_name_adam(self):
        (value,) = stepped(build("Adam", lr=0.1, weight_decay=0.5), gradient=0.0, steps=1)
        assert value.tolist() == pytest.approx([0.95] * 3)
        (value,) = stepped(build("Adam", lr=0.1, weight_decay=0.5, adam_w_mode=False), gradient=0.0, steps=1)
        assert value.tolist() == pytest.approx([0.9] * 3)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"bias_correction": False}, "bias_correction: false is refused"),
            ({"fp32_optimizer_states": False}, "fp32_optimizer_states: false is refused"),
            ({"adam_w_mode": 1}, "adam_w_mode: 1 is not true or false"),
            ({"adam_w_mode": False}, "adam_w_mode: AdamW is the decoupled one: use type Adam"),
        ],
    )
    def test_what_cannot_be_had(self, arguments, message):
        with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{message}"):
            build("AdamW", **arguments)

    def test_they_belong_to_adam_alone(self):
        with pytest.raises(ConfigError, match=r"^optimizer\.params\.adam_w_mode: unknown argument of SGD"):
            build("SGD", adam_w_mode=True)


class TestFused:
    @pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
    def test_it_is_on_where_there_is_a_kernel(self, name):
        assert build(name, device_type="cpu").defaults["fused"] is True
        assert bool(build(name, device_type="cuda").defaults["fused"]) == (name != "Adagrad")
        assert not build(name, device_type="mps").defaults["fused"]

    @pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
    def test_so_it_is_for_parameters_that_get_their_values_later(self, name):
        groups = [{"params": [torch.nn.Parameter(torch.empty(3, device="meta"))]}]
        found = build_optimizer(name, {}, groups, device_type="cpu")
        assert found.defaults["fused"] is (name != "Adagrad")

    def test_a_user_may_choose_otherwise(self):
        assert build("AdamW", fused=False).defaults["fused"] is False
        assert not build("AdamW", foreach=True).defaults["fused"]
        assert not build("AdamW", differentiable=True).defaults["fused"]

    def test_complex_parameters_have_no_kernel(self):
        optimizer = build("AdamW", groups=[group_of(2, dtype=torch.complex64)], lr=0.1)
        assert not optimizer.defaults["fused"]
        assert stepped(optimizer, steps=1)[0][0] != 1

    @pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
    def test_it_gives_the_same_numbers(self, kind):
        fused, plain = (build(kind.__name__, lr=0.1, fused=fused) for fused in (True, False))
        assert torch.allclose(stepped(fused)[0], stepped(plain)[0], rtol=1e-6)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_groups_without_parameters_work(kind):
    optimizer = build(kind.__name__, groups=[group_of(), group_of(2), group_of()], lr=0.1)
    assert not torch.equal(stepped(optimizer)[0], torch.ones(2))
    nothing = build(kind.__name__, groups=[group_of()], lr=0.1)
    nothing.step()
    nothing.load_state_dict(nothing.state_dict())
    assert [group["params"] for group in nothing.param_groups] == [[]]


class TestScheduler:
    @pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
    def test_ours_by_name_in_any_case(self, name):
        needed = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9}}
        needed["OneCycle"] = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
        for spelling in (name, name.lower()):
            assert type(build_scheduler(spelling, needed.get(name, {}), build("AdamW"))).__name__ == name

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("StepLR", {"step_size": 0}),
            ("StepLR", {"step_size": "x"}),
            ("StepLR", {"step_size": 2, "last_epoch": 5}),
            ("StepLR", {"step_size": 2, "gamma": None}),
            ("CosineAnnealingLR", {"T_max": 0}),
            ("ExponentialLR", {"gamma": "x"}),
            ("PolynomialLR", {"power": "x"}),
            ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 0, "cycle_momentum": False}),
        ],
        ids=str,
    )
    def test_what_torch_would_find_out_in_a_step_is_found_when_it_is_built(self, name, arguments):
        with pytest.raises(ConfigError, match=r"^scheduler\.params"):
            build_scheduler(name, arguments, build("SGD", lr=0.5))

    def test_a_rehearsal_moves_nothing(self):
        optimizer = build("SGD", lr=torch.tensor(0.5))
        schedule = build_scheduler("ExponentialLR", {"gamma": 0.5}, optimizer)
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
        assert schedule.last_epoch == 0

    def test_arguments_reach_it(self):
        optimizer = build("AdamW", lr=0.5)
        schedule = build_scheduler("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, optimizer)
        assert isinstance(schedule, WarmupLR) and schedule.lr_at(2) == [0.25]

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("StepLR", {"step_size": 2}),
            ("CosineAnnealingLR", {"T_max": 10}),
            ("OneCycleLR", {"max_lr": 0.1, "total_steps": 10}),
            ("ReduceLROnPlateau", {"mode": "min"}),
        ],
    )
    def test_torchs_own(self, name, arguments):
        optimizer = build("AdamW", lr=0.5)
        schedule = build_scheduler(name, arguments, optimizer)
        assert type(schedule) is getattr(lr_scheduler, name) and schedule.optimizer is optimizer

    def test_all_of_torchs_are_known(self):
        for name in lr_scheduler.__all__:
            with pytest.raises(ConfigError) as info:
                build_scheduler(name, {"no such": 1}, build("AdamW"))
            known = info.value.path != "scheduler.type" or "cannot come from JSON" in str(info.value)
            assert known == (name != "LRScheduler")

    def test_errors_name_the_path(self):
        def refusal(name, arguments):
            with pytest.raises(ConfigError) as info:
                build_scheduler(name, arguments, build("AdamW"))
            return str(info.value)

        assert refusal("WarmpLR", {}).startswith(
            "scheduler.type: no schedule is called \"WarmpLR\"; did you mean 'WarmupLR'"
        )
        assert "known: " in refusal("xyzzy", {}) and "CosineAnnealingLR" in refusal("xyzzy", {})
        assert refusal("WarmupLR", {"warmup_steps": 1}).startswith(
            "scheduler.params.warmup_steps: unknown argument of WarmupLR; did you mean 'warmup_"
        )
        assert refusal("WarmupDecayLR", {}) == "scheduler.params.total_num_steps: WarmupDecayLR needs it"
        assert refusal("StepLR", {}) == "scheduler.params.step_size: StepLR needs it"
        assert refusal("StepLR", {"optimizer": 1}).startswith("scheduler.params.optimizer: unknown argument of StepLR")
        assert refusal("OneCycleLR", {"max_lr": 2}).startswith("scheduler.params: OneCycleLR cannot be built")
        assert "it takes a function: give it to initialize()" in refusal("LambdaLR", {"lr_lambda": "x"})
        assert refusal("WarmupLR", {"warmup_num_steps": -1}).startswith(
            "scheduler.params.warmup_num_steps: -1 is below"
        )
