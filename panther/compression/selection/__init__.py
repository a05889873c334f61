"""The choice of a form for each weight.

``allocation`` chooses options of the least loss within a limit, compares choices on held-out batches, and has weights
fitted again where the batches mislead, ``timing`` measures how fast the forms are, ``speed_target`` chooses within a
time, and ``trials`` makes and measures new layers.
"""

__all__: list[str] = []
