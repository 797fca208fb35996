"""A state dict whose tensors no longer share the engine's buffers; tied tensors stay tied, so they are saved once."""

from torch import Tensor
from torch.utils._pytree import tree_map_only


def clone_tensors_for_torch_save(item, device="cpu"):
    clones = {}

    def clone(tensor):
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in clones:
            clones[key] = tensor.detach().clone().to(device)
        return clones[key]

    return tree_map_only(Tensor, clone, item)
