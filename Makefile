# `make demo` shows the product, `make test` proves it; both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test proof lint bench docs clean

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

# every formula, link, command and snippet of the documentation
docs: $(READY)
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/journeys/test_docs.py tests/style/test_docs_math.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache build dist
