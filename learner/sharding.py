"""A model split over ranks with FSDP2 (torch.distributed.fsdp.fully_shard), and its parts put together again."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.ranks import Ranks


def shard(model: PreTrainedModel, ranks: Ranks, forwards: Mapping[str, Callable[..., Any]]) -> None:
    """Split the parameters of `model` over the ranks by decoder layer; `forwards` become its methods, by name.

    Parameters are whole only while a layer computes. Hidden states go through the head outside the model's own
    forward, so it is these methods that gather embedding, last norm and head. Gradients are summed over the ranks, not
    averaged: the normalisers of the loss are those of the whole batch.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
    for name, forward in forwards.items():
        setattr(model, name, MethodType(forward, model))
        register_fsdp_forward_method(model, name)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor of which this rank may hold a part; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_state(model: PreTrainedModel, ranks: Ranks) -> dict[str, Tensor]:
    """The whole weights by name, on rank 0; elsewhere nothing, but every rank must call it.

    Tied weights share one tensor, as in the model. What had to be gathered lies on the CPU, one model's worth of it.
    """
    whole: dict[int, Tensor] = {}
    named = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in whole:
            full = gathered(tensor.detach())
            whole[id(tensor)] = full.cpu() if isinstance(tensor, DTensor) and ranks.is_first else full
        if ranks.is_first:
            named[name] = whole[id(tensor)]
        else:
            whole[id(tensor)] = tensor
    return named


def scattered(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, split as the parameter `like` is."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements)
