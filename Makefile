# `make demo` shows the product, `make test` proves it; both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test proof lint bench docs docs-serve figures fuzz wheels kernels-test clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

# one thread per worker: two workers on two cores must not fight
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# where the shapes of every call are checked: every part in every variant, written out, read in a batch and decoded
CHECKED := $(addprefix tests/invariants/test_, written_out.py reading.py decoding.py taps.py)

test: $(READY)
	@failed=0; \
	$(PYTEST) -n auto --dist worksteal $(CHECKED) || failed=1; \
	CLEARHEAD_SHAPES=unchecked $(PYTEST) -n auto --dist worksteal $(addprefix --ignore=,$(CHECKED)) || failed=1; \
	exit $$failed

# what takes longer than a test may: a hundred kills of one run
proof: $(READY)
	CLEARHEAD_SHAPES=unchecked $(PYTEST) -m proof

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks

# the documentation site in build/docs; a warning is an error, and reading it needs no network
docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "Open build/docs/index.html, or run: make docs-serve"

docs-serve: docs
	$(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1 8000

# the pictures of README and docs, drawn by the commands beside them
figures: $(READY)
	$(BIN)/python -m docs.figures

# the kernel tests, with the kernels built for MARCH: x86-64-v3, x86-64-v4, portable
kernels-test: $(READY)
	CLEARHEAD_MARCH=$(MARCH) CLEARHEAD_SHAPES=unchecked $(PYTEST) -n auto tests/precision tests/invariants/test_decoding.py -k "not compiler and not library and not neon"

# 10,000 mutated files, 10,000 command lines and requests of every kind: no traceback, no hang, less than 2 GB
fuzz: $(READY)
	$(BIN)/python -W ignore -m tests.fuzz --seed 0
	CLEARHEAD_FUZZ=1000 CLEARHEAD_SHAPES=unchecked $(PYTEST) -m proof tests/serve/test_fuzz.py

# a wheel in dist/ with the kernels compiled for AVX2 and AVX-512; a user needs no compiler
wheels: $(READY)
	CLEARHEAD_PREBUILD=1 $(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .mypy_cache .ruff_cache build dist
