"""What the trainers need, imported once by the process that they are forked from."""
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import accelerate
import pytorch_lightning
import torch.distributed.checkpoint
import torch.distributed.tensor
from transformers import GPTNeoXForCausalLM, Trainer

import trainers

trainers.torch.set_num_threads(1)
