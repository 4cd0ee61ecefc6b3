"""torch's own converter to one .pt file. usage: DCP_DIR OUT_DIR"""

import sys
from pathlib import Path

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

source, destination = sys.argv[1:]
Path(destination).mkdir()
dcp_to_torch_save(source, Path(destination, "model.pt"))
