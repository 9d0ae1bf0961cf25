# diffcap: every stage, chained by the files they write. `make help` lists the targets.
# Variables: DATASET METHOD ABLATION DATA DEVICES ARGS SEED LOGGER TRAINER BACKBONE FEATURES FEATURES_FROM WEIGHTS TAGGER RUN PRETRAIN EXTRA
.DEFAULT_GOAL := help
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
DATASET ?= blocks
METHOD ?= pcl
DEVICES ?= 1
SEED ?= 1234
$(if $(filter -%,$(SEED)),$(error SEED=$(SEED) is negative; give a whole number from 0 to 4294967295))
LOGGER ?= wandb
TRAINER ?= default
# A method without settings for it has no pre-training stage.
PRETRAINS := $(wildcard configs/method/$(METHOD)/pretrain.yaml)
ABLATION ?=
# Ablations whose point it is to go without.
PRETRAIN ?= $(if $(and $(PRETRAINS),$(if $(filter unadapted ft1 ft2 no_pretraining,$(ABLATION)),,yes)),yes,no)
# Its script, the checkpoint that it leaves, and whether it needs hard negatives.
PRETRAINER := $(if $(filter clip4idc,$(METHOD)),adapt,pretrain)
PRETRAINED := $(if $(filter clip4idc,$(METHOD)),best,last).ckpt
NEGATIVES := $(if $(filter clip4idc,$(METHOD)),,yes)
FOLDER ?= data/$(DATASET)
# Datasets that help IDC-PCL's pre-training, EXTRA=cub,nabirds: CUB in a stage before, NABirds beside the dataset itself;
# EXTRA=mixed: both beside it, in the one stage.
EXTRA ?=
comma := ,
EXTRAS := $(subst $(comma), ,$(EXTRA))
MIXED := $(filter mixed,$(EXTRAS))
BEFORE := $(filter cub,$(EXTRAS))
CUB := $(if $(filter cub mixed,$(EXTRAS)),cub)
NABIRDS := $(if $(filter nabirds mixed,$(EXTRAS)),nabirds)
CUB_DATA ?=
NABIRDS_DATA ?=
CUB_FEATURES_FROM ?=
NABIRDS_FEATURES_FROM ?=
# blocks has stand-ins of its own for both.
STAND_IN := $(if $(filter blocks,$(DATASET)),blocks_)
CUB_FOLDER ?= data/$(STAND_IN)cub
NABIRDS_FOLDER ?= data/$(STAND_IN)nabirds
# Every seed but the default one has a folder of its own, so that two seeds can train at the same time.
RUN ?= runs/$(DATASET)/$(METHOD)$(ABLATION:%=-%)$(if $(EXTRAS),$(if $(MIXED),-mixed,$(patsubst %,-%,$(CUB))$(patsubst %,-%,$(NABIRDS))))$(patsubst %,-seed%,$(filter-out 1234,$(SEED)))
# The stage on CUB may be shared by runs that differ in later stages only, and so may a whole pre-training.
CUB_RUN ?= $(RUN)/pretrain-cub
PRETRAINING ?= $(RUN)/pretrain

# Which features a method reads; the embedded dataset has a backbone of its own.
BACKBONE_pcl := resnet101_layer4
BACKBONE_scorer := resnet101_layer3
BACKBONE_dirl := resnet101_layer3
BACKBONE_clip4idc := pixels
BLOCKS_clip4idc := blocks_pixels
BACKBONE ?= $(if $(filter blocks%,$(DATASET)),$(or $(BLOCKS_$(METHOD)),blocks),$(BACKBONE_$(METHOD)))
# What the features are called: more than one of a backbone's weights need more than one name.
FEATURES ?= $(if $(FEATURES_FROM),authors,$(BACKBONE))
# Where the authors of a system have extracted them: a folder of their .npy files or pickles.
FEATURES_FROM ?=
TAGGER ?= $(if $(filter blocks%,$(DATASET)),blocks,english)

PY := .venv/bin/python
STORE := $(FOLDER)/features/$(FEATURES)
CUB_STORE := $(CUB_FOLDER)/features/$(FEATURES)
NABIRDS_STORE := $(NABIRDS_FOLDER)/features/$(FEATURES)
STAGES := data extract negatives pretrain finetune reinforce eval
TRAINING := pretrain finetune

