# diffcap: every stage, chained by the files they write. `make help` lists the targets.
# Variables: DATASET METHOD ABLATION DATA DEVICES ARGS SEED LOGGER TRAINER BACKBONE FEATURES WEIGHTS TAGGER RUN PRETRAIN
.DEFAULT_GOAL := help
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
DATASET ?= blocks
METHOD ?= pcl
DEVICES ?= 1
SEED ?= 1234
LOGGER ?= wandb
TRAINER ?= default
# A method without settings for it has no pre-training stage.
PRETRAINS := $(wildcard configs/method/$(METHOD)/pretrain.yaml)
ABLATION ?=
# Ablations whose point it is to go without.
PRETRAIN ?= $(if $(and $(PRETRAINS),$(if $(filter unadapted ft1 ft2,$(ABLATION)),,yes)),yes,no)
# Its script, the checkpoint that it leaves, and whether it needs hard negatives.
PRETRAINER := $(if $(filter clip4idc,$(METHOD)),adapt,pretrain)
PRETRAINED := $(if $(filter clip4idc,$(METHOD)),best,last).ckpt
NEGATIVES := $(if $(filter clip4idc,$(METHOD)),,yes)
FOLDER ?= data/$(DATASET)
RUN ?= runs/$(DATASET)/$(METHOD)$(ABLATION:%=-%)

# Which features a method reads; the embedded dataset has a backbone of its own.
BACKBONE_pcl := resnet101_layer4
BACKBONE_scorer := resnet101_layer3
BACKBONE_dirl := resnet101_layer3
BACKBONE_clip4idc := pixels
BLOCKS_clip4idc := blocks_pixels
BACKBONE ?= $(if $(filter blocks,$(DATASET)),$(or $(BLOCKS_$(METHOD)),blocks),$(BACKBONE_$(METHOD)))
# What the features are called: more than one of a backbone's weights need more than one name.
FEATURES ?= $(BACKBONE)
TAGGER ?= $(if $(filter blocks,$(DATASET)),blocks,english)

PY := .venv/bin/python
STORE := $(FOLDER)/features/$(FEATURES)
STAGES := data extract negatives pretrain finetune eval
TRAINING := pretrain finetune

# A path of the user's as one word for the shell, which leaves a quoted tilde alone.
homeless = $(subst @start@,,$(subst @start@~/,/,@start@$(1)))
quoted = $(if $(filter ~/%,$(firstword $(1))),"$$HOME")'$(subst ','\'',$(call homeless,$(1)))'

# A stage that is asked for by name is run again when its settings differ; one that is only needed runs when it is missing.
asked = $(if $(filter $(1),$(MAKECMDGOALS)),FORCE)
# ARGS goes to the training stages among the goals, or, without any, to the first stage that is asked for; data_ARGS,
# extract_ARGS, negatives_ARGS, pretrain_ARGS, finetune_ARGS, eval_ARGS and report_ARGS always go to theirs.
takers := $(or $(filter $(TRAINING),$(MAKECMDGOALS)),$(firstword $(filter $(STAGES) report,$(MAKECMDGOALS))))
args = $($(1)_ARGS) $(if $(filter $(1),$(takers)),$(ARGS))
# The settings of a training stage: trainer, method, dataset, what the method changes there, its ablation, then the command
# line, which wins.
configs = $(foreach file,$(wildcard configs/trainer/default.yaml configs/method/$(METHOD)/$(1).yaml \
	configs/dataset/$(DATASET).yaml configs/method/$(METHOD)/$(1).$(DATASET).yaml) \
	$(ABLATION:%=configs/method/$(METHOD)/ablation/%.yaml) $(if $(filter-out default,$(TRAINER)),configs/trainer/$(TRAINER).yaml) \
	$(if $(filter-out 1,$(DEVICES)),configs/trainer/ddp.yaml),--config $(file))
train = $(call configs,$(1)) --data.folder $(FOLDER) --data.features $(FEATURES) --seed_everything $(SEED) --data.seed $(SEED) \
	--run.out $(RUN)/$(1) --run.logger $(LOGGER) --trainer.devices $(DEVICES)

# What fine-tuning starts from; a captioner that was trained without it stays as it is until one of the two is asked for.
ALONE = $(if $(wildcard $(RUN)/pretrain/finished.json),,$(wildcard $(RUN)/finetune/finished.json))
FROM = $(if $(filter yes,$(and $(PRETRAINS),$(PRETRAIN))),$(if $(filter $(TRAINING),$(MAKECMDGOALS)),yes,$(if $(ALONE),,yes)))

# A stage that found nothing to do leaves its file as it is: where that is older than what the stage reads, Make has to be
# told that it is up to date, and only there, or whatever comes after it would count as out of date.
touch = @$(if $(filter-out FORCE,$?),touch -c $@,:)

# The options of `make demo` and `make ablation` are not for the targets that those run; other variables reach them.
unexport ARGS

.PHONY: help setup demo test lint data extract negatives pretrain finetune eval report ablation backbone clip tagger FORCE

