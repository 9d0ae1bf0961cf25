# diffcap: the stages of image difference captioning. `make help` lists the targets; docs/train.md explains the variables.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV := .venv/bin
INSTALL := $(VENV)/python -m pip install --quiet --disable-pip-version-check
STAGES := data extract negatives pretrain finetune reinforce zeroshot eval report

# Variables of an experiment: each one that is set becomes an option of the stages (DATASET=cub: --dataset cub). The stages
# know the defaults, the settings files and the paths of the checkpoints that they pass on: `.venv/bin/diffcap finetune --help`.
VARIABLES := DATASET METHOD VLM ABLATION DATA DEVICES SEED LOGGER TRAINER BACKBONE FEATURES FEATURES_FROM WEIGHTS OFFLINE TAGGER FOLDER \
	RUN PRETRAIN PRETRAINING CAPTIONER EVAL CONFIG PAIRS EXTRA CUB_DATA NABIRDS_DATA CUB_FEATURES_FROM \
	NABIRDS_FEATURES_FROM CUB_FOLDER NABIRDS_FOLDER CUB_RUN extract_ARGS cub_ARGS
SET := $(strip $(foreach name,$(VARIABLES),$(if $($(name)),$(name))))
OPTIONS = $(foreach name,$(SET),--$(name) '$(subst ','\'',$($(name)))')

# Options of the stages themselves. ARGS goes to the training stages among the goals, or, if there are none, to the first
# stage among them; data_ARGS, extract_ARGS, ..., report_ARGS always go to their stage.
ARGS ?=
TAKES_ARGS := $(or $(filter pretrain finetune reinforce,$(MAKECMDGOALS)),$(firstword $(filter $(STAGES),$(MAKECMDGOALS))))
unexport ARGS

# Targets of many experiments: data_ARGS renders or reads their shared data; their other options are ARGS.
MANY := $(filter demo ablation accuracy rehearsal,$(MAKECMDGOALS))
NO_ARGS := $(if $(MANY),$(filter-out extract $(if $(filter ablation accuracy,$(MANY)),data),$(STAGES)))
$(foreach stage,$(NO_ARGS),$(if $($(stage)_ARGS),$(error make $(MANY) has no $(stage)_ARGS; its own options are ARGS, see docs/train.md)))

# A misspelt variable on the command line stops make.
KNOWN := $(VARIABLES) PYTHON ARGS MINUTES SEEDS WORLD NAME CHROMIUM STEPS SCENES $(STAGES:%=%_ARGS)
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
$(foreach name,$(filter-out $(KNOWN),$(GIVEN)),$(error $(name)= is not a variable of this Makefile; known are $(sort $(KNOWN))))

.PHONY: help setup lock $(STAGES) extra ablation accuracy rehearsal serve demo test test-all docs test-web lint shipped

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# pip checks the hash of every file that it installs. It and setuptools come first, because one package is built from its source.
setup: .venv/ready  ## a virtual environment in .venv with the tested versions; every other target calls it
.venv/ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: diffcap needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv .venv
	sed -nE '/^(pip|setuptools)==/,/[^\\]$$/p' requirements.lock | $(INSTALL) -r /dev/stdin
	$(INSTALL) --no-build-isolation -r requirements.lock
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

lock: setup  ## write requirements.lock for pyproject.toml; ARGS=--upgrade or ARGS="--upgrade-package timm" takes newer versions
	$(VENV)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --group setup --extra dev \
		--extra docs --extra browser --extra tiff --custom-compile-command 'make lock' --output-file requirements.lock $(ARGS)

