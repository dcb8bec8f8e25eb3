"""Imports what a process of ``hippo distill`` needs to train a tiny checkpoint."""

from hippo.lab.distill import training
from hippo.models.loading.resolve import import_transformers

MODEL = import_transformers().Qwen2_5_VLForConditionalGeneration
TRAIN = training.train
