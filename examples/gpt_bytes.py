"""A byte-level GPT that learns the text of Python's own standard library, with the three calls of mizzen.

    python examples/gpt_bytes.py                                                                      # one rank
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/gpt_bytes.py --steps 100 # two
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen


class Block(nn.Module):
    """Attention to what came before, then a small network for each place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """The stream with what this block has to say added to it."""
        split = self.query_key_value(self.before_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.network(self.before_network(hidden))


class GPT(nn.Module):
    """Predicts the next byte. Called with tokens of shape (batch, length), it returns the mean loss over them."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)
        for matrix in (parameter for parameter in self.parameters() if parameter.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def predict(self, tokens: Tensor) -> Tensor:
        """Scores for the byte after each place."""
        places = self.places.weight[: tokens.shape[1]]
        return self.head(self.blocks(self.bytes(tokens) + places))

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        scores = self.predict(tokens[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def write(self, start: bytes, count: int) -> str:
        """Go on from `start`."""
        tokens = torch.tensor([list(start)], device=self.head.weight.device)
        for _ in range(count):
            chances = (self.predict(tokens[:, -self.length :])[:, -1].float() / 0.7).softmax(-1)
            tokens = torch.cat([tokens, chances.multinomial(1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def library_text(length: int) -> list[Tensor]:
    """All modules of the standard library, cut into pieces of length + 1 bytes: a data set."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return list(text.unfold(0, length + 1, length).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default=str(Path(__file__).parent / "configs" / "gpt_bytes.json"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    model = GPT(args.width)
    engine, _, loader, _ = mizzen.initialize(
        model=model, model_parameters=model.parameters(), training_data=library_text(model.length), config=args.config
    )
    while engine.global_steps < args.steps:
        for batch in loader:
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            report = engine.step()
            if report.step == args.steps:
                break

    if engine.global_rank == 0:
        print(model.write(b"def ", 400))
    engine.destroy()


if __name__ == "__main__":
    main()
