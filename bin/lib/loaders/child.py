"""One loader's own code, in a process of its own: answers what loading each adapter made of the toy model's weights.

    python child.py LOADER SOURCE JOBS ANSWERS

JOBS is a JSON list of `{"id", "architecture", "base", "file", "out"}`. For each a line of ANSWERS says "" or why the
loader raised, and `out` holds every weight, under the names of the file `base`. A job without `file` asks for a base.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(loader: str, source: str, jobs: str, answers: str) -> None:
    """Run every job."""
    module = importlib.import_module(f"loader_{loader}")
    module.start(source)
    from safetensors.torch import save_file
    from toys import toys

    table = toys()
    with open(answers, "a", encoding="utf-8", buffering=1) as lines:
        for job in json.loads(Path(jobs).read_text(encoding="utf-8")):
            toy, failure = table.get(job["architecture"]), ""
            try:
                tensors = module.load(toy, job) if "file" in job else module.native(toy)
                if tensors is not None:
                    save_file({name: each.detach().clone().contiguous() for name, each in tensors.items()}, job["out"])
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                failure = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            lines.write(json.dumps({"id": job["id"], "failure": failure}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
