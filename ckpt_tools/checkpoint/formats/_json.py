"""JSON from files that nobody vouches for: strict, bounded, and with no traceback in it.

Source: RFC 8259. What it leaves to the reader (duplicate keys, NaN, lone surrogates, depth) is refused here or by the
caller's checks of each field.
"""

from __future__ import annotations

import json

from ckpt_tools.errors import LimitError, UnreadableError

MAX_JSON_BYTES = 100_000_000  # Of a safetensors header (as the reference implementation allows), an index or a config
MAX_JSON_CONTAINERS = 2_000_000  # In one document, three for every tensor of a header; an empty one takes 60 bytes


def parse_json(
    text: bytes,
    *,
    what: str,
    where: str | None,
    max_bytes: int = MAX_JSON_BYTES,
    max_containers: int = MAX_JSON_CONTAINERS,
    infinite: bool = False,
) -> object:
    """Return the value of a JSON text; a key twice in an object is an error, as are NaN and Infinity unless `infinite`.

    `where` is the file, escaped, for messages. Brackets inside of strings count for `max_containers`, too. `infinite`
    takes NaN and Infinity also as transformers 5 writes them (``{"__float__": "Infinity"}``).
    """
    if len(text) > max_bytes:
        raise LimitError(f"{what} has {len(text)} bytes, the limit is {max_bytes}", where=where)
    # Brackets inside of strings count too: the limit is generous, and this is one pass over bytes.
    containers = text.count(b"{") + text.count(b"[")
    if containers > max_containers:
        what = f"{what} has up to {containers} objects and arrays, the limit is {max_containers}"
        raise LimitError(what, where=where)
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_decoded_object if infinite else _unique_object,
            parse_constant=None if infinite else _refuse_constant,
            parse_int=_parse_whole if b"-0" in text else None,  # the hook takes time
        )
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{what} is not UTF-8 text", where=where) from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UnreadableError(f"{what} is not valid JSON: {reason}", where=where) from error


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _decoded_object(pairs: list[tuple[str, object]]) -> object:
    """Return an object, or the number that transformers 5 writes as one (`PreTrainedConfig._encode_special_floats`)."""
    if len(pairs) == 1 and pairs[0][0] == "__float__" and pairs[0][1] in ("Infinity", "-Infinity", "NaN"):
        return float(str(pairs[0][1]))
    return _unique_object(pairs)


def _parse_whole(text: str) -> int:
    """Refuse "-0", which other readers take for a fraction."""
    if text == "-0":
        raise ValueError("-0 is not a whole number")
    return int(text)


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number")
