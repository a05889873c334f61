"""The choice of a form for each weight.

``convex_hull`` chooses options of the least loss within a limit, ``allocation`` compares choices on held-out batches,
and has weights fitted again where the batches mislead, ``timing`` measures how fast the forms are, ``speed_target``
chooses within a time, and ``measurement`` measures the result.
"""

__all__: list[str] = []