# A misspelt name stops here, not after an hour of other stages.
known = $(if $(wildcard configs/$(2)),,$(error $(1) is unknown; configs/$(dir $(2)) has: $(basename $(notdir $(wildcard configs/$(dir $(2))*)))))
ifneq ($(filter $(STAGES) report,$(MAKECMDGOALS)),)
$(call known,METHOD=$(METHOD),method/$(METHOD))
$(call known,BACKBONE=$(BACKBONE),backbone/$(BACKBONE).yaml)
$(call known,TRAINER=$(TRAINER),trainer/$(TRAINER).yaml)
$(if $(ABLATION),$(call known,ABLATION=$(ABLATION),method/$(METHOD)/ablation/$(ABLATION).yaml))
endif
# Make parts its lists at blanks, so the names that it builds paths from cannot have any.
$(foreach name,DATASET METHOD BACKBONE FEATURES FOLDER RUN,$(if $(word 2,$($(name))),$(error $(name)=$($(name)) has a blank in it; make cannot build paths from that, choose another name)))

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: .venv/ready  ## a virtual environment in .venv with the tested versions; every other target calls it
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: diffcap needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## the systems on the embedded dataset: every stage, one table, pictures (METHOD=scorer MINUTES=12 SEEDS=1234)
	$(PY) stages/demo.py $(if $(filter-out file,$(origin METHOD)),--method $(METHOD)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

test: setup  ## the tests
	.venv/bin/pytest -q -n 2 $(ARGS)

lint: setup  ## ruff and mypy
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

data: $(FOLDER)/manifest.jsonl  ## manifest of a dataset: DATASET=clevr_change DATA=<folder of its files>
$(FOLDER)/manifest.jsonl: $(call asked,data) $(if $(DATA),FORCE) | setup
	$(PY) stages/data.py --dataset $(DATASET) --out $(FOLDER) $(if $(DATA),--source $(call quoted,$(DATA))) \
		$(if $(filter blocks,$(DATASET)),--seed $(SEED)) $(if $(PAIRS),--pairs $(PAIRS)) $(call args,data)

extract: $(STORE)/complete  ## features of every image: BACKBONE=resnet101_layer4 WEIGHTS=<file, if there is no network>
$(STORE)/complete: $(FOLDER)/manifest.jsonl $(call asked,extract) $(if $(filter clip4idc,$(BACKBONE)),$(wildcard $(WEIGHTS))) | setup
	$(PY) stages/extract.py --config configs/backbone/$(BACKBONE).yaml --data.folder $(FOLDER) \
		$(if $(filter-out $(BACKBONE),$(FEATURES)),--model.name $(FEATURES)) \
		$(if $(WEIGHTS),--model.weights $(call quoted,$(WEIGHTS))) --trainer.devices $(DEVICES) \
		$(if $(filter-out 1,$(DEVICES)),--trainer.strategy ddp) $(call args,extract)
	$(touch)

negatives: $(FOLDER)/negatives.jsonl  ## hard negative captions for pre-training: TAGGER=english, or a folder
$(FOLDER)/negatives.jsonl: $(FOLDER)/manifest.jsonl $(call asked,negatives) | setup
	$(PY) stages/negatives.py --folder $(FOLDER) --tagger $(call quoted,$(TAGGER)) --seed $(SEED) $(call args,negatives)
	$(touch)

pretrain: $(if $(and $(PRETRAINS),$(filter yes,$(PRETRAIN))),$(RUN)/pretrain/finished.json,nothing-to-pretrain)  ## self-supervised tasks of the method: ARGS="--model.lr=1e-4 --data.batch_size=64"
$(RUN)/pretrain/finished.json: $(STORE)/complete $(if $(NEGATIVES),$(FOLDER)/negatives.jsonl) $(call asked,pretrain) | setup
	$(PY) stages/$(PRETRAINER).py $(call train,pretrain) $(call args,pretrain)
	$(touch)

.PHONY: nothing-to-pretrain
nothing-to-pretrain:
	@echo "$(METHOD)$(ABLATION:%=, %,) has no pre-training stage$(if $(PRETRAINS), with PRETRAIN=$(PRETRAIN)); go on with: make finetune METHOD=$(METHOD) DATASET=$(DATASET)"

finetune: $(RUN)/finetune/finished.json  ## the captioner, from the pre-training's checkpoint (PRETRAIN=no: from scratch)
$(RUN)/finetune/finished.json: $(STORE)/complete $(call asked,finetune) \
		$(if $(FROM),$(RUN)/pretrain/finished.json) | setup
	$(PY) stages/finetune.py $(call train,finetune) \
		$(if $(FROM),--model.init_from $(RUN)/pretrain/$(PRETRAINED)) $(call args,finetune)
	$(touch)

eval: $(RUN)/eval/metrics.json  ## captions and scores of the test split, by group
$(RUN)/eval/metrics.json: $(RUN)/finetune/finished.json $(call asked,eval) | setup
	$(PY) stages/evaluate.py --checkpoint $(RUN)/finetune/best.ckpt --out $(RUN)/eval --folder $(FOLDER) \
		--devices $(DEVICES) $(call args,eval)

report: $(RUN)/eval/metrics.json  ## the run beside baselines that learn nothing: RUN/report/report.html, a table, pictures
	$(PY) stages/report.py --folder $(FOLDER) --features $(FEATURES) --runs '{"$(METHOD)": "$(RUN)"}' --out $(RUN)/report \
		$(call args,report)

ablation: setup  ## a method beside its papers' ablations: METHOD=scorer DATASET=blocks SEEDS=1,2,3 ARGS="--steps=2000"
	$(PY) stages/ablation.py --method $(METHOD) --dataset $(DATASET) --folder $(FOLDER) --features $(FEATURES) \
		--backbone $(BACKBONE) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

backbone: setup  ## train the small backbone that ships for blocks
	$(PY) stages/backbone.py $(ARGS)

clip: setup  ## train the small CLIP that ships for blocks
	$(PY) stages/clip.py $(ARGS)

tagger: setup  ## train a part-of-speech tagger: from blocks' own grammar, or ARGS="--conllu=FILE"
	$(PY) stages/tagger.py $(ARGS)

FORCE:
