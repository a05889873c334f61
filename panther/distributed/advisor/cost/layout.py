"""An arrangement of ranks: the axes of a mesh, and the strategy along each."""

__all__ = ["Layout"]

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An arrangement of ranks: the axes of :func:`make_mesh`, and the strategy along each."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    replicate: int = 1
    """Number of replicas of the model that ``"fsdp"`` shards along dp (HSDP)."""
    strategy: str | None = None
    """Strategy of :func:`data_parallel`; None without data parallelism."""
    schedule: str | None = None
    """Schedule of :func:`make_schedule`; None without a pipeline."""
    num_microbatches: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.dp * self.pp * self.tp

    def __str__(self) -> str:
        """Return the axes that are longer than one."""
        sharding = "" if self.strategy is None else f" {self.strategy}"
        parts = [f"replicate={self.replicate}"] if self.replicate > 1 else []
        parts += [f"dp={self.dp}{sharding}"] if self.dp > 1 else []
        parts += [f"pp={self.pp} {self.schedule} m={self.num_microbatches}"] if self.pp > 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        return ", ".join(parts) or "one rank"
