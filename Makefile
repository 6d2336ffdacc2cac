# The two commands: `make train` and `make test`. Knobs: PYTHON= (for the environment), ARGS= (appended), MOK_ARCHS=.
VENV ?= .venv
BIN := $(VENV)/bin
# gpu-test and bench also run on a machine that has a Python with torch and no environment of ours.
RUN := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
ARGS ?=

.PHONY: train test venv same-python lint build gpu-test bench

train: venv
	$(BIN)/python tools/train.py $(ARGS)

test: venv
	$(BIN)/python -m pytest $(ARGS)

venv: same-python $(VENV)/.installed

# An environment that another Python made is not used in silence.
WHICH := 'import sys; print(sys.version.split()[0], "in", sys.base_prefix)'
same-python:
	@test -z "$(PYTHON)" || test ! -x $(BIN)/python || { \
	  got=$$("$(PYTHON)" -c $(WHICH)) && made=$$($(BIN)/python -c $(WHICH)) && test "$$got" = "$$made" || { \
	    echo "PYTHON: got $(PYTHON) ($$got), but $(VENV) was made by $$made; remove $(VENV), or say VENV=another" >&2; \
	    exit 1; }; }

$(VENV)/.installed: pyproject.toml CMakeLists.txt
	@test -x $(BIN)/python || { python=$$(tools/find-python) && echo "venv: $$python" && "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --editable '.[test,plots]' --config-settings wheel.cmake=false
	$(BIN)/python tools/build.py --dirty --optional
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

build: venv
	$(BIN)/python tools/build.py $(ARGS)

gpu-test:
	$(RUN) tools/gpu_test.py $(ARGS)

bench:
	$(RUN) -m megatron_mok.cli bench --layer $(ARGS)
