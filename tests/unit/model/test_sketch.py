"""Sketches: they say what torch says, they keep no tensor, and they can be written without torch."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from mizzen.errors import UsageError
from mizzen.model.sketch import BufferSketch, ModuleSketch, ParameterSketch, Sketch, bytes_per_element, count_of


class Tied(nn.Module):
    """An embedding that is also the head, a buffer that is saved and one that is not, and something frozen."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
        self.register_buffer("angles", torch.ones(2), persistent=False)


class Child(nn.Embedding):
    """A class of the user's own."""


def test_a_sketch_lists_what_torch_lists():
    model = Tied()
    sketch = Sketch.of(model)
    assert [each.name for each in sketch.parameters] == [name for name, _ in model.named_parameters()]
    for each, (_, parameter) in zip(sketch.parameters, model.named_parameters(), strict=True):
        assert (each.shape, f"torch.{each.dtype}") == (tuple(parameter.shape), str(parameter.dtype))
        assert (each.numel, each.nbytes) == (parameter.numel(), parameter.nbytes)
        assert each.requires_grad == parameter.requires_grad
    assert {name for each in sketch.parameters for name in each.names} | {
        each.name for each in sketch.buffers if each.persistent
    } == set(model.state_dict())


def test_ties_embeddings_and_classes_are_known():
    tokens = Sketch.of(Tied()).by_name()["head.weight"]
    assert tokens == ParameterSketch(
        "tokens.weight", (10, 4), "float32", True, ("head.weight",), kind="Embedding", is_embedding=True
    )
    assert Sketch.of(nn.Sequential(Child(2, 2))).parameters[0].is_embedding
    assert not Sketch.of(nn.Linear(2, 2)).parameters[0].is_embedding


def test_buffers_say_whether_they_are_saved():
    assert Sketch.of(Tied()).buffers == (
        BufferSketch("mask", (3, 3), "bool"),
        BufferSketch("angles", (2,), "float32", persistent=False),
    )
    assert BufferSketch("mask", (3, 3), "bool").nbytes == 9


def test_the_module_tree_has_classes_and_own_parameters():
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleList([nn.ReLU()]))
    assert Sketch.of(model).modules == (
        ModuleSketch("", "Sequential", is_container=True),
        ModuleSketch("0", "Linear", ("0.weight", "0.bias")),
        ModuleSketch("1", "ModuleList", is_container=True),
        ModuleSketch("1.0", "ReLU"),
    )


def test_a_module_reached_twice_has_aliases():
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sketch = Sketch.of(nn.ModuleList([layer, layer]))
    weight = sketch.by_name()["1.0.weight"]
    assert weight.names == ("0.0.weight", "1.0.weight")
    assert {each.path: each.same_as for each in sketch.modules if each.same_as is not None} == {
        "1": "0",
        "1.0": "0.0",
        "1.1": "0.1",
    }
    assert sketch.numel == 6 + 4
    assert [each.aliases for each in sketch.buffers] == [
        ("1.1.running_mean",),
        ("1.1.running_var",),
        ("1.1.num_batches_tracked",),
    ]


def test_one_parameter_under_two_names_of_one_module():
    module = nn.Module()
    module.one = nn.Parameter(torch.ones(2))
    module.two = module.one
    assert [each.names for each in Sketch.of(module).parameters] == [("one", "two")]


def test_totals():
    sketch = Sketch.of(Tied())
    assert (sketch.numel, sketch.trainable_numel) == (40 + 8 + 1, 48)
    assert sketch.nbytes == 48 * 4 + 2
    assert list(sketch.numel_by_dtype.items()) == [("float32", 48), ("bfloat16", 1)]


def test_a_model_without_storage_has_the_same_sketch():
    with torch.device("meta"):
        empty = Tied()
    assert Sketch.of(empty) == Sketch.of(Tied())
    assert hash(Sketch.of(empty)) == hash(Sketch.of(Tied()))


def test_no_tensor_is_kept():
    model = Tied()
    weight = weakref.ref(model.tokens.weight)
    sketch = Sketch.of(model)
    del model
    gc.collect()
    assert weight() is None and sketch.numel == 49


