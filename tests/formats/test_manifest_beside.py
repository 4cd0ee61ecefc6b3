"""A single file beside the manifest that ckpt wrote with it: what that records is held for the file, too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools.cli import main


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_one_file_is_held_to_the_manifest_beside_it(tmp_path: Path, to: str) -> None:
    (tmp_path / "a").mkdir()
    save_file({"w": torch.arange(64.0), "b": torch.zeros(3)}, tmp_path / "a" / "model.safetensors")
    assert main(["gather", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to, "-q"]) == 0
    (file,) = (path for path in (tmp_path / "b").iterdir() if "model" in path.name and path.suffix != ".json")
    assert main(["verify", str(file), "-q"]) == 0
    content = file.read_bytes()
    at = content.index(torch.arange(64.0).numpy().tobytes())
    file.write_bytes(content[: at + 9] + bytes([content[at + 9] ^ 1]) + content[at + 10 :])
    assert main(["verify", str(file), "-q"]) == 3
    assert main(["gather", str(file), str(tmp_path / "c"), "--dtype", "bf16", "-q"]) == 4
