"""Benchmarks and trials: ``python -m benchmarks.FOLDER.NAME`` from the root of the repository; see README.md."""
