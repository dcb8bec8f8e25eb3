# Two commands do everything from a fresh clone: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
# uv installs in a quarter of pip's time. It does not read where pip looks for packages: that is handed on.
pip_has = $$(echo $${PIP_$(1):-$$($(BIN)/pip config get global.$(2) 2>/dev/null)} | tr ' ' ,)
UV = UV_FIND_LINKS="$(call pip_has,FIND_LINKS,find-links)" UV_DEFAULT_INDEX="$(call pip_has,INDEX_URL,index-url)" \
	$(BIN)/uv --system-certs
INSTALL = $(UV) pip install -p $(BIN)/python -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

LOCK = $(UV) pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
	--no-header --no-annotate -c constraints.txt --overrides deploy/docker/without-torch.txt

# Three workers, because tests wait for processes; short files last, so that all workers end together.
SLOWEST_FIRST = -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test nightly check lint lowest locks audit protos bench train clean

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.engine  ## Install, start the pair, ask about a clip, print the measured speedup
	$(BIN)/hippo demo

test: $(VENV)/.dev lint  ## Lint, type-check and run every test but those of nightly
	$(RUN) pytest -q $(SLOWEST_FIRST) --durations=15 tests/e2e tests/integration tests/demo tests/contract tests/unit

nightly: $(VENV)/.dev audit  ## What takes long: a training, bench.gpu's parts, properties with new examples
	$(RUN) pytest -q -m nightly --durations=15 tests/demo tests/e2e
	$(RUN) pytest -q -n 3 --dist loadfile --hypothesis-profile nightly tests/unit

check: $(VENV)/.dev lint  ## Lint, type-check and run the unit tests
	$(RUN) pytest -q -n 3 --dist loadfile tests/unit

lint: $(VENV)/.dev  ## ruff and mypy --strict
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy .

lowest: $(VENV)/.dev  ## Run the demo and the unit tests with the lowest versions in pyproject.toml
	$(UV) pip compile --resolution lowest-direct --all-extras pyproject.toml -o $(VENV)/lowest.txt
	$(UV) venv --clear -p $(BIN)/python $(VENV)/lowest
	$(UV) pip install -p $(VENV)/lowest -r $(VENV)/lowest.txt -e .
	$(VENV)/lowest/bin/hippo demo
	$(VENV)/lowest/bin/python -m pytest -q -W ignore::DeprecationWarning tests/unit

locks: $(VENV)/.dev  ## Write the versions and hashes of what the images install, after a change of versions
	$(BIN)/python deploy/docker/requirements.py pyproject.toml engine quantized traces \
	  | $(LOCK) - -o deploy/docker/engine.lock
	$(BIN)/python deploy/docker/requirements.py pyproject.toml traces | $(LOCK) - -o deploy/docker/gateway.lock

audit: $(VENV)/.venv  ## Look the versions of the images up in the list of known faults, if it can be reached
	@if curl -sSfo /dev/null -m 20 https://pypi.org/pypi/pip/json; then \
	  for image in engine gateway; do \
	    $(BIN)/uv tool run pip-audit --disable-pip --require-hashes -r deploy/docker/$$image.lock || exit 1; \
	  done; \
	else echo "not audited: PyPI's list of known faults cannot be reached from here"; fi

protos: $(VENV)/.dev  ## Regenerate the gRPC stubs from protos/
	$(BIN)/python protos/generate.py

bench: $(VENV)/.dev  ## Measure every policy and 1 to 32 clients; write the pages (25 to 45 min)
	$(RUN) bench.all

train: $(VENV)/.dev  ## Train the bundled pair again (hours; resumes)
	$(RUN) demo.train

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.venv: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt uv
	touch $@

$(VENV)/.engine: $(VENV)/.venv pyproject.toml constraints.txt
	$(INSTALL) -e '.[engine]'
	touch $@

$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.engine $@
