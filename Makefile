# Needs Python 3.11 or newer, gcc, make and git; everything else goes into .venv and weights/.
# Every step leaves a stamp in .venv when it is done, so an interrupted set-up goes on where it stopped.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip
MINILLM := $(VENV)/bin/minillm
LAB ?= lab
RESULTS = results/$(shell $(PY) -m minillm.bench.machine)
WEIGHTS := $(or $(MINILLM_WEIGHTS),weights)/smollm2-135m-instruct/config.json
TORCH_PIN := $(shell grep '^torch==' constraints.txt)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# cpu or cuda: what is asked for, else what is installed, else cuda if a GPU answers.
ifndef TORCH
TORCH := $(patsubst $(VENV)/.torch-%,%,$(firstword $(wildcard $(VENV)/.torch-*)))
endif
ifeq ($(TORCH),)
TORCH := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifeq ($(filter cpu cuda,$(TORCH)),)
$(error TORCH is '$(TORCH)'; it must be cpu or cuda)
endif

.PHONY: help run test serve lint lab lessons student slides course bundle mutants stateful soak soak-server fuzz cluster browser bench readme \
    check-gpu weights doctor clean

help: ## explain every target (this text)
	@echo "make TARGET, where TARGET is one of"
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: TORCH=cpu|cuda (now $(TORCH))   PYTHON=python3.12   ARGS='more options'   PEERS='--peer ...'   SERVING='--peer-server ...'"

run: $(VENV)/.base $(WEIGHTS) ## set everything up and run the ladder: every stage on real prompts, then the table
	$(MINILLM) ladder $(ARGS)

# Two at once, each with one thread of torch: with two of them each, both would wait for each other.
test: $(VENV)/.dev $(WEIGHTS) ## run all tests, for example ARGS='-k sampling'
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

serve: $(VENV)/.serve $(WEIGHTS) ## serve the model at http://127.0.0.1:8000: OpenAI's API, and a page with the running batch
	$(MINILLM) serve $(ARGS)

