"""What of JSON Schema bin/lib/schemas.py writes, checked; a field that a schema does not name is wrong here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "enum", "const", "anyOf", "items", "properties",
    "required", "additionalProperties",
}  # fmt: skip


def problems(value: Any, schema: dict[str, Any], defs: dict[str, Any] | None = None, at: str = "$") -> Iterator[str]:
    """Yield what of a value is not as the schema says."""
    defs = schema.get("$defs", {}) if defs is None else defs
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    if "$ref" in schema:
        yield from problems(value, defs[schema["$ref"].rpartition("/")[2]], defs, at)
        return
    if "anyOf" in schema:
        tried = [list(problems(value, kind, defs, at)) for kind in schema["anyOf"]]
        yield from () if [] in tried else min(tried, key=len)
        return
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        yield f"{at}: {value!r}"
    kinds = schema.get("type", list(_TYPES))
    wanted = [kind for name in ([kinds] if isinstance(kinds, str) else kinds) for kind in _TYPES[name]]
    if type(value) not in wanted:
        yield f"{at}: {value!r} is not {kinds}"
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from problems(each, schema.get("items", {}), defs, f"{at}[{number}]")
    elif isinstance(value, dict):
        yield from (f"{at}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        stated = schema.get("properties", {})
        others = schema.get("additionalProperties", None if stated else {})
        for name, each in value.items():
            if name in stated or others is not None:
                yield from problems(each, stated.get(name, others), defs, f"{at}.{name}")
            else:
                yield f"{at}.{name} is not in the schema"
