"""Where parameters rest in host memory, the host may be at a step while the next forward has begun: nobody sees it."""

import threading

import pytest
import torch
from torch import nn

import mizzen
from behind import use_behind
from breadth import choice
from mizzen.engine.offloaded_step import OffloadedStep
from mizzen.errors import UsageError
from ranks.offload.test_parameters import HOST, start, wholes

FAR = {"offload_param": HOST, "offload_optimizer": HOST}


def inputs_of(number, engine, dtype=torch.bfloat16):
    seed = 100 * number + engine.global_rank
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(engine, number, dtype=torch.bfloat16):
    engine.backward(engine(inputs_of(number, engine, dtype)))
    return engine.step()


class Gate:
    """Lets the host begin with no lot of a step before somebody opens it; says how many it has stepped."""

    def __init__(self):
        self.opened, self.stepped = threading.Event(), 0
        self.opened.set()
        self._step = OffloadedStep._step_loaded
        OffloadedStep._step_loaded = staticmethod(self._step_when_open)

    def _step_when_open(self, lot, view):
        assert self.opened.wait(60)
        self._step(lot, view)
        self.stepped += 1

    def close(self, engine):
        """Close it, once the host has done its last step."""
        engine.updater.offloaded.check("step")
        self.opened.clear()

    def open_soon(self):
        """Open it when whoever comes now is likely to wait; who does not wait sees old numbers."""
        threading.Timer(0.1, self.opened.set).start()


