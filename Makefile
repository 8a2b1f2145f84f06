# Model to Silicon. `make lab` to learn, `make test` to check; the rest is for
# those who change the course. Settings, each optional:
#   PYTHON=python3.12    the Python 3.11 to 3.13 that .venv is made with,
#                        python3.11 first if it is not said
#   TORCH_INDEX=URL      an index of CPU builds of torch (saves gigabytes)
#   PORT=8888            where JupyterLab listens
#   ARGS="..."           handed on to the tool behind the target

ANY_PYTHON := $(firstword $(foreach name, \
	python3 python3.11 python3.12 python3.13 python, \
	$(shell command -v $(name) 2>/dev/null)) $(PYTHON))
RUN := .venv/bin/python

export PYTHON TORCH_INDEX PORT

.PHONY: help setup lab test run notebooks record figures bench pages stamp colab \
	colab-check lint

help:
	@echo "make lab        install into .venv, open JupyterLab"
	@echo "make test       install into .venv, run every test"
	@echo "make run        execute all notebooks, write HTML into site/"
	@echo "make notebooks  execute all notebooks, store their outputs"
	@echo "make record     record what the notebooks compile for absent chips"
	@echo "make figures    draw figures/ again"
	@echo "make bench      time counter and ladder beside yardsticks"
	@echo "make pages      write docs/claims.md from tests/data/claims.toml"
	@echo "make stamp      write setup cell and Colab badge into the notebooks"
	@echo "make colab      write site/colab/: notebooks that run on their own"
	@echo "make colab-check  run those with Colab's versions (minutes)"
	@echo "make lint       ruff"

setup:
	@test -n "$(ANY_PYTHON)" || { echo "No Python is installed:\
	 the course needs Python 3.11 to 3.13." >&2; exit 1; }
	@"$(ANY_PYTHON)" tools/install.py

lab: setup
	@$(RUN) -m tools.lab $(ARGS)

test: setup
	@$(RUN) -m tools.test $(ARGS)

run: setup
	@$(RUN) -m tools.execute run $(ARGS)

notebooks: setup
	@$(RUN) -m tools.execute store $(ARGS)

record: setup
	@$(RUN) -m tools.record $(ARGS)

figures: setup
	@$(RUN) -m tools.figures $(ARGS)

bench: setup
	@$(RUN) -m tools.bench

pages: setup
	@$(RUN) -m tools.pages

stamp: setup
	@$(RUN) -m tools.stamp

colab: setup
	@$(RUN) -m tools.colab $(ARGS)

colab-check: setup
	@$(RUN) -m tools.colab_check $(ARGS)

lint: setup
	@$(RUN) -m ruff check $(ARGS)