# A path of the user's as one word for the shell, which leaves a quoted tilde alone.
homeless = $(subst @start@,,$(subst @start@~/,/,@start@$(1)))
quoted = $(if $(filter ~/%,$(firstword $(1))),"$$HOME")'$(subst ','\'',$(call homeless,$(1)))'

# A stage that is asked for by name is run again when its settings differ; one that is only needed runs when it is missing.
asked = $(if $(filter $(1),$(MAKECMDGOALS)),FORCE)
# ARGS goes to the training stages among the goals, or, without any, to the first stage that is asked for; data_ARGS,
# extract_ARGS, negatives_ARGS, pretrain_ARGS, finetune_ARGS, reinforce_ARGS, eval_ARGS and report_ARGS always go to theirs.
takers := $(or $(filter $(TRAINING) reinforce,$(MAKECMDGOALS)),$(firstword $(filter $(STAGES) report,$(MAKECMDGOALS))))
args = $($(1)_ARGS) $(if $(filter $(1),$(takers)),$(ARGS))
# The settings of a training stage: trainer, method, dataset, what the method changes there, its ablation, then the command
# line, which wins; $(3) are files of a stage of its own, $(4) those that also have the last word over the trainer.
configs = $(foreach file,$(wildcard configs/trainer/default.yaml configs/method/$(METHOD)/$(1).yaml \
	$(foreach name,$(DATASET) $(2),configs/dataset/$(name).yaml configs/method/$(METHOD)/$(1).$(name).yaml) \
	$(foreach kind,yaml $(1).yaml,$(ABLATION:%=configs/method/$(METHOD)/ablation/%.$(kind)))) $(3) \
	$(if $(filter-out default,$(TRAINER)),configs/trainer/$(TRAINER).yaml) $(4) \
	$(if $(filter-out 1,$(DEVICES)),configs/trainer/ddp.yaml),--config $(file))
train = $(call configs,$(1),$(2),$(5),$(6)) --data.folder $(or $(3),$(FOLDER)) --data.features $(FEATURES) --seed_everything $(SEED) \
	--data.seed $(SEED) --run.out $(or $(4),$(RUN)/$(1)) --run.logger $(LOGGER) --trainer.devices $(DEVICES) \
	$(if $(CUB),--data.vocabulary_with '[$(if $(3),$(FOLDER),$(CUB_FOLDER))]')

# What fine-tuning starts from; a captioner that was trained without it stays as it is until one of the two is asked for.
ALONE = $(if $(wildcard $(PRETRAINING)/finished.json),,$(wildcard $(RUN)/finetune/finished.json))
FROM = $(if $(filter yes,$(and $(PRETRAINS),$(PRETRAIN))),$(if $(filter $(TRAINING),$(MAKECMDGOALS)),yes,$(if $(ALONE),,yes)))

# Self-critical training has the settings of the fine-tuning, and its own on top.
reinforce = $(call train,finetune,,,$(RUN)/reinforce,$(wildcard configs/reinforce/base.yaml configs/reinforce/$(DATASET).yaml),$(wildcard \
	configs/reinforce/$(TRAINER).yaml))

# Whose captions `make eval` and `make report` take, and `make serve` offers: `make reinforce eval` those of the reinforced captioner, in a folder of its own.
CAPTIONER ?= $(if $(filter reinforce,$(MAKECMDGOALS)),reinforce,finetune)
$(if $(filter finetune reinforce,$(CAPTIONER)),,$(error CAPTIONER is $(CAPTIONER); give finetune or reinforce))
EVAL_finetune := $(RUN)/eval
EVAL_reinforce := $(RUN)/reinforce-eval
REPORT_finetune := $(RUN)/report
REPORT_reinforce := $(RUN)/reinforce-report
evaluate = $(PY) stages/evaluate.py --checkpoint $(RUN)/$(1)/best.ckpt --out $(EVAL_$(1)) --folder $(FOLDER) --devices $(DEVICES) \
	$(call args,eval)
scored = $(RUN)/$(1)/finished.json $(if $(filter $(1),$(CAPTIONER)),$(call asked,eval))

# A stage that found nothing to do leaves its file as it is: where that is older than what the stage reads, Make has to be
# told that it is up to date, and only there, or whatever comes after it would count as out of date.
touch = @$(if $(filter-out FORCE,$?),touch -c $@,:)

