"""What is trained, and by which optimizer: groups, shards of states, learning rates, frozen parameters."""

__all__: list[str] = []