lint: $(VENV)/.dev ## check style, formatting, types and spelling
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/codespell README.md CHANGELOG.md .github lessons minillm weights/*.md

lab: $(VENV)/.lessons $(WEIGHTS) ## put the lessons into lab/, your own folder (never written over), and open JupyterLab there
	$(PY) -m minillm.lab.build lab $(LAB)
	cd $(LAB) && $(CURDIR)/$(VENV)/bin/jupyter lab $(ARGS)

lessons: $(VENV)/.dev $(WEIGHTS) ## run the lessons that changed and keep their outputs, or some: LESSONS='04 05'
	$(PY) -m minillm.lab.build lessons $(LESSONS)

student: $(VENV)/.lessons ## make the notebooks without solutions: build/student/
	$(PY) -m minillm.lab.build student

slides: $(VENV)/.lessons ## make the slides of the lessons, build/slides/: HTML, PDF (with Chromium), notes; LESSONS='04 05'
	$(PIP) install -q -c constraints.txt -e '.[slides]'
	$(PIP) install -q -c constraints.txt --no-deps sphinx-revealjs
	$(PY) -m minillm.course.slides $(LESSONS) $(ARGS)

course: $(VENV)/.course ## what `minillm course` needs to make and grade assignments: see lessons/instructor/README.md

bundle: $(VENV)/.lessons ## put all that a class without a network needs into build/bundle/, to carry on a stick (430 MB)
	$(PY) -m minillm.course.bundle $(ARGS)

mutants: $(VENV)/.dev $(WEIGHTS) ## every planted wrong solution against the checks that must catch it (half an hour)
	@mkdir -p results
	$(PY) tests/mutants.py > results/mutants.txt; found=$$?; tail -1 results/mutants.txt; exit $$found

stateful: $(VENV)/.dev ## random use of the engine against the naive stage: 20 engines, 2,000 steps each (3 minutes)
	@mkdir -p results
	STATEFUL_STEPS=2000 $(PY) -m pytest -s --disable-warnings tests/test_stateful.py $(ARGS) > results/stateful.txt; found=$$?; \
		tail -4 results/stateful.txt; exit $$found

soak: $(VENV)/.dev ## 10,000 requests through the engine: nothing may be lost, kept or slowed down (1 minute)
	@mkdir -p results
	$(PY) tests/soak.py --json results/soak.json $(ARGS)

soak-server: $(VENV)/.dev $(WEIGHTS) ## random clients that leave, stall and send nonsense to the server: nothing may leak (6 minutes)
	@mkdir -p results
	$(PY) tests/server_soak.py --json results/server-soak.json $(ARGS)

fuzz: $(VENV)/.dev ## whatever the server's OpenAPI document allows and forbids, by schemathesis: no 5xx (1 minute)
	$(PIP) install -q -c constraints.txt -e '.[fuzz]'
	@mkdir -p results
	$(PY) tests/fuzz_openapi.py $(ARGS) > results/server-fuzz.txt; found=$$?; tail -4 results/server-fuzz.txt; exit $$found

cluster: $(VENV)/.dev ## test replicas through Ray Serve (installs the extra `cluster`, 80 MB)
	$(PIP) install -q -c constraints.txt -e '.[cluster]'
	$(PY) -m pytest tests/test_cluster.py tests/test_routing.py $(ARGS)

browser: $(VENV)/.dev ## test the server's page in headless Chromium, which must be installed (extra `browser`)
	$(PIP) install -q -c constraints.txt -e '.[browser]'
	$(PY) -m pytest tests/test_live_browser.py $(ARGS)

bench: $(VENV)/.dev $(WEIGHTS) ## measure everything anew: results/MACHINE.json, the plots, README's tables (under an hour)
	@mkdir -p results
	$(MINILLM) bench --preset full --json $(RESULTS).json --plot $(RESULTS)-ladder.png --peer transformers $(PEERS)
	$(MINILLM) bench queue --json $(RESULTS).json --plot $(RESULTS)-queue.png
	$(MINILLM) bench prefill --json $(RESULTS).json --plot $(RESULTS)-prefill.png
	$(MINILLM) bench memory --json $(RESULTS).json --plot $(RESULTS)-memory.png
	$(MINILLM) bench sharing --json $(RESULTS).json --plot $(RESULTS)-sharing.png
	$(MINILLM) bench scheduler --json $(RESULTS).json
	$(MINILLM) profile --json $(RESULTS).json
	$(MINILLM) bench --backends --json $(RESULTS).json --plot $(RESULTS)-backends.png
	$(MINILLM) bench scaling --json $(RESULTS).json --plot $(RESULTS)-scaling.png
	$(MINILLM) bench serving --json $(RESULTS).json $(SERVING)
	$(MINILLM) simulate --calibrate --json $(RESULTS).json --plot $(RESULTS)-simulation.png
	$(MINILLM) trace --plot $(RESULTS)-trace.png
	$(PY) -m minillm.bench.readme $(RESULTS).json

readme: $(VENV)/.base ## fill README's tables from the results file that it links to
	$(PY) -m minillm.bench.readme

check-gpu: ## test and measure on a CUDA GPU, with the torch that PYTHON has (no set-up)
	PYTHONPATH=. $(PYTHON) -m minillm.bench.check_gpu $(ARGS)

weights: $(VENV)/.base ## fetch a model into weights/: NAME=... from weights/manifest.json, or the default
	$(MINILLM) weights $(NAME) $(ARGS)

doctor: $(VENV)/.base ## say what this machine has, and what is missing with the command that mends it
	$(MINILLM) doctor

clean: ## remove caches and build products; .venv and weights/ stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up

# The stamp holds the clone's path: after a move, all is installed again; without a working pip, made anew.
ifneq ($(shell test -x $(PY) && cat $(VENV)/.created 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)/.created
endif

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "$(PYTHON) is `$(PYTHON) --version 2>&1`; minillm needs 3.11 or newer: make PYTHON=python3.11 ..."; \
	    exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || { echo "Making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@printf '%s' "$(CURDIR)" > $@

# The CPU build of torch has its own index for Linux; PyPI's Linux build brings CUDA along.
$(VENV)/.torch-$(TORCH): $(VENV)/.created constraints.txt
	@for other in $(filter-out $@,$(wildcard $(VENV)/.torch-*)); do \
	    $(PIP) uninstall --yes torch && rm $$other; done
	@from=; \
	if [ $(TORCH) = cpu ] && [ "`uname -s`" = Linux ]; then \
	    if $(PY) -c "import urllib.request as r; r.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=5)" 2>/dev/null; \
	    then from="--no-deps --index-url $(TORCH_CPU_INDEX)"; \
	    else echo "$(TORCH_CPU_INDEX) is not reachable; torch comes from pip's usual index"; fi; \
	fi; \
	$(PIP) install -c constraints.txt $$from $(TORCH_PIN)
	@touch $@

$(VENV)/.base: $(VENV)/.torch-$(TORCH) pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.lessons: $(VENV)/.base
	$(PIP) install -c constraints.txt -e '.[lessons]'
	@touch $@

$(VENV)/.course: $(VENV)/.lessons
	$(PIP) install -c constraints.txt -e '.[course]'
	@touch $@

$(VENV)/.serve: $(VENV)/.base
	$(PIP) install -c constraints.txt -e '.[serve]'
	@touch $@

# Order only: a newer environment is no reason to fetch again.
$(WEIGHTS): | $(VENV)/.base
	$(MINILLM) weights
