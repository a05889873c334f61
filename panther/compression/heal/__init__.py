"""Healing: distil the original model into the compressed one, by the Trainer.

``healing`` trains the parameters of the new layers, and ``distillation`` is the loss between the two models' outputs.
Importing it loads the Trainer and torch.distributed's engines, so that the importing functions do it when they heal.
"""

__all__: list[str] = []
