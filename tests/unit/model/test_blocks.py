"""Blocks: what repeats is found in models of every build, and what a user or the model says comes first."""

import pytest
import torch
from torch import nn

from mizzen.errors import PlanError
from mizzen.model.blocks import Blocks
from mizzen.model.sketch import Sketch

WIDTH = 4


class Layer(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Gpt(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.tokens.weight


class MoeLayer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))


class Moe(nn.Module):
    """Its first layer is dense, as in the deep ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MoeLayer(1), MoeLayer(4), MoeLayer(4)])


class Residual(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.conv = nn.Conv1d(into, out, 1)


class Level(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.residuals = nn.ModuleList([Residual(into, out), Residual(out, out)])
        self.resample = nn.Conv1d(out, out, 2)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Level(2, 2), Level(2, 4), Level(4, 8)])
        self.middle = Residual(8, 8)
        self.up = nn.ModuleList([Level(8, 4), Level(4, 2)])


def find(model, *choice):
    return Blocks.of(Sketch.of(model), choice)


def paths(blocks):
    return [unit.path for unit in blocks.units]


def numbered(prefix, count):
    return [f"{prefix}{index}" for index in range(count)]


def check_all_given_once(model, blocks):
    given = [name for unit in blocks.units for name in unit.parameters] + list(blocks.rest)
    assert sorted(given) == sorted(name for name, _ in model.named_parameters())
    assert blocks.numel + blocks.rest_numel == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        Gpt(),
        Moe(),
        Unet(),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
        nn.Linear(2, 2),
    ],
)
def test_every_parameter_is_in_one_unit_or_in_the_rest(model):
    check_all_given_once(model, find(model))


def test_the_layers_of_a_gpt():
    blocks = find(Gpt())
    assert paths(blocks) == numbered("layers.", 3)
    assert {(unit.kind, unit.source, unit.numel) for unit in blocks.units} == {("Layer", "structure", 20 + 40 + 36)}
    assert blocks.units[1].parameters[0] == "layers.1.attention.weight"
    assert blocks.rest == ("tokens.weight", "norm.weight", "norm.bias") and blocks.rest_numel == 28 + 8


def test_the_same_on_the_meta_device():
    with torch.device("meta"):
        model = Gpt()
    assert find(model) == find(Gpt())


def test_the_layers_of_an_encoder_of_torch():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 3, norm=nn.LayerNorm(4))
    blocks = find(encoder)
    assert paths(blocks) == numbered("layers.", 3) and blocks.rest == ("norm.weight", "norm.bias")


def test_encoder_and_decoder_layers_are_units_alike():
    assert paths(find(nn.Transformer(4, 2, 2, 2, 8, batch_first=True))) == numbered("encoder.layers.", 2) + numbered(
        "decoder.layers.", 2
    )


def test_experts_are_not_cut_out_of_their_layers():
    blocks = find(Moe())
    assert paths(blocks) == numbered("layers.", 3)
    assert [unit.numel for unit in blocks.units] == [40, 100, 100]


def test_levels_of_a_u_net_differ_so_that_what_repeats_inside_is_found():
    blocks = find(Unet())
    levels = [*numbered("down.", 3), *numbered("up.", 2)]
    assert paths(blocks) == [f"{level}.residuals.{index}" for level in levels for index in range(2)]
    assert "middle.conv.weight" in blocks.rest and "up.0.resample.weight" in blocks.rest


def test_nested_lists_are_cut_once_on_the_outside():
    model = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(3))
    assert paths(find(model)) == numbered("", 3)


def test_a_plain_list_is_like_another_only_with_the_same_contents():
    model = nn.Module()
    model.pairs = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
    model.ends = nn.ModuleList([nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Embedding(2, 2))])
    assert paths(find(model)) == numbered("pairs.", 2)


def test_the_blocks_of_a_sequence_with_other_things_in_it():
    model = nn.Sequential(nn.Embedding(7, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7))
    blocks = find(model)
    assert paths(blocks) == ["1", "2"] and len(blocks.rest) == 5


def test_blocks_in_a_dict():
    model = nn.ModuleDict({"first": Layer(), "second": Layer()})
    assert paths(find(model)) == ["first", "second"]


def test_a_model_without_repetition_has_no_blocks():
    model = nn.Sequential(nn.Embedding(5, 3), nn.ReLU(), nn.ReLU(), nn.Linear(3, 5))
    blocks = find(model)
    assert blocks.units == () and len(blocks.rest) == 3


def test_modules_without_parameters_are_no_blocks():
    assert find(nn.Sequential(nn.ReLU(), nn.ReLU())).units == ()


def test_a_shared_layer_is_one_unit_under_its_first_path():
    layer = Layer()
    model = nn.Module()
    model.layers = nn.ModuleList([layer, Layer(), layer])
    blocks = find(model)
    assert [(unit.path, unit.aliases) for unit in blocks.units] == [("layers.0", ("layers.2",)), ("layers.1", ())]
    assert blocks.units[0].numel == blocks.units[1].numel and blocks.rest == ()


def test_layers_of_a_shared_body_stay_whole():
    model = nn.Module()
    model.first = Gpt()
    model.second = model.first
    blocks = find(model)
    assert [(unit.path, unit.aliases) for unit in blocks.units] == [
        (f"first.layers.{index}", (f"second.layers.{index}",)) for index in range(3)
    ]
    assert blocks.units[0].numel == 96 and blocks.rest[0] == "first.tokens.weight"


def test_what_two_units_share_belongs_to_neither():
    tied, shared = Gpt(), Gpt()
    tied.layers[2].attention.weight = tied.layers[0].attention.weight
    shared.layers[2].feed = shared.layers[0].feed
    assert "layers.0.attention.weight" in find(tied).rest
    assert "layers.0.feed.0.weight" in find(shared).rest
    assert [unit.numel for unit in find(tied).units] == [80, 96, 80]
    check_all_given_once(tied, find(tied))
    check_all_given_once(shared, find(shared))


def test_what_is_tied_inside_of_a_unit_stays_there():
    model = Gpt()
    for layer in model.layers:
        layer.again = nn.Linear(WIDTH, WIDTH)
        layer.again.weight = layer.attention.weight
    assert "layers.0.attention.weight" in find(model).units[0].parameters


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)


class Hinted(nn.Module):
    """As pretrained models are: a list of classes, one of which stands alone and is no block."""

    _no_split_modules = ["Embeddings", "Layer"]

    def __init__(self, layers=1):
        super().__init__()
        self.embeddings = Embeddings()
        self.groups = nn.ModuleList(nn.ModuleDict({"only": Layer()}) for _ in range(layers))


def test_a_hint_is_followed_where_repetition_says_otherwise():
    blocks = find(Hinted(2))
    assert paths(blocks) == ["groups.0.only", "groups.1.only"]
    assert {unit.source for unit in blocks.units} == {"hint"}
    assert blocks.rest == ("embeddings.tokens.weight",)


def test_one_layer_is_enough_for_a_hint():
    assert paths(find(Hinted(1))) == ["groups.0.only"]


def test_hinted_layers_need_no_list():
    model = nn.Module()
    model._no_split_modules = ("Layer",)
    model.one, model.two = Layer(), Layer()
    assert paths(find(model)) == ["one", "two"]


def test_what_no_hint_speaks_of_is_found_by_repetition():
    model = nn.Module()
    model.text, model.vision = Hinted(2), Moe()
    blocks = find(model)
    assert [(unit.path, unit.source) for unit in blocks.units] == [
        ("text.groups.0.only", "hint"),
        ("text.groups.1.only", "hint"),
        *((f"vision.layers.{index}", "structure") for index in range(3)),
    ]


class Stage(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = nn.ModuleDict({"only": layer})
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))


def test_what_is_around_a_hinted_unit_is_no_unit_though_its_class_repeats():
    model = nn.Module()
    model._no_split_modules = ["Layer"]
    model.plain = nn.ModuleList(Stage(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    model.hinted = nn.ModuleList(Stage(Layer()) for _ in range(2))
    assert paths(find(model)) == [
        *numbered("plain.", 2),
        *(f"hinted.{index}.{inside}" for index in range(2) for inside in ("layer.only", "adapters.0", "adapters.1")),
    ]


def test_a_hint_that_names_nothing_changes_nothing():
    model = Gpt()
    model._no_split_modules = ["Absent"]
    assert find(model) == find(Gpt())


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (("Layer",), numbered("layers.", 3)),
        (("layers.1",), ["layers.1"]),
        (("feed",), [f"layers.{index}.feed" for index in range(3)]),
        (("feed.0", "layers.2"), ["layers.0.feed.0", "layers.1.feed.0", "layers.2"]),
        (("Layer", "Linear", "Embedding"), ["tokens", *numbered("layers.", 3), "head"]),
        (("Gpt",), [""]),
    ],
    ids=" ".join,
)
def test_a_choice_by_class_by_path_or_by_the_end_of_a_path(choice, expected):
    blocks = find(Gpt(), *choice)
    assert paths(blocks) == expected
    assert {unit.source for unit in blocks.units} == {"choice"}


def test_a_choice_overrules_a_hint():
    assert paths(find(Hinted(1), "Embeddings")) == ["embeddings"]


def test_a_choice_may_name_any_path_of_a_shared_module():
    layer = Layer()
    assert paths(find(nn.ModuleList([layer, layer]), "1")) == ["0"]


def test_a_choice_that_matches_nothing_is_refused_with_what_is_near():
    with pytest.raises(PlanError, match=r"'Layers' is neither a class nor a module of this model; did you mean"):
        find(Gpt(), "Layers")
    with pytest.raises(PlanError, match=r"'Layer' or 'LayerNorm' or 'layers'\?"):
        find(Gpt(), "Layr")


def test_blocks_print_themselves():
    assert str(find(Moe())) == (
        "3 blocks, 240 of 240 parameters\n"
        "  1 x MoeLayer of 40 (by structure): layers.0\n"
        "  2 x MoeLayer of 100 (by structure): layers.1 ... layers.2\n"
        "  rest of 0: nothing"
    )
    assert str(find(Gpt())).endswith("rest of 36: tokens.weight, norm.weight, norm.bias")
    assert str(find(Unet())).endswith(" and 8 more")


def test_blocks_of_a_sketch_made_without_a_model():
    shapes = {"tokens.weight": (100, 8)} | {f"layers.{index}.w": (8, 8) for index in range(4)}
    blocks = Blocks.of(Sketch.of_shapes(shapes))
    assert paths(blocks) == numbered("layers.", 4) and blocks.rest == ("tokens.weight",)
