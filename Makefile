# diffcap: the stages of image difference captioning. `make help` lists the targets; docs/train.md explains the variables.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV := .venv/bin
DIFFCAP := $(VENV)/diffcap
INSTALL := $(VENV)/python -m pip install --quiet --disable-pip-version-check
STAGES := data extract negatives pretrain finetune reinforce zeroshot eval report

# Variables of an experiment: each one that is set becomes an option of the stages (DATASET=cub: --dataset cub). The stages
# know the defaults, the settings files and the paths of the checkpoints that they pass on: `.venv/bin/diffcap finetune --help`.
VARIABLES := DATASET METHOD VLM ABLATION DATA DEVICES SEED LOGGER TRAINER BACKBONE FEATURES FEATURES_FROM WEIGHTS OFFLINE TAGGER FOLDER \
	RUN PRETRAIN PRETRAINING CAPTIONER EVAL CONFIG PAIRS EXTRA extract_ARGS
SET := $(strip $(foreach name,$(VARIABLES),$(if $($(name)),$(name))))
OPTIONS = $(foreach name,$(SET),--$(name) '$(subst ','\'',$($(name)))')

# Options of the stages themselves. ARGS goes to the training stages among the goals, or, if there are none, to the first
# stage among them; data_ARGS, extract_ARGS, ..., report_ARGS always go to their stage.
ARGS ?=
TAKES_ARGS := $(or $(filter pretrain finetune reinforce,$(MAKECMDGOALS)),$(firstword $(filter $(STAGES),$(MAKECMDGOALS))))
unexport ARGS
args = $(if $(filter-out extract,$1),$($1_ARGS)) $(if $(filter $1,$(TAKES_ARGS)),$(ARGS))
has_args = $(strip $($1_ARGS)$(if $(filter $1,$(TAKES_ARGS)),$(ARGS)))

# Targets of many experiments: data_ARGS renders or reads their shared data; their other options are ARGS.
MANY := $(filter demo ablation accuracy,$(MAKECMDGOALS))
NO_ARGS := $(if $(MANY),$(filter-out extract $(if $(filter ablation accuracy,$(MANY)),data),$(STAGES)))
$(foreach stage,$(NO_ARGS),$(if $($(stage)_ARGS),$(error make $(MANY) has no $(stage)_ARGS; its own options are ARGS, see docs/train.md)))

KNOWN := $(VARIABLES) PYTHON ARGS MINUTES SEEDS WORLD NAME CHROMIUM $(STAGES:%=%_ARGS)
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
$(foreach name,$(filter-out $(KNOWN),$(GIVEN)),$(error $(name)= is not a variable of this Makefile; known are $(sort $(KNOWN))))

# Variables that none of the goals uses.
OF_MANY := $(if $(MANY)$(filter test-web shipped,$(MAKECMDGOALS)),,$(if $(filter $(STAGES),$(MAKECMDGOALS)),SEEDS WORLD MINUTES NAME CHROMIUM))
OF_ONE := $(if $(filter ablation accuracy,$(MANY)),SEED RUN CAPTIONER EVAL LOGGER $(if $(filter ablation,$(MANY)),PRETRAIN PRETRAINING))
OF_NONE := $(if $(filter $(STAGES) serve $(MANY),$(MAKECMDGOALS)),$(if $(filter demo,$(MANY)),$(filter-out METHOD,$(VARIABLES))),$(VARIABLES) SEEDS MINUTES $(STAGES:%=%_ARGS))
UNUSED := $(filter $(OF_MANY) $(if $(filter $(STAGES),$(MAKECMDGOALS)),,$(OF_ONE)) $(OF_NONE),$(GIVEN))
$(foreach name,$(UNUSED),$(error make $(MAKECMDGOALS) does not use $(name)=; omit it))

