"""Writes a Llama-shaped HF checkpoint of random bfloat16. usage: DIR NUM_BYTES NUM_FILES HIDDEN"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np

Shapes = dict[str, tuple[int, ...]]
BYTES_PER_ELEM = 2
PIECE_BYTES = 1 << 26
SIGN_AND_FRACTION = np.uint16(0x807F)
SMALLEST_EXPONENT = np.uint16(115)
"""Of bfloat16: magnitudes from 2⁻¹² to 2⁻⁴, as weights have them."""


def layer_shapes(number: int, hidden: int) -> Shapes:
    """One decoder layer: grouped-query attention, gated MLP, two norms."""
    narrow, wide = hidden // 4, hidden * 11 // 4
    parts: Shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (narrow, hidden),
        "self_attn.v_proj.weight": (narrow, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {f"model.layers.{number}.{name}": shape for name, shape in parts.items()}


def num_bytes(shapes: Shapes) -> int:
    """Bytes of all tensors in `shapes`."""
    return sum(math.prod(shape) for shape in shapes.values()) * BYTES_PER_ELEM


def model_shapes(total_bytes: int, hidden: int) -> Shapes:
    """As many layers between embedding and head as come nearest to `total_bytes`; at least one."""
    vocabulary = 16 * hidden
    ends = 2 * vocabulary * hidden * BYTES_PER_ELEM
    per_layer = num_bytes(layer_shapes(0, hidden))
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(max(1, round((total_bytes - ends) / per_layer))):
        shapes |= layer_shapes(number, hidden)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def config(shapes: Shapes, hidden: int) -> dict[str, object]:
    """The config.json that goes with `shapes`: heads of 16, a quarter as many for keys and values."""
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "vocab_size": 16 * hidden}
    sizes |= {"num_attention_heads": hidden // 16, "num_key_value_heads": hidden // 64}
    layers = sum(name.endswith("q_proj.weight") for name in shapes)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    return kind | sizes | {"num_hidden_layers": layers, "tie_word_embeddings": False}


def split(shapes: Shapes, num_files: int) -> list[Shapes]:
    """Cut into files of about equal size, in order."""
    files: list[Shapes] = [{}]
    seen, total = 0, num_bytes(shapes)
    for name, shape in shapes.items():
        if files[-1] and seen >= total * len(files) / num_files:
            files.append({})
        files[-1][name] = shape
        seen += num_bytes({name: shape})
    return files


def write_safetensors(path: Path, shapes: Shapes, random: np.random.Generator) -> None:
    """Write one file, in pieces."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + num_bytes({name: shape})
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, PIECE_BYTES):
            bits = np.frombuffer(random.bytes(min(PIECE_BYTES, offset - start)), "<u2")
            file.write(((bits & SIGN_AND_FRACTION) | ((bits >> 7 & 7) + SMALLEST_EXPONENT << 7)).astype("<u2"))
        file.flush()
        os.fsync(file.fileno())


def write_checkpoint(directory: Path, shapes: Shapes, num_files: int, seed: int) -> None:
    """Write the files and their index."""
    files = split(shapes, num_files)
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(directory / name, part, random)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": num_bytes(shapes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    print(f"{len(shapes)} tensors in {len(files)} files, {num_bytes(shapes) / 1e9:.3f} GB", file=sys.stderr)


def generate(directory: Path, total_bytes: int, num_files: int, hidden: int) -> None:
    """Write the checkpoint; says what it is."""
    shapes = model_shapes(total_bytes, hidden)
    write_checkpoint(directory, shapes, num_files, seed=0)
    (directory / "config.json").write_text(json.dumps(config(shapes, hidden), indent=2))


if __name__ == "__main__":
    generate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
