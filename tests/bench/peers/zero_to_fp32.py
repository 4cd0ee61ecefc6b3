"""DeepSpeed's own script. usage: ZERO_DIR OUT_DIR"""

import sys

from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True)