def test_hints_are_collected_from_models_inside_of_models():
    class Pretrained(nn.Module):
        _no_split_modules = ["Layer", "Embeddings"]

    class Other(nn.Module):
        _no_split_modules = None

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.other = Pretrained(), Other()
            self.other._no_split_modules = {"Vision"}

    assert Sketch.of(Wrapper()).hints == ("Embeddings", "Layer", "Vision")


def test_a_lazy_module_is_refused_by_name():
    with pytest.raises(UsageError, match=r"0.weight has no shape yet: run the model once, so that its LazyLinear"):
        Sketch.of(nn.Sequential(nn.LazyLinear(3)))


def changed(**changes):
    fields = {"name": "w", "shape": (2, 3), "dtype": "float32", "aliases": ()} | changes
    return Sketch((ParameterSketch(**fields), ParameterSketch("other", (1,))))


@pytest.mark.parametrize(
    "other",
    [changed(name="v"), changed(shape=(3, 2)), changed(dtype="bfloat16"), changed(aliases=("head",))],
    ids=["name", "shape", "dtype", "tie"],
)
def test_the_fingerprint_changes_with(other):
    assert other.fingerprint() != changed().fingerprint()


def test_the_fingerprint_ignores_order_and_what_is_not_saved():
    sketch = changed()
    same = Sketch(sketch.parameters[::-1], (BufferSketch("angles", (2,), persistent=False),))
    assert same.fingerprint() == sketch.fingerprint() == changed(requires_grad=False).fingerprint()
    assert Sketch(sketch.parameters, (BufferSketch("mean", (2,)),)).fingerprint() != sketch.fingerprint()


def test_the_fingerprint_is_the_same_in_every_process():
    expected = "315120796014e4d26916b9d6f1a5685bd70d58ad5acb4f935fe8dfa38182396d"
    assert changed().fingerprint() == expected


def test_a_sketch_of_names_and_shapes_is_the_sketch_of_the_module():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 3)]), nn.Embedding(5, 3))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    kinds = {"": "Sequential", "0.0": "Linear", "0.1": "Linear", "1": "Embedding"}
    assert Sketch.of_shapes(shapes, kinds=kinds) == Sketch.of(model)


def test_modules_without_a_class_are_lists_when_their_children_are_numbered():
    sketch = Sketch.of_shapes({"body.layers.0.w": (2,), "body.layers.1.w": (2,), "head": (2,)}, dtype="bfloat16")
    assert {each.path: each.kind for each in sketch.modules} == {
        "": "Module",
        "body": "Module",
        "body.layers": "ModuleList",
        "body.layers.0": "Module",
        "body.layers.1": "Module",
    }
    assert [each.path for each in sketch.modules if each.is_container] == ["body.layers"]
    assert sketch.numel_by_dtype == {"bfloat16": 6}


def test_element_sizes_are_those_of_torch():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {dtype: bytes_per_element(str(dtype).removeprefix("torch.")) for dtype in dtypes} == {
        dtype: dtype.itemsize for dtype in dtypes
    }
    with pytest.raises(UsageError, match="'half' is not the name of a dtype"):
        bytes_per_element("half")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (950, "950"), (1_500, "1.5k"), (124_439_808, "124.4M"), (6_738_415_616, "6.738G")]
)
def test_counts_are_short(number, text):
    assert count_of(number) == text


def test_a_sketch_prints_itself():
    assert str(Sketch.of(Tied())).splitlines() == [
        "Tied: 49 parameters in 4 tensors (48 float32, 1 bfloat16)",
        "  trainable: 48",
        "  of several names: 1, such as tokens.weight = head.weight",
        "  buffers: 2, 17B",
    ]


def test_sketches_need_no_torch():
    code = (
        "import sys\n"
        "import mizzen.model.box, mizzen.model.blocks\n"
        "from mizzen.model.sketch import Sketch\n"
        "print(Sketch.of_shapes({'layers.0.w': (2, 2)}).nbytes, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.split() == ["16", "False"]
