"""The example configs, and what each of them means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.preflight.configs import Config, read_config
from ckpt_tools.preflight.spec import AdapterSpec

FIXTURES = Path(__file__).parent / "fixtures"


def mesh(**axes: int) -> Mesh:
    return Mesh(tuple(axes.items()))


def _field(name: str, value: Any) -> Any:
    if name == "mesh" and value is not None:
        return mesh(**value)
    if name == "adapter" and value is not None:
        return AdapterSpec(**{key: _field(key, one) for key, one in value.items()})
    return tuple(value) if isinstance(value, list) else value


EXAMPLES: Mapping[str, tuple[str, int | None, dict[str, Any]]] = {
    file: (framework, ranks, {name: _field(name, value) for name, value in fields.items()})
    for file, (framework, ranks, fields) in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
}


def read(tmp_path: Path, values: Mapping[str, Any] | str, *, name: str = "config.yaml", **options: Any) -> Config:
    path = tmp_path / name
    text = (
        values if isinstance(values, str) else json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values)
    )
    path.write_text(text)
    return read_config(str(path), **options)


def found(config: Config) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.severity, finding.where) for finding in config.findings]


_READINGS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("readings.yaml").read_text(encoding="utf-8"))
BASES: Mapping[str, dict[str, Any]] = _READINGS["bases"]
ACCELERATE, AXOLOTL = BASES["accelerate"], BASES["axolotl"]
FILES: Mapping[str, str] = _READINGS["files"]
"""Files that are launched."""
READINGS: Mapping[str, dict[str, Any]] = {
    f"{title} {at}": row | {"spec": {name: _field(name, value) for name, value in row.get("spec", {}).items()}}
    for title, rows in _READINGS["rows"].items()
    for at, row in enumerate(rows)
}
"""Configs, and what is read of them."""


def written(folder: Path, among: Mapping[str, str] = FILES, **files: str) -> Path:
    for name, text in {**among, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return folder
