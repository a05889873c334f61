"""Start processes: a function on this machine, or a script on torchrun's engine."""

__all__: list[str] = []
