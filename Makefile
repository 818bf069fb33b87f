# Every target sets up what it needs: Python 3.11 or newer and make are enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# A CPU build is enough. Another one, in a virtual environment of its own:
# make test TORCH="torch==2.12.0 --index-url <your index>"
TORCH ?= torch==2.13.0
VENV ?= .venv$(patsubst torch==%,-%,$(filter-out torch==2.13.0,$(firstword $(TORCH))))
BIN := $(VENV)/bin
PART ?= 1/1
# Two processes, the second of which takes over tests of the first when it has none left.
PARALLEL := -n 2 --dist worksteal

.PHONY: demo test test-all lint package docs bench groundtruth clean

demo: $(VENV)/.installed
	$(BIN)/python examples/train_gpt.py

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL)

# A quarter of all tests: make test-all PART=2/4. Started again with the same sources, it leaves out what has passed.
# The folder is named because the options are defined in its conftest.py, which worker processes load by this name.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest tests $(PARALLEL) -m "slow or not slow" --part $(PART) --resume $(VENV)/passed

# Types and imports are checked on an installed wheel: in the source tree the packages do not have their names.
lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build $(VENV)/wheel && $(BIN)/pip install --quiet --no-deps --target $(VENV)/wheel .
	cd $(VENV) && MYPYPATH=wheel bin/mypy --config-file ../pyproject.toml -p shardgraph
	cd $(VENV) && PYTHONPATH=wheel bin/lint-imports --config ../pyproject.toml

# The documentation, in build/site; a broken link ends it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the source distribution, in dist; tests/test_packaging.py tries both in an environment of their own.
package: $(VENV)/.lint
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build --outdir dist

# All jobs, each eager and compiled, beside FSDP2, DDP and one rank.
bench: $(VENV)/.test
	for job in llama llama-50m gpt2 convolutions small; do \
		$(BIN)/python benchmarks/train_step.py --job $$job --name step-$$job || exit 1; done

groundtruth: $(VENV)/.installed
	$(BIN)/python benchmarks/groundtruth.py --kept $(VENV)/groundtruth

$(VENV)/.torch:
	$(if $(PYTHON),,$(error no Python 3.11 or newer on PATH; name one: make PYTHON=/path/to/python))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
