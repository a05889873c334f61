"""Pipeline parallelism: stages, schedules and microbatches."""

__all__: list[str] = []
