#!/bin/bash
# Written by panther init. Start with: @@usage
set -eu
# torchrun's shared store would keep the addresses of an earlier attempt, which some restarts then wait for.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@@grace
@@{backend}exec torchrun \
@@arguments
