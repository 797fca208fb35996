"""BERT pre-training, masked words and next sentences, as a script for DeepSpeed is written.

    python examples/bert/make_data.py
    python examples/bert/deepspeed_train.py --deepspeed_config examples/bert/bert_tiny.json --max_steps 4
    mizzen run --num_gpus 2 examples/bert/deepspeed_train.py --deepspeed_config examples/bert/bert_tiny.json

`deepspeed` is whatever is installed under that name, mizzen's drop-in for example; without one it is mizzen itself.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import PretrainingDataProvider
from make_data import DATA, make
from transformers import BertConfig, BertForPreTraining

try:
    import deepspeed
except ImportError:
    import mizzen as deepspeed

SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
NO_DECAY = ("bias", "LayerNorm.weight")


class BertTask:
    """The model while it is trained: its engine, and where it is in its data."""

    def __init__(self, args: argparse.Namespace, vocabulary: int) -> None:
        padded = -(-vocabulary // 64) * 64
        length = max(512, args.max_seq_length)
        config = BertConfig(vocab_size=padded, max_position_embeddings=length, **SIZES[args.model_size])
        self.network: Any = BertForPreTraining(config)
        self.epoch = self.global_step = self.global_data_samples = self.epoch_start = 0

    def state(self) -> dict[str, int]:
        """What a checkpoint says of the loop."""
        return {
            "epoch": self.epoch,
            "epoch_start": self.epoch_start,
            "last_global_step": self.global_step,
            "last_global_data_samples": self.global_data_samples,
        }


def get_argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_size", choices=SIZES, default="tiny")
    parser.add_argument("--data_path_prefix", default=DATA, help="where the shards are; made there if they are not")
    parser.add_argument("--max_seq_length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--output_dir", default="runs/bert", help="where summaries are written")
    parser.add_argument("--job_name", default="bert")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=None, help="stop after so many steps in all")
    parser.add_argument("--max_steps_per_epoch", type=int, default=None, help="end an epoch after so many steps")
    parser.add_argument("--print_steps", type=int, default=10)
    parser.add_argument(
        "--load_training_checkpoint", "--load_cp", metavar="DIR", help="go on from a checkpoint in here"
    )
    parser.add_argument("--load_checkpoint_id", metavar="TAG", help="which one; without it the newest")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of this run, if any")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    return deepspeed.add_config_arguments(parser)


def construct_arguments() -> argparse.Namespace:
    """The arguments, and what follows from them."""
    parser = get_argument_parser()
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("give --deepspeed_config, such as examples/bert/bert_tiny.json")
    config = json.loads(Path(args.deepspeed_config).read_text())
    args.saved_model_path = config.get("checkpoint", {}).get("dir") or f"{args.output_dir}/saved_models/{args.job_name}"
    args.summary = Path(args.output_dir) / f"{args.job_name}.jsonl"
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    return args


def prepare_data(args: argparse.Namespace) -> PretrainingDataProvider:
    """The shards, which the first rank makes if nobody has."""
    if deepspeed.comm.get_rank() == 0 and not Path(args.data_path_prefix).exists():
        make(args.data_path_prefix, length=args.max_seq_length)
    deepspeed.comm.barrier()
    return PretrainingDataProvider(args.data_path_prefix, args.max_seq_length, args.seed)


def prepare_optimizer_parameters(args: argparse.Namespace, model: BertTask) -> list[dict[str, Any]]:
    """Two groups: weights decay, biases and norms do not."""
    named = list(model.network.named_parameters())
    without = [parameter for name, parameter in named if name.endswith(NO_DECAY)]
    decayed = [parameter for name, parameter in named if not name.endswith(NO_DECAY)]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": without, "weight_decay": 0.0}]


def prepare_model_optimizer(args: argparse.Namespace, data: PretrainingDataProvider) -> BertTask:
    """The model in an engine, which brings its optimizer and its schedule."""
    model = BertTask(args, data.vocabulary)
    groups = prepare_optimizer_parameters(args, model)
    model.network, _, _, _ = deepspeed.initialize(args=args, model=model.network, model_parameters=groups)
    model.network.register_client_state(model.state)  # goes with what is saved when the job is asked to stop
    return model


def load_training_checkpoint(model: BertTask, path: str, tag: str | None) -> bool:
    """Go on where a checkpoint was made; False when there is none."""
    folder, state = model.network.load_checkpoint(path, tag)
    if folder is None:
        return False
    model.epoch, model.epoch_start = state["epoch"], state["epoch_start"]
    model.global_step, model.global_data_samples = state["last_global_step"], state["last_global_data_samples"]
    return True


def load_checkpoint(args: argparse.Namespace, model: BertTask) -> None:
    """What was asked for on the command line."""
    path = args.load_training_checkpoint
    if path and not load_training_checkpoint(model, path, args.load_checkpoint_id):
        raise SystemExit(f"there is no checkpoint {args.load_checkpoint_id or ''} in {path}")
    if not path and args.resume:
        load_training_checkpoint(model, args.saved_model_path, None)


def checkpoint_model(args: argparse.Namespace, model: BertTask) -> None:
    """Save everything."""
    tag = f"epoch{model.epoch}_step{model.global_step}"
    model.network.save_checkpoint(args.saved_model_path, tag, client_state=model.state())


def report(args: argparse.Namespace, model: BertTask, **values: float) -> None:
    """One line of the summary, and now and then one on the screen."""
    if deepspeed.comm.get_rank() != 0:
        return
    events = {"step": model.global_step, "samples": model.global_data_samples, "epoch": model.epoch, **values}
    args.summary.parent.mkdir(parents=True, exist_ok=True)
    with args.summary.open("a") as file:
        file.write(json.dumps(events) + "\n")
    if "loss" not in values or model.global_step == 1 or model.global_step % args.print_steps == 0:
        print(", ".join(f"{name} {value:.6g}" for name, value in events.items()), flush=True)


def on_device(batch: dict[str, torch.Tensor], model: BertTask) -> dict[str, torch.Tensor]:
    return {name: tensor.to(model.network.device) for name, tensor in batch.items()}


def is_done(args: argparse.Namespace, model: BertTask) -> bool:
    return args.max_steps is not None and model.global_step >= args.max_steps


def train(args: argparse.Namespace, model: BertTask, data: PretrainingDataProvider) -> bool:
    """The rest of one epoch; False when the run is over before the epoch is."""
    engine = model.network
    engine.train()
    batch, micro = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
    begin, total = time.monotonic(), torch.zeros((), device=engine.device)
    position = model.global_data_samples - model.epoch_start
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    for inputs in data.batches(model.epoch, position, batch=batch, micro=micro, rank=rank, ranks=ranks):
        loss = engine(**on_device(inputs, model)).loss
        engine.backward(loss)
        total += loss.detach() / engine.gradient_accumulation_steps()
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_boundary:
            deepspeed.comm.all_reduce(total)
            model.global_step += 1
            model.global_data_samples += batch
            rate = batch / (time.monotonic() - begin)
            report(args, model, loss=total.item() / ranks, lr=engine.get_lr()[0], samples_per_second=rate)
            begin = time.monotonic()
            total.zero_()
            if (model.global_data_samples - model.epoch_start) // batch == args.max_steps_per_epoch:
                break
            if is_done(args, model):
                return False
    return True


@torch.no_grad()
def pretrain_validation(args: argparse.Namespace, model: BertTask, data: PretrainingDataProvider) -> None:
    """The mean loss over samples that are never trained on."""
    engine = model.network
    engine.eval()
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    micro = engine.train_micro_batch_size_per_gpu()
    found = torch.zeros(2, device=engine.device)
    batches = data.batches(0, 0, batch=micro * ranks, micro=micro, rank=rank, ranks=ranks, validate=True)
    for _, inputs in zip(range(max(1, 64 // (micro * ranks))), batches, strict=False):
        found += torch.stack([engine(**on_device(inputs, model)).loss.float(), found.new_ones(())])
    deepspeed.comm.all_reduce(found)
    report(args, model, validation_loss=(found[0] / found[1]).item())


def run(args: argparse.Namespace, model: BertTask, data: PretrainingDataProvider) -> None:
    """Epoch after epoch, each with an evaluation and a checkpoint at its end."""
    while model.epoch < args.epochs and not is_done(args, model):
        is_whole = train(args, model, data)
        pretrain_validation(args, model, data)
        if is_whole:
            model.epoch, model.epoch_start = model.epoch + 1, model.global_data_samples
        checkpoint_model(args, model)
    data.release()


def main() -> None:
    start = time.monotonic()
    args = construct_arguments()
    deepspeed.init_distributed()
    data = prepare_data(args)
    model = prepare_model_optimizer(args, data)
    load_checkpoint(args, model)
    run(args, model, data)
    if deepspeed.comm.get_rank() == 0:
        print(f"{model.global_step} steps in {time.monotonic() - start:.1f} s; checkpoints in {args.saved_model_path}")


if __name__ == "__main__":
    main()
