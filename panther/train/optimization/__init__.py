"""The optimizer of a run and the parameters that it trains: groups, shards of states, learning rates, weights."""

__all__: list[str] = []
