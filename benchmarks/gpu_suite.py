"""The command ``python -m benchmarks.gpu_suite``, which benchmarks/gpu/suite.py implements."""

import sys

from benchmarks.gpu.suite import main

if __name__ == "__main__":
    sys.exit(main())
