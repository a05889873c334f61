"""Data parallelism: DDP, FSDP and replication."""

__all__: list[str] = []