# The options of `make demo`, `make ablation` and `make accuracy` are not for the targets that those run; other variables reach them.
unexport ARGS

.PHONY: help setup demo test test-web lint data extra extract negatives pretrain finetune reinforce eval report ablation accuracy serve backbone clip captioner tagger FORCE

# A misspelt name stops here, not after an hour of other stages.
known = $(if $(wildcard configs/$(2)),,$(error $(1) is unknown; configs/$(dir $(2)) has: $(basename $(notdir $(wildcard configs/$(dir $(2))*)))))
ifneq ($(filter $(STAGES) extra report,$(MAKECMDGOALS)),)
$(call known,METHOD=$(METHOD),method/$(METHOD))
$(call known,BACKBONE=$(BACKBONE),backbone/$(BACKBONE).yaml)
$(call known,TRAINER=$(TRAINER),trainer/$(TRAINER).yaml)
$(if $(ABLATION),$(if $(wildcard configs/method/$(METHOD)/ablation/$(ABLATION).*),,$(call known,ABLATION=$(ABLATION),method/$(METHOD)/ablation/$(ABLATION).yaml)))
$(foreach name,$(filter-out cub nabirds mixed,$(EXTRAS)),$(error EXTRA=$(EXTRA) is unknown; give cub, nabirds, cub,nabirds, or mixed))
$(if $(MIXED),$(if $(word 2,$(EXTRAS)),$(error EXTRA=$(EXTRA): mixed has both in one stage, cub is a stage of its own; give one of the two)))
$(if $(EXTRAS),$(if $(filter pcl,$(METHOD)),,$(error EXTRA=$(EXTRA) is for METHOD=pcl, whose pre-training takes it)))
endif
# One kind of features for all datasets: the authors' for one are no use beside extracted ones for another.
lacking = $(if $(2),$(if $($(1)_FEATURES_FROM)$(wildcard $($(1)_STORE)/complete),,$(error FEATURES_FROM is for $(DATASET) only; give $(1)_FEATURES_FROM=<the authors' folder for $(2)>, too)))
ifneq ($(filter-out data extract negatives,$(filter $(STAGES) extra report,$(MAKECMDGOALS))),)
$(if $(FEATURES_FROM),$(call lacking,CUB,$(CUB))$(call lacking,NABIRDS,$(NABIRDS)))
endif
# Make parts its lists at blanks, so the names that it builds paths from cannot have any.
$(foreach name,DATASET METHOD BACKBONE FEATURES FOLDER RUN CUB_FOLDER NABIRDS_FOLDER CUB_RUN PRETRAINING,$(if $(word 2,$($(name))),$(error $(name)=$($(name)) has a blank in it; make cannot build paths from that, choose another name)))

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

test-web: setup  ## the page and the report in a real browser: Debian's chromium and chromium-driver, or CHROMIUM=/usr/bin/chromium
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	.venv/bin/pytest -q -n 0 tests/web/test_browser.py tests/report/test_browser.py --chromium $(or $(CHROMIUM),chromium) $(ARGS)

lint: setup  ## ruff and mypy
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

data: $(FOLDER)/manifest.jsonl  ## manifest of a dataset: DATASET=clevr_change DATA=<folder of its files>; without DATA they are fetched
$(FOLDER)/manifest.jsonl: $(call asked,data) $(if $(DATA),FORCE) | setup
	$(PY) stages/data.py --dataset $(DATASET) --out $(FOLDER) $(if $(DATA),--source $(call quoted,$(DATA))) \
		$(if $(filter blocks%,$(DATASET)),--seed $(SEED)) $(if $(PAIRS),--pairs $(PAIRS)) $(if $(filter blocks_%,$(DATASET)),$(IMAGES:%=--images %)) \
		$(call args,data)

extract: $(STORE)/complete  ## features of every image: BACKBONE=resnet101_layer4 WEIGHTS=<file, if there is no network>; or FEATURES_FROM=<the authors' folder>
$(STORE)/complete: $(FOLDER)/manifest.jsonl $(call asked,extract) $(if $(filter clip4idc,$(BACKBONE)),$(wildcard $(WEIGHTS))) | setup
ifneq ($(FEATURES_FROM),)
	$(PY) stages/import_features.py --folder $(FOLDER) --source $(call quoted,$(FEATURES_FROM)) --name $(FEATURES) $(call args,extract)
else
	$(PY) stages/extract.py --config configs/backbone/$(BACKBONE).yaml --data.folder $(FOLDER) \
		$(if $(filter-out $(BACKBONE),$(FEATURES)),--model.name $(FEATURES)) \
		$(if $(WEIGHTS),--model.weights $(call quoted,$(WEIGHTS))) --trainer.devices $(DEVICES) \
		$(if $(filter-out 1,$(DEVICES)),--trainer.strategy ddp) $(call args,extract)
endif
	$(touch)

negatives: $(FOLDER)/negatives.jsonl  ## hard negative captions for pre-training: TAGGER=english, or a folder
$(FOLDER)/negatives.jsonl: $(FOLDER)/manifest.jsonl $(call asked,negatives) | setup
	$(PY) stages/negatives.py --folder $(FOLDER) --tagger $(call quoted,$(TAGGER)) --seed $(SEED) $(call args,negatives)
	$(touch)

pretrain: $(if $(and $(PRETRAINS),$(filter yes,$(PRETRAIN))),$(RUN)/pretrain/finished.json,nothing-to-pretrain)  ## self-supervised tasks of the method: ARGS="--model.lr=1e-4 --data.batch_size=64" EXTRA=cub,nabirds or EXTRA=mixed
$(RUN)/pretrain/finished.json: $(STORE)/complete $(if $(NEGATIVES),$(FOLDER)/negatives.jsonl) $(call asked,pretrain) \
		$(if $(BEFORE),$(CUB_RUN)/finished.json) $(if $(MIXED),$(CUB_STORE)/complete $(CUB_FOLDER)/negatives.jsonl) \
		$(if $(NABIRDS),$(NABIRDS_STORE)/complete) | setup
	$(PY) stages/$(PRETRAINER).py $(call train,pretrain,$(patsubst %,$(STAND_IN)%,$(or $(MIXED),$(NABIRDS)))) \
		$(if $(MIXED),--data.singles $(CUB_FOLDER)) $(if $(NABIRDS),--data.labelled $(NABIRDS_FOLDER)) \
		$(if $(BEFORE),--model.init_from $(CUB_RUN)/last.ckpt) $(call args,pretrain)
	$(touch)

extra: $(if $(CUB),$(CUB_STORE)/complete $(CUB_FOLDER)/negatives.jsonl) $(if $(NABIRDS),$(NABIRDS_STORE)/complete)  ## manifests, features and negatives of EXTRA=cub,nabirds or mixed (CUB_DATA=, NABIRDS_DATA=), which the targets below call for

# IDC-PCL's first stage, on CUB alone; cub_ARGS are for it only.
$(CUB_RUN)/finished.json: $(CUB_STORE)/complete $(CUB_FOLDER)/negatives.jsonl $(FOLDER)/manifest.jsonl $(call asked,pretrain) | setup
	$(PY) stages/pretrain.py $(call train,pretrain,$(STAND_IN)cub,$(CUB_FOLDER),$(CUB_RUN)) $(call args,pretrain) $(cub_ARGS)
	$(touch)

# What the extra datasets lack is made by the targets of their own; CUB_DATA=, NABIRDS_DATA= say where their files are, and
# CUB_FEATURES_FROM=, NABIRDS_FEATURES_FROM= where the authors' features. The arguments of the dataset's own stages are not for
# them, but those of an extraction are: all features have to be of one kind.
lend = +$(MAKE) --no-print-directory $@ DATASET=$(STAND_IN)$(1) FOLDER=$(2) DATA=$(call quoted,$(3)) BACKBONE=$(BACKBONE) \
	FEATURES=$(FEATURES) FEATURES_FROM=$(call quoted,$(4)) TAGGER=$(call quoted,$(TAGGER)) EXTRA= ABLATION= ARGS= PAIRS= \
	data_ARGS= negatives_ARGS= $(if $(FEATURES_FROM)$(4),extract_ARGS=)
ifneq ($(CUB),)
$(CUB_STORE)/complete: $(CUB_FOLDER)/manifest.jsonl
	$(call lend,cub,$(CUB_FOLDER),,$(CUB_FEATURES_FROM))
$(CUB_FOLDER)/negatives.jsonl: $(CUB_FOLDER)/manifest.jsonl
	$(call lend,cub,$(CUB_FOLDER),)
$(CUB_FOLDER)/manifest.jsonl: $(if $(CUB_DATA),FORCE)
	$(call lend,cub,$(CUB_FOLDER),$(CUB_DATA))
endif
ifneq ($(NABIRDS),)
$(NABIRDS_STORE)/complete: $(NABIRDS_FOLDER)/manifest.jsonl
	$(call lend,nabirds,$(NABIRDS_FOLDER),,$(NABIRDS_FEATURES_FROM))
$(NABIRDS_FOLDER)/manifest.jsonl: $(if $(NABIRDS_DATA),FORCE)
	$(call lend,nabirds,$(NABIRDS_FOLDER),$(NABIRDS_DATA))
endif

.PHONY: nothing-to-pretrain
nothing-to-pretrain:
	@echo "$(METHOD)$(ABLATION:%=, %,) has no pre-training stage$(if $(PRETRAINS), with PRETRAIN=$(PRETRAIN)); go on with: make finetune METHOD=$(METHOD) DATASET=$(DATASET)"

finetune: $(RUN)/finetune/finished.json  ## the captioner, from the pre-training's checkpoint (PRETRAIN=no: from scratch)
$(RUN)/finetune/finished.json: $(STORE)/complete $(call asked,finetune) \
		$(if $(FROM),$(PRETRAINING)/finished.json) | setup
	$(PY) stages/finetune.py $(call train,finetune) \
		$(if $(FROM),--model.init_from $(PRETRAINING)/$(PRETRAINED)) $(call args,finetune)
	$(touch)

reinforce: $(RUN)/reinforce/finished.json  ## train it on by the CIDEr-D of its own captions: make reinforce eval
$(RUN)/reinforce/finished.json: $(RUN)/finetune/finished.json $(call asked,reinforce) | setup
	$(PY) stages/reinforce.py $(reinforce) --model.init_from $(RUN)/finetune/best.ckpt $(call args,reinforce)
	$(touch)

eval: $(EVAL_$(CAPTIONER))/metrics.json  ## captions and scores of the test split, by group; CAPTIONER=reinforce: the reinforced ones
$(EVAL_finetune)/metrics.json: $(call scored,finetune) | setup
	$(call evaluate,finetune)
$(EVAL_reinforce)/metrics.json: $(call scored,reinforce) | setup
	$(call evaluate,reinforce)

report: $(EVAL_$(CAPTIONER))/metrics.json  ## the run beside baselines that learn nothing: RUN/report/report.html, a table, pictures
	$(PY) stages/report.py --folder $(FOLDER) --features $(FEATURES) --runs '{"$(METHOD)": "$(EVAL_$(CAPTIONER))"}' --out $(REPORT_$(CAPTIONER)) \
		$(call args,report)

ablation: setup  ## a method beside its papers' ablations: METHOD=scorer DATASET=blocks SEEDS=1,2,3 ARGS="--steps=2000"
	$(PY) stages/ablation.py --method $(METHOD) --dataset $(DATASET) --folder $(FOLDER) --features $(FEATURES) \
		--backbone $(BACKBONE) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

accuracy: setup  ## beams, averaged weights, ensemble, self-critical training beside greedy decoding: METHOD=scorer SEEDS=1,2,3
	$(PY) stages/accuracy.py --method $(METHOD) --dataset $(DATASET) --folder $(FOLDER) --features $(FEATURES) \
		--backbone $(BACKBONE) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

# A method that is named is offered first; what else stands under runs, and the captioner that ships, can be chosen, too.
serve: setup  ## a page to point the captioners at two pictures: http://127.0.0.1:7860, METHOD=scorer ARGS="--port=8000"
	.venv/bin/diffcap serve $(if $(filter-out file,$(origin METHOD)),--checkpoint $(RUN)/$(CAPTIONER)/best.ckpt) $(ARGS)

backbone: setup  ## train the small backbone that ships for blocks
	$(PY) stages/backbone.py $(ARGS)

clip: setup  ## train the small CLIP that ships for blocks
	$(PY) stages/clip.py $(ARGS)

captioner: setup  ## train the captioner that ships for blocks, by the demo's stages
	$(PY) stages/captioner.py $(ARGS)

tagger: setup  ## train a part-of-speech tagger: from blocks' own grammar, or ARGS="--conllu=FILE"
	$(PY) stages/tagger.py $(ARGS)

FORCE:
