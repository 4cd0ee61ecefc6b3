"""accelerate's merge into one safetensors file. usage: DCP_DIR OUT_DIR"""

import sys

from accelerate.utils import merge_fsdp_weights

merge_fsdp_weights(sys.argv[1], sys.argv[2])