def states_of(engine):
    return {
        name: mizzen.zero.safe_get_full_optimizer_state(p, "exp_avg")
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def seen_by(engine, folder):
    """What is read right after a step, by each of those who may be the first to ask."""

    def saved():
        engine.save_checkpoint(folder, tag="beside")
        other = start("bf16")
        other.load_checkpoint(folder, tag="beside")
        found = wholes(other)
        other.destroy()
        return found

    def whole_by_hand():
        with mizzen.zero.GatheredParameters(list(engine.module.parameters())):
            return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    def loss():
        with torch.no_grad():
            return {"loss": engine(inputs_of(9, engine))}

    def loaded():
        engine.load_checkpoint(folder, tag="waits")
        return wholes(engine) | states_of(engine)

    def state_dict():
        found = engine.optimizer.state_dict()["state"]
        return {f"{n} {key}": value.clone() for n, each in found.items() for key, value in each.items()}

    return {
        "masters": lambda: wholes(engine),
        "states": lambda: states_of(engine),
        "gathered": whole_by_hand,
        "loss": loss,
        "state_dict": state_dict,
        "checkpoint": saved,
        "load": loaded,
        "next step": lambda: {"norm": torch.tensor(float(step(engine, 7).grad_norm))} | wholes(engine),
    }


def asked_early(who, folder):
    """What somebody is told who asks while the host has not begun, and what is told who asks later."""
    use_behind()
    gate, found = Gate(), []
    for is_early in (False, True):
        engine = start("bf16", **FAR)
        for number in range(2):
            step(engine, number)
        if who == "load":
            engine.save_checkpoint(f"{folder}/{is_early}", tag="waits")
        if is_early:
            gate.close(engine)
        before = gate.stepped
        step(engine, 2)
        if is_early:
            assert gate.stepped == before  # `step` has returned, and the host has not begun
            gate.open_soon()
        else:
            engine.save_checkpoint(folder, tag="waits")
        found.append(seen_by(engine, f"{folder}/{is_early}")[who]())
        engine.destroy()
    late, early = found
    return [name for name in late if not torch.equal(late[name], early[name])], len(late)


WHO = ("masters", "states", "gathered", "loss", "state_dict", "checkpoint", "load", "next step")


@pytest.mark.parametrize("who", choice(WHO, ("masters", "loss", "state_dict", "next step")))
def test_whoever_needs_what_the_host_has_not_stepped_yet_waits(world, tmp_path, who):
    for different, count in world(2).run(asked_early, who, str(tmp_path)):
        assert different == []
        assert count


def settings_changed():
    """A schedule that goes on before the host has begun: the step has the settings that it was asked for with."""
    use_behind()
    gate, found = Gate(), []
    for is_early in (False, True):
        engine = start("bf16", **FAR)
        for group in engine.optimizer.param_groups:
            group["lr"] = torch.tensor(0.01)
        for number in range(4):
            if is_early and number:  # the first step makes states
                gate.close(engine)
            step(engine, number)
            for group in engine.optimizer.param_groups:
                group["lr"].mul_(0.5)
                group["weight_decay"] *= 2
            gate.opened.set()
        found.append(wholes(engine))
        engine.destroy()
    late, early = found
    return [name for name in late if not torch.equal(late[name], early[name])]


def test_a_step_has_the_settings_of_its_time(world):
    assert world(1).run(settings_changed) == [[]]


def failed(folder):
    """The host fails with the third of the lots that it steps beside the next forward."""
    use_behind()
    gate = Gate()
    engine = start("bf16", **FAR)
    for number in range(2):
        step(engine, number)
    gate.close(engine)
    gate.opened.set()
    inner, count = gate._step, gate.stepped

    def fail(lot, view):
        if gate.stepped == count + 2:
            raise OSError("no memory any more")
        inner(lot, view)

    gate._step = fail
    step(engine, 2)
    said = []
    for ask in (
        lambda: engine(inputs_of(3, engine)),
        engine.step,
        lambda: engine.save_checkpoint(folder),
    ):
        try:
            ask()
        except (OSError, UsageError) as error:
            said.append((type(error).__name__, str(error)))
    engine.destroy()
    return said, engine.module.last.weight.shape


def test_what_goes_wrong_beside_the_next_forward_is_raised_there(world, tmp_path):
    ((said, shape),) = world(1).run(failed, str(tmp_path))
    assert said[0] == ("OSError", "no memory any more")
    assert all("failed half-way" in text and "no memory" in text for _, text in said[1:])
    assert [kind for kind, _ in said[1:]] == ["UsageError", "UsageError"]
    assert shape == (3, 8)


def given_up():
    """An engine that is destroyed while the host is at its step."""
    use_behind()
    gate, found = Gate(), []
    for is_early in (False, True):
        engine = start("bf16", **FAR)
        for number in range(2):
            step(engine, number)
        if is_early:
            gate.close(engine)
        step(engine, 2)
        gate.open_soon()
        module, hooks = engine.module, engine.basic_optimizer._optimizer_state_dict_pre_hooks
        assert hooks
        engine.destroy()
        assert not hooks
        found.append({name: p.detach().clone() for name, p in module.named_parameters()})
    late, early = found
    return [name for name in late if not torch.equal(late[name], early[name])]


def test_who_gives_an_engine_up_has_the_whole_step(world):
    assert world(1).run(given_up) == [[]]


class Long(nn.Module):
    """Enough blocks for masters to come before their values are fetched."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + layer(inputs).tanh()
        return inputs.float().square().mean()


def streamed_both(dtype, accumulation, ratio):
    """Half of the lots pass through the device, whose masters backward uses where they have come early."""
    found = []
    near = {"taken": 0}
    for sections in ({}, {"offload": {"device_bytes": 0, "streamed_ratio": ratio}}):
        if sections:
            use_behind()
        engine = start(dtype, accumulation=accumulation, model=Long(), keys=sections, **(FAR if sections else {}))
        for unit in (unit for store in engine.stores for unit in vars(store).get("units", ()) if sections):
            for rest in (rest for message in unit.messages for rest in message.rests if rest is not None):
                count_near(rest, near)
        told = []
        for number in range(6):
            for micro in range(accumulation):
                loss = engine(inputs_of(10 * number + micro, engine, getattr(torch, dtype_name(dtype))))
                engine.backward(loss)
                report = engine.step()
            told.append((str(report.loss), str(report.grad_norm)))
            if number == 3:  # values that the masters do not have before the next step
                weight = engine.module.layers[0].weight
                with mizzen.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight.mul_(1.5)
        split = {lot.rest.is_stepped_on_host for store in engine.stores for lot in store.contents.lots}
        found.append((told, wholes(engine) | states_of(engine)))
        engine.destroy()
    (told, left), (again, others) = found
    return split, told == again, [n for n in left if not torch.equal(left[n], others[n])], near["taken"]


def dtype_name(dtype):
    return {"fp32": "float32", "bf16": "bfloat16"}[dtype]


def count_near(rest, near):
    ask = rest.masters_near

    def counted():
        found = ask()
        near["taken"] += found is not None
        return found

    rest.masters_near = counted


STREAMED = {
    "1 bf16": (1, "bf16", 1, 0.5),
    "2 bf16": (2, "bf16", 2, 0.5),
    "1 fp32": (1, "fp32", 1, 0.5),
    "2 bf16 all": (2, "bf16", 1, 1.0),
}


@pytest.mark.parametrize("name", choice(STREAMED, ("1 bf16", "1 fp32")))
def test_bits_do_not_depend_on_masters_that_have_come_early(world, name):
    ranks, *case = STREAMED[name]
    for split, is_same, different, near in world(ranks).run(streamed_both, *case):
        assert split == ({False} if case[2] == 1.0 else {True, False})
        assert is_same
        assert different == []
        assert near > 0 or case[2] == 1.0  # where all are to come, none is early
