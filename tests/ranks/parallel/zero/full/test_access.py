"""Parameters of a sharded model by name and by object: whole, in parts, gathered, saved; and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mizzen
from breadth import choice
from mizzen import zero
from mizzen.files import watched
from ranks.parallel.zero.full.models import MODELS, rows, start


def touched(call) -> str:
    with pytest.raises(mizzen.UsageError) as caught:
        call()
    return str(caught.value)


def objects() -> dict[str, bool]:
    """What each object by which somebody may know a parameter answers."""
    torch.manual_seed(3)
    model = MODELS["Base"]()
    old = model.blocks[1].up.weight
    whole = old.detach().clone()
    engine = start(model, 3)
    weight = model.blocks[1].up.weight
    found = {
        "facts": weight.shape == (16, 8) and weight.numel() == 128 and weight.dtype == torch.float32,
        "no gradient": weight.grad is None,
        "one object for life": old is weight and torch.equal(zero.safe_get_full_fp32_param(old), whole),
        "a sum is refused": "sum() on 'blocks.1.up.weight'" in touched(lambda: weight.sum()),
        "mixing is refused": "outside of a forward pass" in touched(lambda: torch.ones(8) @ weight.t()),
        "mixing its data too": "blocks.1.up.weight" in touched(lambda: torch.ones(16, 8) + weight.data),
        "writing too": "blocks.1.up.weight" in touched(lambda: weight.data.fill_(1.0)),
        "a gradient is set elsewhere": "safe_set_full_grad" in touched(lambda: setattr(weight, "grad", whole)),
    }
    with zero.GatheredParameters(weight):
        inside = model.blocks[1].up.weight
        found["gathered is plain"] = type(inside) is torch.nn.Parameter and torch.equal(inside, whole)
        found["the object is the same"] = inside is weight and torch.equal(weight.norm(), whole.norm())
        with zero.GatheredParameters([inside, model.last.weight]):
            found["nested"] = model.blocks[1].up.weight is inside and model.last.weight.shape == (1, 8)
        found["still gathered"] = model.blocks[1].up.weight is inside
        found["known inside"] = zero.safe_get_full_fp32_param(inside) is not None
    found["sharded again"] = model.blocks[1].up.weight is weight and "sum()" in touched(lambda: weight.sum())
    with zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        if engine.global_rank == 0:
            for parameter in model.parameters():
                parameter.fill_(0.25)
    found["written"] = all(bool((zero.safe_get_full_fp32_param(p) == 0.25).all()) for p in model.parameters())
    fresh = MODELS["Base"]().state_dict()
    model.load_state_dict(fresh)
    found["loaded"] = all(
        torch.equal(zero.safe_get_full_fp32_param(p), fresh[name]) for name, p in model.named_parameters()
    )
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if engine.global_rank == 1:
            model.load_state_dict({name: value + 1 for name, value in fresh.items()})
        gathered = {name: value.clone() for name, value in model.state_dict().items()}
    found["a state dict inside is whole"] = all(type(value) is torch.Tensor for value in gathered.values())
    found["what one rank loads reaches all"] = all(
        torch.equal(zero.safe_get_full_fp32_param(p), fresh[name] + 1) for name, p in model.named_parameters()
    )
    model.load_state_dict(fresh)
    assigned = touched(lambda: model.load_state_dict(fresh, assign=True))
    found["assigning is refused"] = "assign=True" in assigned
    with torch.no_grad():
        engine(rows(0, engine.global_rank))  # gives the modules their sharded parameters back
    state = model.state_dict()
    found["a state dict is sharded"] = all(value.full_tensor().equal(fresh[name]) for name, value in state.items())
    return found


@pytest.mark.parametrize("ranks", choice([2, 3], [3]))
def test_every_object_says_what_it_is(world, ranks):
    for found in world(ranks).run(objects):
        assert [what for what, holds in found.items() if not holds] == []


def other_methods() -> dict[str, bool]:
    """A method that is not forward: refused on the model, gathered through the engine, with a gradient."""
    engine = start("Base", 3)
    data = rows(0, engine.global_rank)
    found = {"refused": "called on the engine" in touched(lambda: engine.module.hidden(data))}
    hidden = engine.hidden(data)
    torch.manual_seed(3)
    plain = MODELS["Base"]()
    found["equal"] = torch.allclose(hidden, plain.hidden(data), atol=1e-6)
    engine.backward(hidden.pow(2).mean())
    gradients = {name: zero.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    total = sum(plain.hidden(rows(0, rank)).pow(2).mean() for rank in range(engine.world_size)) / engine.world_size
    total.backward()
    for name, parameter in plain.named_parameters():
        wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        found[name] = torch.allclose(gradients[name], wanted, atol=1e-6)
    found["facts"] = zero.facts_of(engine.module.last.weight).status == "sharded"
    found["numel"] = zero.facts_of(engine.module.last.weight).numel == 8
    return found


@pytest.mark.parametrize("ranks", choice([2, 3], [3]))
def test_other_methods_than_forward_work_through_the_engine(world, ranks):
    for found in world(ranks).run(other_methods):
        assert [what for what, holds in found.items() if not holds] == []


def test_modules_are_built_where_and_as_asked():
    with zero.OnDevice(torch.bfloat16):
        layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert zero.facts_of(layer.weight).status == "whole"


def local_parts() -> tuple[int, float]:
    engine = start("Odd", 3)
    engine.backward(engine(rows(0, engine.global_rank)))
    parameters = dict(engine.module.named_parameters())
    for parameter in parameters.values():
        gradient = zero.safe_get_local_grad(parameter)
        zero.safe_set_local_grad(parameter, 0 * gradient + 1)
        assert bool((zero.safe_get_full_grad(parameter) == 1).all())
        zero.safe_set_local_fp32_param(parameter, 0 * zero.safe_get_local_fp32_param(parameter) + 2)
        assert bool((zero.safe_get_full_fp32_param(parameter) == 2).all())
    engine.step()
    for parameter in parameters.values():
        state = zero.safe_get_local_optimizer_state(parameter, "exp_avg")
        zero.safe_set_local_optimizer_state(parameter, 0 * state + 3, "exp_avg")
        assert bool((zero.safe_get_full_optimizer_state(parameter, "exp_avg") == 3).all())
    local = sum(zero.safe_get_local_fp32_param(parameter).numel() for parameter in parameters.values())
    with pytest.raises(mizzen.UsageError, match="elements of 'seven'"):
        zero.safe_set_local_fp32_param(parameters["seven"], torch.ones(999))
    return local, float(sum(parameter.numel() for parameter in parameters.values()))


@pytest.mark.parametrize("ranks", choice([2, 3], [3]))
def test_local_parts_are_read_and_written_and_add_up(world, ranks):
    found = world(ranks).run(local_parts)
    assert sum(local for local, _ in found) == found[0][1]


def save(folder: str, kind: str, keys: dict) -> dict:
    engine = start(kind, 3, zero={"stage3_gather_16bit_weights_on_model_save": True}, **keys)
    engine.backward(engine(rows(0, engine.global_rank).to(torch.bfloat16 if keys else torch.float32)))
    engine.step()
    engine.save_16bit_model(folder)
    engine.save_16bit_model(folder, "model.bin", exclude_frozen_parameters=True)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (engine.global_rank != 0)
    with zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize(
    ("kind", "keys"), [("TiedBlocks", {}), ("Lora", {}), ("Odd", {}), ("TiedBlocks", {"bf16": {"enabled": True}})]
)
def test_the_whole_model_is_saved(world, tmp_path, kind, keys):
    expected = world(2).run(save, str(tmp_path), kind, keys)[0]
    saved = load_file(tmp_path / "model.safetensors")
    fresh = MODELS[kind]()
    missing = fresh.load_state_dict(saved, strict=False).missing_keys
    aliases = {"extra.weight", "blocks.2.up.weight"} if kind == "TiedBlocks" else set()
    assert set(missing) == aliases
    for name, value in saved.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name])
    pickled = torch.load(tmp_path / "model.bin")
    trained = {name for name, parameter in fresh.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    assert set(pickled) == trained


def fail_to_save(folder: str, name: str) -> tuple[str, str, list[str]]:
    engine = start("Base", 3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    Path(folder, "taken", name).mkdir(parents=True, exist_ok=True)
    said = []

    def full(operation: str, path: Path) -> None:
        if operation in ("write", "fsync") and path.name.startswith(name):
            raise OSError(28, "No space left on device")

    for place in ("taken", "."):
        with pytest.raises(mizzen.MizzenError) as caught, watched(full):
            engine.save_16bit_model(f"{folder}/{place}", name)
        said.append(str(caught.value))
    left = sorted(path.name for path in Path(folder).iterdir())
    mizzen.comm.barrier()
    engine.save_16bit_model(folder, name)
    return *said, left


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
def test_what_keeps_the_model_from_being_saved_is_told_to_all(world, tmp_path, name):
    for taken, full, left in world(2).run(fail_to_save, str(tmp_path), name):
        assert f"taken/{name} is a folder" in taken and "rank 0: " in full and "No space left" in full
        assert left == ["taken"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "taken"]


def refuse_to_save() -> None:
    start("Base", 3).save_16bit_model("anywhere")


def test_saving_needs_the_key(world):
    for outcome in world(2).run(refuse_to_save, expect_failure=True):
        assert "stage3_gather_16bit_weights_on_model_save" in outcome.traceback


def edit_on_one_rank() -> None:
    engine = start("Base", 3, zero={"enable_sanity_checks": True})
    with zero.GatheredParameters(engine.module.last.weight), torch.no_grad():
        engine.module.last.weight.fill_(float(engine.global_rank))


def test_an_edit_on_one_rank_is_found_where_that_is_asked_for(world):
    for outcome in world(2).run(edit_on_one_rank, expect_failure=True):
        assert outcome.error_type == "CommError"
        assert "last.weight" in outcome.traceback


def alternate(takes_turns: bool) -> tuple[list[float], list[int]]:
    """Thirty steps of training, with evaluation, and a forward that differs between the ranks in a gathered model."""
    engine = start("TiedBlocks", 3)
    losses, sizes = [], []
    for step in range(30):
        engine.backward(engine(rows(step, engine.global_rank)))
        losses.append(engine.step().loss)
        if step % 3 == 0 and takes_turns:
            engine.eval()
            with torch.no_grad():
                engine(rows(100 + step, engine.global_rank))
            engine.train()
        if step % 10 == 0 and takes_turns:
            with zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
                for _ in range(1 + engine.global_rank):
                    model(rows(step, engine.global_rank))
            with torch.no_grad(), torch.inference_mode():
                engine(rows(step, 0))
        sizes.append(sum(p.to_local().numel() for p in engine.module.parameters()))
    return losses, sizes


def test_training_evaluating_and_generating_take_turns(world):
    ((expected, _), _), found = world(2).each(alternate, [(False,), (True,)])
    for losses, sizes in found:
        assert losses == expected
        assert losses[-1] < losses[0] / 2
        assert len(set(sizes)) == 1  # after each round every parameter is sharded
