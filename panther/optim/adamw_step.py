"""AdamW's step for the parameters of a group."""

__all__ = ["step_adamw"]

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def step_adamw(group: dict[str, Any], parameters: list[Tensor], states: MutableMapping[Any, Any]) -> None:
    """Change parameters that have gradients by AdamW, with the settings of their group.

    Args:
        group: The settings.
        parameters: Parameters with gradients.
        states: The states of the optimizer, by parameter; empty ones are filled.
    """
    for p in parameters:
        if not states[p]:
            states[p] |= {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    if parameters:
        adamw(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]
            [states[p]["exp_avg"] for p in parameters],
            [states[p]["exp_avg_sq"] for p in parameters],
            [],
            [states[p]["step"] for p in parameters],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
