"""Values that are valid for a JSON schema, as short as possible and always the same for the same seed.

Covers what tool definitions and structured outputs use: types, properties, required, enum, const, anyOf, oneOf, allOf,
$ref into the same document, arrays, and the bounds of numbers, strings and arrays. `pattern` and `not` are ignored.
"""

import math
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_MAX_DEPTH = 12  # a recursive schema ends here; optional parts are omitted from half of it on

_FORMATS = {
    "date": "2026-01-02",
    "time": "03:04:05Z",
    "date-time": "2026-01-02T03:04:05Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "url": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "example.com",
    "duration": "P1D",
}


def instance_of(schema: Schema | bool, seed: int) -> Any:
    """A value that the schema accepts."""
    return _value(schema, seed & 0xFFFFFFFF, schema if isinstance(schema, dict) else {}, 0)


def _value(schema: Schema | bool, seed: int, root: Schema, depth: int) -> Any:
    if isinstance(schema, bool):
        return None
    schema = _resolved(schema, seed, root, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][seed % len(schema["enum"])]
    kind = schema.get("type") or _implied_type(schema)
    if isinstance(kind, list):
        concrete = [name for name in kind if name != "null"]
        kind = concrete[0] if concrete else "null"
    match kind:
        case "object":
            return _object(schema, seed, root, depth)
        case "array":
            return _array(schema, seed, root, depth)
        case "string":
            return _string(schema, seed)
        case "integer":
            return int(_number(schema, seed, whole=True))
        case "number":
            return _number(schema, seed, whole=False)
        case "boolean":
            return bool(seed & 1)
        case _:
            return None


def _resolved(schema: Schema, seed: int, root: Schema, depth: int) -> Schema:
    """The schema with references followed, one alternative chosen and conjunctions merged."""
    for _ in range(_MAX_DEPTH):
        if "$ref" in schema:
            schema = _merged(_lookup(schema["$ref"], root), {k: v for k, v in schema.items() if k != "$ref"})
        elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
            # The last alternative of a recursive schema usually ends it (null, or a leaf).
            chosen = alternatives[-1 if depth > _MAX_DEPTH // 2 else seed % len(alternatives)]
            rest = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}
            schema = _merged(rest, chosen if isinstance(chosen, dict) else {})
        elif parts := schema.get("allOf"):
            rest = {k: v for k, v in schema.items() if k != "allOf"}
            for part in parts:
                rest = _merged(rest, _resolved(part, seed, root, depth))
            schema = rest
        else:
            break
    return schema


def _lookup(reference: str, root: Schema) -> Schema:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if step:
            found = found.get(step.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def _merged(first: Schema, second: Schema) -> Schema:
    merged = {**first, **second}
    if "properties" in first and "properties" in second:
        merged["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        merged["required"] = [*first["required"], *second["required"]]
    return merged


def _implied_type(schema: Schema) -> str:
    if "properties" in schema or "required" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    if "minimum" in schema or "maximum" in schema:
        return "number"
    return "string"


def _object(schema: Schema, seed: int, root: Schema, depth: int) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    names = required if depth >= _MAX_DEPTH // 2 else [*properties, *(n for n in required if n not in properties)]
    if depth >= _MAX_DEPTH:
        names = []
    return {name: _value(properties.get(name, {}), _mixed(seed, i), root, depth + 1) for i, name in enumerate(names)}


def _array(schema: Schema, seed: int, root: Schema, depth: int) -> list[Any]:
    fixed = [_value(item, _mixed(seed, i), root, depth + 1) for i, item in enumerate(schema.get("prefixItems") or [])]
    few = 0 if depth >= _MAX_DEPTH // 2 else 1
    length = min(max(schema.get("minItems", 0), len(fixed), few), schema.get("maxItems", 1 << 30))
    items = schema.get("items", {})
    made = fixed[:length]
    while len(made) < length:
        made.append(_value(items, _mixed(seed, 100 + len(made)), root, depth + 1))
    return _distinct(made, lambda i: _value(items, _mixed(seed, i), root, depth + 1), schema)


def _distinct(made: list[Any], another: Callable[[int], Any], schema: Schema) -> list[Any]:
    if not schema.get("uniqueItems"):
        return made
    kept: list[Any] = []
    for i, value in enumerate(made):
        for attempt in range(64):
            if value not in kept:
                kept.append(value)
                break
            value = another(1000 + 64 * i + attempt)
    return kept


def _string(schema: Schema, seed: int) -> str:
    if (form := schema.get("format")) in _FORMATS:
        return _FORMATS[form]
    text = f"value {seed % 1000}"
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
    return (text + " and more" * math.ceil(shortest / 9) if len(text) < shortest else text)[: min(longest, 10_000)]


def _number(schema: Schema, seed: int, *, whole: bool) -> float:
    step: float = schema.get("multipleOf", 1 if whole else 0.5)
    lowest: float | None = schema.get("minimum")
    highest: float | None = schema.get("maximum")
    if (bound := schema.get("exclusiveMinimum")) is not None and not isinstance(bound, bool):
        lowest = bound + step if lowest is None else max(lowest, bound + step)
    if (bound := schema.get("exclusiveMaximum")) is not None and not isinstance(bound, bool):
        highest = bound - step if highest is None else min(highest, bound - step)
    if lowest is None:
        lowest = min(0, highest) if highest is not None else 0
    first = math.ceil(lowest / step)
    last = first + 99 if highest is None else max(math.floor(highest / step), first)
    value = (first + seed % (min(last - first, 99) + 1)) * step
    if highest is not None and value > highest:  # no multiple of the step lies between the bounds
        value = (lowest + highest) / 2
    return value


def _mixed(seed: int, number: int) -> int:
    return ((seed ^ (number + 1)) * 0x9E3779B1 >> 3) & 0xFFFFFFFF
