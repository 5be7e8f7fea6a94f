# The README names these commands; each makes .venv when it is absent.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-slow docs-check

quickstart: $(VENV)/.installed
	$(BIN)/python -m tba_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

docs-check: $(VENV)/.installed-test
	$(BIN)/python -m experiments.docs_check

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.txt requirements-test-nodeps.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-test.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r requirements-test-nodeps.txt
	touch $@
