"""Small models of transformers, cut between their blocks by `pipeline_parallel_size` alone, and plain torch."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import mizzen
from mizzen.checkpoint.weight_files import WeightFiles
from parity.pipelines import values

VOCABULARY, SAMPLES, STEPS = 32, 8, 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24}
KINDS = {"llama": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    if kind in ("llama", "adapted"):
        sizes = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 32}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # tied by default
        )
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **SIZES, **NO_DROPOUT))


class Adapted(torch.nn.Module):
    """A frozen layer with two small trained matrices beside it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = torch.nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.lora_B = torch.nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + inputs @ self.lora_A.T @ self.lora_B.T


def adapted() -> torch.nn.Module:
    """A frozen model with adapters in its attentions, and one block that is trained as it is."""
    model = build("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapted(each) for each in (layer.self_attn.q_proj, layer.self_attn.v_proj)
        )
    model.model.layers[1].mlp.requires_grad_(True)
    return model


def batch(step: int) -> dict:
    """Tokens of which every other sample has two that are padding."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[:, 7:] = (torch.arange(SAMPLES) % 2).view(-1, 1)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def reference(kind: str, micros: int = 4) -> tuple:
    """Losses, first values and updates of one process."""
    model = adapted() if kind == "adapted" else build(kind)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [dict(zip(batch(step), each, strict=True)) for each in zip(*split(step, micros), strict=True)]
        found = [model(**part).loss / micros for part in parts]
        sum(found).backward()
        optimizer.step()
        losses.append(sum(each.item() for each in found))
    return losses, start, {name: parameter.detach() - start[name] for name, parameter in model.named_parameters()}


def split(step: int, micros: int) -> list:
    return [value.chunk(micros) for value in batch(step).values()]


def train_adapted(stages: int, stage: int, schedule: str) -> tuple:
    return train("adapted", stages, stage, schedule, adapted())


def train_fused(stages: int, stage: int, schedule: str) -> tuple:
    return train("llama", stages, stage, schedule, fused={"rms_norm": True, "rotary": True, "swiglu": True})


def train(
    kind: str, stages: int, stage: int, schedule: str, model: torch.nn.Module | None = None, **more: dict
) -> tuple:
    """Losses and values of one rank; all ranks together have the micro-batches of `reference`."""
    world = torch.distributed.get_world_size()
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 4 * stages // world,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline_parallel_size": stages,
        "pipeline": {"schedule": schedule},
        "progress": {"enabled": False},
        "seed": 1,
        **more,
    }
    engine, *_ = mizzen.initialize(model=model or build(kind), config=config)
    ranks, rank, losses = engine.dp_world_size, engine.get_data_parallel_rank(), []
    for step in range(STEPS):
        parts = list(zip(*split(step, 4), strict=True))[rank::ranks]
        losses.append(engine.train_batch(iter([dict(zip(batch(step), part, strict=True)) for part in parts])).loss)
    return losses, values(engine)


def train_measured(kind: str, folder: str) -> tuple:
    """A model in two stages that are cut by what blocks take; without memory until then, where a folder is given."""
    model = build(kind)
    if folder:
        with torch.device("meta"):
            model = KINDS[kind].from_config(AutoConfig.from_pretrained(folder))
    return train(kind, 2, 0, "1f1b", model, pipeline={"partition": "profile"})


def train_from_files(kind: str, stages: int, stage: int, schedule: str, folder: str) -> tuple:
    """Losses and values of one rank that was given a model without memory, and the bytes that it has read by name."""
    with torch.device("meta"):
        model = KINDS[kind].from_config(AutoConfig.from_pretrained(folder))
    assert all(each.is_meta for each in model.parameters())
    read, plain = {}, WeightFiles.read

    def counted(files: WeightFiles, name: str, *others) -> torch.Tensor:
        value = plain(files, name, *others)
        read[name] = value.numel() * value.element_size()
        return value

    WeightFiles.read = counted
    try:
        found = train(kind, stages, stage, schedule, model)
    finally:
        WeightFiles.read = plain
    return (*found, read)
