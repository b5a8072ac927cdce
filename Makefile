# `make run` and `make test` need nothing but Python 3.11+ and a network for pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: docs run test tests test-full test-newest test-torchtitan test-archon test-trainer test-automodel test-verl dist test-dist check bench gallery models configuration cli clean

# Trains a tiny model with ZBV on 4 processes, goes on with another schedule on another mesh, and asks the result.
run: $(STAMP)
	@rm -rf out/tiny
	$(BIN)/python examples/tiny/make.py out/tiny
	$(BIN)/zeropipe train out/tiny/run.toml
	$(BIN)/zeropipe train out/tiny/run.toml --schedule.name 1f1b --mesh.pp 2 --mesh.dp_shard 2 --train.steps 90
	$(BIN)/python examples/tiny/ask.py out/tiny

# The checks run beside the tests.
test: $(STAMP)
	$(MAKE) --no-print-directory -j2 check tests

# Files run side by side on JOBS workers, one more than two cores have: many tests wait. A worker's files run one after
# the other, so that they share what they start. All workers are forks of one process (tests/helpers/fork_server.py).
# No run lasts longer than LIMIT seconds: each test has a time-out, and this ends what a time-out cannot.
JOBS ?= 3
LIMIT ?= 3600
tests: export PYTHONDONTWRITEBYTECODE :=  # many processes are started: each finds the code compiled
tests: $(STAMP)
	$(BIN)/python tests/helpers/compile_kernels.py & trap "kill $$! 2> /dev/null" EXIT; trap "exit 130" INT TERM; \
	$(if $(shell command -v timeout),timeout --foreground --kill-after=20 $(LIMIT)) \
		$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# what `test` leaves out: whole products, such as every checkpointing mode compiled under every schedule
test-full: $(STAMP)
	$(BIN)/python -m pytest -q -m full

# For a release: engine, model types and training with the newest torch and transformers of PyPI, not with those of
# constraints.txt. It ends with the versions, and with the model types that differ from docs/models.md.
NEWEST := .venv-newest/bin
test-newest:
	test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	$(NEWEST)/pip install --quiet --disable-pip-version-check --upgrade torch transformers -e '.[dev]'
	$(NEWEST)/python -m pytest -q -n $(JOBS) --dist loadfile tests/engine tests/pipelining tests/train && \
		$(NEWEST)/python -m pytest -q -n $(JOBS) -m full tests/engine/stages/test_models_table.py; \
		status=$$?; $(NEWEST)/python tests/helpers/newest.py && exit $$status

# Our schedules in other people's trainers: each has a virtual environment of its own, made from PyPI.
test-torchtitan: .venv-torchtitan/.installed
	.venv-torchtitan/bin/python -m pytest -q --confcutdir tests/integrations tests/integrations/test_torchtitan.py

test-archon: .venv-archon/.installed
	.venv-archon/bin/python -m pytest -q --confcutdir tests/integrations tests/integrations/test_archon.py

test-trainer: .venv-trainer/.installed
	.venv-trainer/bin/python -m pytest -q --confcutdir tests/integrations tests/integrations/test_trainer_integration.py

test-automodel: .venv-automodel/.installed
	.venv-automodel/bin/python -m pytest -q --confcutdir tests/integrations tests/integrations/test_automodel.py

test-verl: .venv-verl/.installed
	.venv-verl/bin/python -m pytest -q --confcutdir tests/integrations tests/integrations/test_verl.py

# Packages that are installed without their own dependencies: they pin another torch or transformers, or CUDA packages.
PACKAGE_archon := areal==1.0.4
PACKAGE_automodel := nemo-automodel==0.7.0
PACKAGE_verl := verl==0.9.1

.venv-%/.installed: pyproject.toml constraints.txt tests/integrations/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e . -r tests/integrations/$*.txt
	$(if $(PACKAGE_$*),.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps $(PACKAGE_$*))
	touch $@

# The wheel and the sdist; the wheel is built from the sdist, so both are complete.
dist: .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build .
	.venv-dist/bin/twine check --strict dist/*

# The wheel with each extra in an empty environment; EXTRAS="app train" checks some of them.
test-dist: dist
	$(PYTHON) tests/integrations/check_dist.py $(EXTRAS)

.venv-dist/.installed: Makefile
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6.1'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check src tests bench examples docs/gallery.py docs/mesh.py docs/architecture.py docs/models.py docs/configuration.py docs/cli.py docs/site
	$(BIN)/ruff format --check src tests bench examples docs/gallery.py docs/mesh.py docs/architecture.py docs/models.py docs/configuration.py docs/cli.py docs/site
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python bench/simulate.py
	$(BIN)/python bench/draw.py

gallery: $(STAMP)
	$(BIN)/python docs/gallery.py
	$(BIN)/python docs/mesh.py
	$(BIN)/python docs/architecture.py

# The documentation site in build/site: a broken link or anchor fails.
docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/site/build.py build/site

models: $(STAMP)
	$(BIN)/python docs/models.py

configuration: $(STAMP)
	$(BIN)/python docs/configuration.py

cli: $(STAMP)  # the table of options
	$(BIN)/python docs/cli.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-torchtitan .venv-archon .venv-trainer .venv-automodel .venv-verl .venv-dist build dist out
