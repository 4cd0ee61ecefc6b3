"""The pictures of the documentation: reports of real commands on a toy model, as Chromium shows them.

python bin/lib/pictures.py               docs/pictures/*.png, at most 150 kB each
python bin/lib/pictures.py --look DIR    every report whole: 1400 and 400 pixels wide, light and dark
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
MAX_BYTES = 150_000
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA_8B = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 128256,
"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}"""
ACCELERATE = """distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
REPORTS = {
    "inspect": "inspect tiny-llama --mesh dp_shard=8,tp=2 --tp-plan auto",
    "verify": "verify damaged",
    "diff": "diff tiny-llama trained",
    "stats": "stats trained --against tiny-llama",
    "estimate": "estimate llama-8b --mesh dp_shard=8 --seq-len 4096 --strategy all --gpu-memory 80GB",
    "smoke": "smoke tiny-llama --mesh dp_shard=2,tp=2 --steps 4",
    "preflight": "preflight accelerate.yaml sft.yaml --model tiny-llama --gpu-memory 80GB",
}
"""Report → its command."""
SHOWN = {"inspect": 1000, "verify": 900, "estimate": 865, "preflight": 1000}
"""Report in the documentation → height of its picture, in pixels."""


def make_inputs() -> None:
    """Put a model, a run of it, a damaged copy and a trained one into the working directory."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=8, vocab_size=4096, **SIZES)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained("tiny-llama")
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if "norm" not in name:
                weight.add_(torch.randn_like(weight), alpha=1e-4 * (1 + number % 9))
    model.save_pretrained("trained")
    Path("llama-8b").mkdir()
    Path("llama-8b/config.json").write_text(LLAMA_8B)
    Path("accelerate.yaml").write_text(ACCELERATE)
    Path("sft.yaml").write_text("per_device_train_batch_size: 2\nmax_length: 1024\nbf16: true\noutput_dir: run\n")
    run_ckpt("shard tiny-llama damaged --mesh dp_replicate=1,dp_shard=8,tp=4 --tp-plan auto")
    for rank, offset in ((5, 40_000), (5, 90_000), (22, 60_000), (23, 200_000), (13, 300_000)):
        with open(f"damaged/__{rank}_0.distcp", "r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def run_ckpt(command: str) -> None:
    """Run a command; a finding is no failure here."""
    from ckpt_tools.cli import main

    with contextlib.redirect_stdout(io.StringIO()):
        status = main([*command.split(), "--quiet"])
    if status not in (0, 3):
        sys.exit(f"ckpt {command}: exit {status}")


@contextlib.contextmanager
def chromium(directory: str) -> Iterator[object]:
    """Start the system's browser."""
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        sys.exit("apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", f"user-data-dir={directory}/profile"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


def picture(browser, page: Path, *, width: int, scheme: str = "light", height: int | None = None) -> bytes:
    """Return a page as PNG, whole or the first `height` pixels of it."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    whole = browser.execute_script("return document.documentElement.scrollHeight")
    # What is not in sight is not drawn.
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics | {"height": whole})
    clip = {"x": 0, "y": 0, "width": width, "height": min(height or whole, whole), "scale": 1}
    asked = {"captureBeyondViewport": True, "clip": clip}
    content = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
    small = io.BytesIO()
    Image.open(io.BytesIO(content)).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", metavar="DIR", type=Path)
    parser.add_argument("reports", nargs="*", choices=[*REPORTS, []], help="these alone")
    given = parser.parse_args()
    target = (given.look or PICTURES).resolve()
    target.mkdir(parents=True, exist_ok=True)
    chosen = given.reports or list(REPORTS if given.look else SHOWN)
    with tempfile.TemporaryDirectory(prefix="ckpt-pictures-") as directory:
        os.chdir(directory)
        make_inputs()
        for name in chosen:
            print(f"ckpt {REPORTS[name]} --html {name}.html", flush=True)
            run_ckpt(f"{REPORTS[name]} --html {name}.html")
        with chromium(directory) as browser:
            for name in chosen:
                page = Path(directory, f"{name}.html")
                if given.look:
                    for width in (1400, 400):
                        for scheme in ("light", "dark"):
                            content = picture(browser, page, width=width, scheme=scheme)
                            (target / f"{name}-{width}-{scheme}.png").write_bytes(content)
                    continue
                content = picture(browser, page, width=1200, height=SHOWN[name])
                if len(content) > MAX_BYTES:
                    sys.exit(f"{name}.png has {len(content)} bytes; {MAX_BYTES} are allowed")
                (target / f"{name}.png").write_bytes(content)
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
