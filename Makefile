# `make demo` shows the product, `make test` proves it; both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test proof lint bench docs docs-serve figures clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

# one thread per worker: two workers on two cores must not fight
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# where the shapes of every call are checked: parts, in every variant
CHECKED := tests/invariants tests/precision tests/data tests/inspect

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
	$(BIN)/python docs/figures.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache build dist
