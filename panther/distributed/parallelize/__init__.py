"""Build a distributed model from settings: the one way of the Trainer, the advisor and HybridParallelTrainer."""

__all__: list[str] = []
