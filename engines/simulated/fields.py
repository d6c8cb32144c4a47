"""Reads fields of request bodies, and refuses wrong types as the engines do: with 400."""

from typing import Any

from engines.flags import flag_of
from engines.simulated.answers import Wish
from engines.simulated.exchange import ApiError, InvalidField

Body = dict[str, Any]

ANY_OBJECT: Body = {"type": "object", "properties": {"answer": {"type": "string"}}}
"""The schema of an answer that may be any object."""

_MAX_LOGPROBS = 20  # vLLM's --max-logprobs
_MAX_CHOICES = 128  # each is generated in full before the first step


def integer(body: Body, name: str, default: int | None = None, lowest: int | None = None) -> int | None:
    """An integer, or the default if it is absent or null. A flag counts as 1 or 0, as for pydantic."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if not isinstance(value, int):
        raise InvalidField(name, "Input should be a valid integer")
    if lowest is not None and value < lowest:
        raise ApiError(400, f"{name} must be at least {lowest}, got {value}.", param=name)
    return value


def flag(body: Body, name: str, default: bool = False) -> bool:
    """A flag, or the default if it is absent or null. 1 and 0 count as flags, and some words, as for pydantic."""
    value = body.get(name)
    if value is None:
        return default
    read = flag_of(value)
    if read is None:
        raise InvalidField(name, "Input should be a valid boolean")
    return read


def items(body: Body, name: str) -> list[Any]:
    """A required list."""
    value = body.get(name)
    if not isinstance(value, list):
        raise InvalidField(name, "Field required" if value is None else "Input should be a valid list")
    return value


def mapping(body: Body, name: str) -> Body:
    """An object; empty if it is absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidField(name, "Input should be a valid dictionary")
    return value


def wishes_of(body: Body, max_tokens: int, num_logprobs: int | None) -> list[Wish]:
    """One wish for each of the `n` choices."""
    _check_numbers(body)
    tools = _list_of(body, "tools", dict)
    stop = (body["stop"],) if isinstance(body.get("stop"), str) else tuple(_list_of(body, "stop", str))
    if num_logprobs is not None and num_logprobs > _MAX_LOGPROBS:
        raise ApiError(400, f"logprobs must be at most {_MAX_LOGPROBS}, got {num_logprobs}.", param="logprobs")
    num_choices = integer(body, "n", 1, lowest=1) or 1
    if num_choices > _MAX_CHOICES:
        raise ApiError(400, f"n must be at most {_MAX_CHOICES}, got {num_choices}.", param="n")
    return [
        Wish(
            max_tokens=max_tokens,
            min_tokens=integer(body, "min_tokens", 0) or 0,
            ignore_eos=flag(body, "ignore_eos"),
            stop=stop,
            stop_token_ids=tuple(_list_of(body, "stop_token_ids", int)),
            include_stop=flag(body, "include_stop_str_in_output"),
            seed=integer(body, "seed"),
            index=index,
            schema=_schema(body),
            tools=tools,
            tool_choice=_tool_choice(body.get("tool_choice"), tools),
            num_logprobs=num_logprobs,
        )
        for index in range(num_choices)
    ]


def _list_of(body: Body, name: str, kind: type) -> list[Any]:
    """A list of one type; empty if it is absent or null."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise InvalidField(name, f"Input should be a list of {kind.__name__}")
    return value


def _check_numbers(body: Body) -> None:
    for name, lowest, highest in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0)):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidField(name, "Input should be a valid number")
        if not lowest <= value <= highest:
            raise ApiError(400, f"{name} must be in [{lowest}, {highest}], got {value}.", param=name)


def _schema(body: Body) -> dict[str, Any] | None:
    """The JSON schema that the answer must match, in whichever form it is requested."""
    form = mapping(body, "response_format")
    if form.get("type") == "json_object":
        return ANY_OBJECT
    if form.get("type") == "json_schema":
        return mapping(mapping(form, "json_schema"), "schema")
    structured = mapping(body, "structured_outputs")
    return structured["json"] if isinstance(structured.get("json"), dict) else None


def _tool_choice(choice: Any, tools: Any) -> str:
    match choice:
        case None:
            return "auto" if tools else "none"
        case "none" | "auto" | "required":
            return str(choice)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            if any(function_of(tool).get("name") == name for tool in tools):
                return f"={name}"
            raise ApiError(400, f"The tool {name!r} in tool_choice is not among the tools.", param="tool_choice")
        case _:
            raise ApiError(400, "tool_choice must be none, auto, required, or name a function.", param="tool_choice")


def function_of(tool: Body) -> Body:
    """The function of a tool: OpenAI's chat form nests it, the responses form is it."""
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}
