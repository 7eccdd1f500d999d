# Two commands are all that is needed: `make demo` and `make test`. Both install what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: demo test check coverage clean

demo: $(VENV)/installed
	@mkdir -p runs
	$(BIN)/fedcat compare --methods fedavg,fedprox,scaffold,fedgen,clusamp,fedcat,fedcat-plus --seeds 3 \
		--dataset digits --alpha 0.1 --rounds 100 --lr 0.03

test: $(VENV)/installed-dev check
	$(PYTEST)

check: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

coverage: $(VENV)/installed-dev
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=90

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fedcat needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) runs reproduce .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
