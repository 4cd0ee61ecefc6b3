"""Seven trainers' configs, read into one `ParallelSpec`. Importing this package imports pydantic, and no trainer."""

from ckpt_tools.preflight.configs.config import Config, Options
from ckpt_tools.preflight.configs.read import NotReadError, read_config

__all__ = ["Config", "NotReadError", "Options", "read_config"]
