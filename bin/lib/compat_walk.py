"""One walk through every command that needs torch or transformers, on toy models, in the environment that runs it.

4-bit weights count where torch is too old for them if they are refused for that reason, with exit code 2.

Prints one JSON line: how many steps there were, and which failed with what.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ckpt_tools import floors

STEP_SECONDS = 600
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
# What every rank asks of stock torch: the very bytes of the model's file.
STOCK_LOAD = """\
import sys, warnings, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
warnings.simplefilter("ignore")
before = load_file(sys.argv[2])
after = {name: torch.full_like(tensor, 7) for name, tensor in before.items()}
dcp.load(after, checkpoint_id=sys.argv[1], no_dist=True)
sys.exit(not all(torch.equal(before[name], after[name]) for name in before))
"""
MAKE = """\
import json, peft, torch, transformers as t
text = json.loads(open("text.json").read())
torch.manual_seed(0)
t.LlamaForCausalLM(t.LlamaConfig(**text, num_key_value_heads=2)).save_pretrained("llama")
t.BertForMaskedLM(t.BertConfig(**text)).save_pretrained("bert")
t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**text, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4,
    num_experts_per_tok=2, head_dim=8)).save_pretrained("moe")
model = peft.get_peft_model(t.AutoModelForCausalLM.from_pretrained("llama"), peft.LoraConfig(r=4,
    target_modules=["q_proj", "down_proj"], init_lora_weights=False))
model.save_pretrained("adapter")
merged = model.merge_and_unload()
merged.save_pretrained("merged-by-peft")
"""


@dataclass(slots=True, kw_only=True)
class Walk:
    """What was tried, and what went wrong."""

    failures: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0

    def step(self, name: str, *command: str, expected: int = 0) -> None:
        """Run one command; anything but the expected exit code is a failure, and the walk goes on."""
        self.num_steps += 1
        try:
            done = subprocess.run(
                [sys.executable, *command], check=False, capture_output=True, text=True, timeout=STEP_SECONDS
            )
        except subprocess.TimeoutExpired:
            self.failures[name] = f"not done after {STEP_SECONDS} s"
            return
        if done.returncode != expected:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            self.failures[name] = f"exit {done.returncode}: " + " | ".join(said[-12:])

    def ckpt(self, *arguments: str, expected: int = 0) -> None:
        """Run one ckpt command."""
        self.step("ckpt " + " ".join(arguments), "-m", "ckpt_tools", *arguments, expected=expected)

    def check(self, name: str, is_right: bool) -> None:
        """Note a comparison."""
        self.num_steps += 1
        if not is_right:
            self.failures[name] = "differs"


def digest(directory: Path) -> dict[str, str]:
    """SHA-256 of the weights in a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")}


def walk(work: Path) -> Walk:
    """Walk in the empty directory `work`."""
    os.chdir(work)
    done = Walk()
    (work / "text.json").write_text(json.dumps(TEXT))
    (work / "accelerate.yaml").write_text(ACCELERATE)
    done.step("make the models", "-c", MAKE)
    done.ckpt("env")
    done.ckpt("shard", "llama", "tp", "--mesh", "dp_shard=2,tp=2", "--tp-plan", "auto")
    done.ckpt("inspect", "tp")
    done.ckpt("verify", "tp", "--against", "llama")
    done.step("stock dcp.load", "-c", STOCK_LOAD, "tp", "llama/model.safetensors")
    done.ckpt("shard", "llama", "dtensor", "--mesh", "dp_shard=2,tp=2", "--tp-plan", "auto", "--engine", "dtensor")
    done.ckpt("reshard", "dtensor", "hsdp", "--mesh", "dp_replicate=2,dp_shard=2")
    done.ckpt("diff", "dtensor", "hsdp")
    done.ckpt("gather", "hsdp", "back", "--assets", "llama")
    done.check("the same bytes back", digest(work / "back") == digest(work / "llama") != {})
    done.ckpt("smoke", "llama", "--mesh", "dp_shard=2", "--steps", "2")
    done.ckpt("smoke", "tp", "--model", "llama", "--mesh", "dp_shard=2,tp=2", "--steps", "2")
    done.ckpt("smoke", "bert", "--mesh", "dp_replicate=2,dp_shard=2", "--steps", "2")
    done.ckpt("smoke", "moe", "--steps", "2", "--param-dtype", "bf16")
    done.ckpt("smoke", "llama", "--strategy", "no_shard", "--steps", "2")
    done.ckpt("smoke", "llama", "--lora", "--steps", "2")
    has_nf4 = not floors.is_older(metadata.version("torch"), floors.NF4_TORCH)
    done.ckpt("smoke", "llama", "--lora", "--quantize", "nf4", "--steps", "2", expected=0 if has_nf4 else 2)
    done.ckpt("estimate", "moe", "--mesh", "dp_shard=2")
    done.ckpt("estimate", "llama", "--mesh", "dp_shard=2,tp=2", "--activation-checkpointing")
    done.ckpt("preflight", "accelerate.yaml", "--model", "llama", "--gpu-memory", "80GB")
    done.ckpt("check-lora", "adapter", "--base", "llama")
    done.ckpt("export-lora", "adapter", "exported", "--base", "llama")
    done.ckpt("merge-lora", "llama", "adapter", "merged")
    done.ckpt("verify", "merged")
    return done


def main() -> int:
    """Walk, and print what happened as one JSON line."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1"}
    home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ckpt-walk-") as work:
        done = walk(Path(work))
        os.chdir(home)
    print(json.dumps({"steps": done.num_steps, "failures": done.failures}))
    return 1 if done.failures else 0


if __name__ == "__main__":
    sys.exit(main())
