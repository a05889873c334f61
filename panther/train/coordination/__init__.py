"""How the ranks of a run act alike: the numbers of a step, sums over ranks, signals, and the end of the run."""

__all__: list[str] = []
