"""The data of a run: batches in an order that can continue anywhere, streams, and worker processes of DataLoaders."""

__all__: list[str] = []