.PHONY: help setup lock $(STAGES) ablation accuracy serve demo test test-all docs test-web test-slurm lint shipped

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# pip checks the hash of every file that it installs. It and setuptools come first, because one package is built from its source.
setup: .venv/ready  ## a virtual environment in .venv with the tested versions; every other target calls it
.venv/ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: diffcap needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv .venv
	sed -nE '/^(pip|setuptools)==/,/[^\\]$$/p' requirements.lock | $(INSTALL) -r /dev/stdin
	$(INSTALL) --no-deps --no-build-isolation -r requirements.lock
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

lock: setup  ## write requirements.lock for pyproject.toml; ARGS=--upgrade or ARGS="--upgrade-package timm" takes newer versions
	$(VENV)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --group setup --group weights --extra dev \
		--extra docs --extra browser --extra tiff --custom-compile-command 'make lock' --output-file requirements.lock $(ARGS)

# The names that depend on the experiment: folder, store, negatives, ..., report, and in `lost` the records whose files have been deleted.
# If stages before one with options are missing, its options are checked before they run.
ifneq ($(filter $(STAGES),$(MAKECMDGOALS))$(data_ARGS),)
ifeq ($(findstring n,$(firstword -$(MAKEFLAGS))),)
include .venv/ready
endif
options_of_stages := $(foreach stage,$(STAGES),$(if $(call has_args,$(stage)),'$(stage) $(subst ','\'',$(call args,$(stage)))'))
folder := data
captioner := /finetune
$(foreach name,$(if $(wildcard .venv/ready),$(shell $(DIFFCAP) paths $(OPTIONS) --goals '$(MAKECMDGOALS)' -- $(options_of_stages) || echo failed=yes)),$(eval $(subst ;, ,$(subst |,\ ,$(name)))))
$(if $(failed),$(error see above))
endif
pretrained := $(if $(pretraining),$(pretraining)/finished.json)

# The pipeline: a result, and the results that it is made from. A stage is asked (FORCE) if it is a goal or has options of its own: then it
# runs if its settings or files have changed. Any other one runs if a result before it is newer, and files have changed (--needed).
variables = $(if $(filter data,$1),$(DATA)$(PAIRS))$(if $(filter extract,$1),$(WEIGHTS))$(if $(filter negatives,$1),$(TAGGER))
asked = $(if $(filter $1,$(MAKECMDGOALS))$($1_ARGS)$(variables),FORCE)
stage = @$(DIFFCAP) $1 $(if $(call asked,$(or $3,$1)),,--needed) $(OPTIONS) --goals '$(MAKECMDGOALS)' -- $2 $(call args,$(or $3,$1))

$(folder)/data.done.json: $(call asked,data) | .venv/ready
	$(call stage,data)
$(store)/extract.done.json: $(folder)/data.done.json $(call asked,extract)
	$(call stage,extract)
$(folder)/negatives.done.json: $(folder)/data.done.json $(call asked,negatives)
	$(call stage,negatives)
$(or $(first),none)/finished.json: $(folder)/data.done.json $(call asked,pretrain)
	$(call stage,pretrain-extra,,pretrain)
$(pretraining)/finished.json: $(store)/extract.done.json $(negatives) $(if $(first),$(first)/finished.json) $(call asked,pretrain)
	$(call stage,pretrain,$(if $(first),--init_from=$(first)/last.ckpt))
$(run)/finetune/finished.json: $(store)/extract.done.json $(pretrained) $(call asked,finetune)
	$(call stage,finetune,$(if $(start),--init_from=$(start)))
$(run)/reinforce/finished.json: $(run)/finetune/finished.json $(call asked,reinforce)
	$(call stage,reinforce,--init_from=$(run)/finetune/best.ckpt)
$(evaluation)/eval.done.json: $(captioner)/finished.json $(call asked,eval)
	$(call stage,eval)
$(zeroshot)/zeroshot.done.json: $(store)/extract.done.json $(call asked,zeroshot)
	$(call stage,zeroshot)
$(report)/report.done.json: $(evaluation)/eval.done.json $(call asked,report)
	$(call stage,report)
$(lost): FORCE
FORCE:

data: $(folder)/data.done.json  ## manifest of a dataset: DATASET=clevr_change DATA=<folder of its files>; without DATA they are fetched
extract: $(store)/extract.done.json  ## features of every image: BACKBONE=resnet101_layer4 WEIGHTS=<file, if there is no network>; or FEATURES_FROM=<the authors' folder>
negatives: $(folder)/negatives.done.json  ## hard negative captions for pre-training: TAGGER=english, or a folder
pretrain: $(pretrained)  ## self-supervised tasks of the method: ARGS="--model.lr=1e-4 --data.batch_size=64" EXTRA=cub,nabirds or EXTRA=mixed
	@$(if $(pretrained),:,$(DIFFCAP) pretrain $(OPTIONS))
finetune: $(run)/finetune/finished.json  ## the captioner, from the pre-training's checkpoint (PRETRAIN=no: from scratch)
reinforce: $(run)/reinforce/finished.json  ## train it on by the CIDEr-D of its own captions: make reinforce eval
eval: $(evaluation)/eval.done.json  ## captions and scores of the test split, by group; CAPTIONER=reinforce: the reinforced ones; EVAL=retrieval
zeroshot: $(zeroshot)/zeroshot.done.json  ## a vision-language model without training on the test split: VLM=HuggingFaceTB/SmolVLM-500M-Instruct
report: $(report)/report.done.json  ## the run beside baselines that learn nothing: RUN/report/report.html, a table, pictures

demo: setup  ## the systems on an embedded dataset: every stage, one table, pictures (WORLD=tiles METHOD=scorer MINUTES=12 SEEDS=1234)
	$(VENV)/python stages/demo.py $(METHOD:%=--method %) $(WORLD:%=--world %) $(MINUTES:%=--minutes %) $(SEEDS:%=--seeds %) $(ARGS)

ablation: setup $(if $(data_ARGS),data)  ## a method beside its papers' ablations: METHOD=scorer DATASET=blocks SEEDS=1,2,3 ARGS="--steps=2000"
	$(DIFFCAP) benchmark configs/benchmark/ablation.yaml $(OPTIONS) $(SEEDS:%=--seeds %) $(ARGS)

accuracy: setup $(if $(data_ARGS),data)  ## beams, averaged weights, ensemble, self-critical training beside greedy decoding: METHOD=scorer SEEDS=1,2,3
	$(VENV)/python stages/accuracy.py $(OPTIONS) $(SEEDS:%=--seeds %) $(ARGS)

serve: setup  ## a page to point the captioners at two pictures, that of METHOD=scorer first: http://127.0.0.1:7860, ARGS="--port=8000"
	$(VENV)/diffcap serve $(OPTIONS) $(ARGS)

# Development.
# Three processes for two cores: while one waits for a program that it has started, the others compute.
test: setup  ## the tests, about 7 minutes on two cores; the quick ones alone: .venv/bin/pytest -m "not slow"
	$(VENV)/pytest -q -n 3 -m "not thorough" $(ARGS)

test-all: setup  ## the tests that `make test` leaves out for their length, too
	$(VENV)/pytest -q -n 3 $(ARGS)

docs: setup  ## the documentation as a site in site/
	$(VENV)/mkdocs build --strict

test-web: setup  ## the page and the report in a real browser: Debian's chromium and chromium-driver, or CHROMIUM=/usr/bin/chromium
	$(VENV)/pytest -q -n 0 tests/web/test_browser.py tests/report/test_browser.py --chromium $(or $(CHROMIUM),chromium) $(ARGS)

test-slurm: setup  ## the stages on a SLURM cluster of two nodes that it starts on this machine: Debian, root, about 20 minutes
	tests/slurm/run

lint: setup  ## ruff and mypy
	$(VENV)/ruff check . && $(VENV)/ruff format --check . && $(VENV)/mypy

# NAME: blocks_backbone, blocks_clip, tiles_backbone, tiles_clip, captioner (ARGS="--world=tiles") or tagger (ARGS="--conllu=FILE").
shipped: setup  ## train a part that ships for blocks and tiles: NAME=blocks_backbone
	$(VENV)/python stages/shipped.py $(NAME) $(ARGS)
