"""What optimizers that contain AdamW have in common: the checks of their groups, and AdamW's step."""

__all__ = ["CheckedGroups", "check_adamw_settings", "step_adamw"]

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class CheckedGroups(torch.optim.Optimizer):
    """An optimizer that checks each group as it is added."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, unless its settings or parameters are refused."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, number: int) -> None:
        """Raise an error if the group of this number cannot be used."""
        check_adamw_settings(self.param_groups[number])


def check_adamw_settings(group: dict[str, Any]) -> None:
    """Raise ValueError if a setting of AdamW is out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, not {group[name]}")
    if not all(0 <= value < 1 for value in group["betas"]):
        raise ValueError(f"betas must be in [0, 1), not {group['betas']}")


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
