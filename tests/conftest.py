"""Settings of every test process; they must be made before torch is imported."""

import os

# Two torch processes whose OpenMP threads spin slow each other tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests never ask a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
