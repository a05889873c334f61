"""The checks of ``panther doctor --nodes`` between the ranks of a run before it is started."""

__all__: list[str] = []