# The pipeline. A stage among the goals runs when its settings or its files have changed; one that another stage needs runs
# when its result is missing or older than its inputs. A stage that the method does not need does nothing.
data: | setup  ## manifest of a dataset: DATASET=clevr_change DATA=<folder of its files>; without DATA they are fetched
extract: data  ## features of every image: BACKBONE=resnet101_layer4 WEIGHTS=<file, if there is no network>; or FEATURES_FROM=<the authors' folder>
negatives: data  ## hard negative captions for pre-training: TAGGER=english, or a folder
pretrain: extract negatives  ## self-supervised tasks of the method: ARGS="--model.lr=1e-4 --data.batch_size=64" EXTRA=cub,nabirds or EXTRA=mixed
finetune: extract pretrain  ## the captioner, from the pre-training's checkpoint (PRETRAIN=no: from scratch)
reinforce: finetune  ## train it on by the CIDEr-D of its own captions: make reinforce eval
eval: $(if $(filter retrieval,$(EVAL)),pretrain,$(if $(filter reinforce,$(CAPTIONER) $(MAKECMDGOALS)),reinforce,finetune))  ## captions and scores of the test split, by group; CAPTIONER=reinforce: the reinforced ones; EVAL=retrieval
zeroshot: extract  ## a vision-language model without training on the test split: VLM=HuggingFaceTB/SmolVLM-500M-Instruct
report: eval  ## the run beside baselines that learn nothing: RUN/report/report.html, a table, pictures

$(STAGES):
	@$(VENV)/diffcap $@ $(OPTIONS) --goals '$(if $(MANY),$@,$(MAKECMDGOALS))' -- $($@_ARGS) $(if $(filter $@,$(TAKES_ARGS)),$(ARGS))

extra: | setup  ## manifests, features and negatives of EXTRA=cub,nabirds or mixed (CUB_DATA=, NABIRDS_DATA=), which pretrain calls for
	@$(VENV)/diffcap $@ $(OPTIONS)

# Many experiments.
demo: setup  ## the systems on an embedded dataset: every stage, one table, pictures (WORLD=tiles METHOD=scorer MINUTES=12 SEEDS=1234)
	$(VENV)/python stages/demo.py $(METHOD:%=--method %) $(WORLD:%=--world %) $(MINUTES:%=--minutes %) $(SEEDS:%=--seeds %) $(ARGS)

ablation: setup $(if $(data_ARGS),data)  ## a method beside its papers' ablations: METHOD=scorer DATASET=blocks SEEDS=1,2,3 ARGS="--steps=2000"
	$(VENV)/python stages/ablation.py $(OPTIONS) $(SEEDS:%=--seeds %) $(ARGS)

accuracy: setup $(if $(data_ARGS),data)  ## beams, averaged weights, ensemble, self-critical training beside greedy decoding: METHOD=scorer SEEDS=1,2,3
	$(VENV)/python stages/accuracy.py $(OPTIONS) $(SEEDS:%=--seeds %) $(ARGS)

rehearsal: setup  ## hours, disk and memory of a real run, from every stage on a dataset of official size: DATASET=clevr_change METHOD=pcl STEPS=300
	$(VENV)/python stages/rehearsal.py $(OPTIONS) $(STEPS:%=--steps %) $(SCENES:%=--scenes %) $(ARGS)

# The captioner of a METHOD that is named comes first; the others under runs, and the one that ships, can be chosen too.
serve: setup  ## a page to point the captioners at two pictures: http://127.0.0.1:7860, METHOD=scorer ARGS="--port=8000"
	$(VENV)/diffcap serve $(OPTIONS) $(ARGS)

# Development.
test: setup  ## the tests, about 8 minutes on two cores; the quick ones alone: .venv/bin/pytest -m "not slow"
	$(VENV)/pytest -q -n 2 -m "not thorough" $(ARGS)

test-all: setup  ## the tests that `make test` leaves out for their length, too
	$(VENV)/pytest -q -n 2 $(ARGS)

docs: setup  ## the documentation as a site in site/
	$(VENV)/mkdocs build --strict

test-web: setup  ## the page and the report in a real browser: Debian's chromium and chromium-driver, or CHROMIUM=/usr/bin/chromium
	$(VENV)/pytest -q -n 0 tests/web/test_browser.py tests/report/test_browser.py --chromium $(or $(CHROMIUM),chromium) $(ARGS)

lint: setup  ## ruff and mypy
	$(VENV)/ruff check . && $(VENV)/ruff format --check . && $(VENV)/mypy

# NAME: blocks_backbone, blocks_clip, tiles_backbone, tiles_clip, captioner (ARGS="--world=tiles") or tagger (ARGS="--conllu=FILE").
shipped: setup  ## train a part that ships for blocks and tiles: NAME=blocks_backbone
	$(VENV)/python stages/shipped.py $(NAME) $(ARGS)
