"""A script for torchrun: trains the config of a JSON file; before the first restart a rank may be killed in a step."""

import json
import os
import sys
from pathlib import Path

from train_cases import train_killed

from zeropipe.train import start
from zeropipe.train.config.tables import RunConfig

if len(sys.argv) > 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    start.train = lambda config: train_killed(config, 1, int(sys.argv[2]), "step")
start.start(RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text())))
