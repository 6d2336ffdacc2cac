"""One thread per process, so that test processes which share the cores do not slow each other down."""

import torch

torch.set_num_threads(1)
