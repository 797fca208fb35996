"""A byte-level GPT that learns the text of Python's standard library.

On two ranks: python -m torch.distributed.run --standalone --nproc-per-node 2 examples/gpt_bytes.py --steps 100
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen


def rotate(heads: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with its place: attention then sees distances."""
    length, width = heads.shape[-2:]
    speeds = 1000.0 ** -(torch.arange(0, width, 2, device=heads.device) / width)
    angles = torch.arange(length, device=heads.device)[:, None] * speeds
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)


class Block(nn.Module):
    """Attention to earlier places, then a small network at each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """What came in, with this block's part added."""
        inputs = self.inputs(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = inputs.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.network(self.network_norm(hidden))


class GPT(nn.Module):
    """Given tokens of shape (batch, length), it returns the mean loss of predicting each from those before it."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        blocks = [Block(width, heads) for _ in range(layers)]
        self.scores = nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))
        for matrix in (parameter for parameter in self.parameters() if parameter.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        return functional.cross_entropy(self.scores(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        """Go on from `start` for some bytes."""
        tokens = torch.tensor([list(start.encode())], device=next(self.parameters()).device)
        for _ in range(count):
            scores = self.scores(tokens[:, -128:])[:, -1].float()
            tokens = torch.cat([tokens, (scores / 0.7).softmax(-1).multinomial(1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def library_text(length: int = 129) -> list[Tensor]:
    """A data set: the modules of the standard library, one after the other, cut into pieces."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return list(torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)[:-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(Path(__file__).parent / "configs" / "gpt_bytes.json"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=192)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(args.width)
    engine, _, loader, _ = mizzen.initialize(
        model=model, model_parameters=model.parameters(), training_data=library_text(), config=args.config
    )
    batches = mizzen.RepeatingLoader(loader)
    while engine.global_steps < args.steps:
        loss = engine(next(batches).to(engine.device))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    if engine.global_rank == 0:
        print(f"\nAfter {args.steps} steps it writes:\n\n{model.write('def __init__(self', 300)}")


if __name__ == "__main__":
    main()
