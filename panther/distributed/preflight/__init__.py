"""What ``panther doctor --nodes`` checks between the ranks of a run before it is started."""

__all__: list[str] = []
