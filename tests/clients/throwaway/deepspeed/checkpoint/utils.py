"""A state dict whose tensors no longer share the engine's buffers."""

from torch import Tensor
from torch.utils._pytree import tree_map_only


def clone_tensors_for_torch_save(item, device="cpu"):
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)
