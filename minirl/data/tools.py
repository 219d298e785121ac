"""The tools that a chat prompt shows to the model: JSON schemas, or the functions that they are made from."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from minirl.errors import InputError, refuse

# A JSON schema as chat templates take it, or a function with type hints and a docstring.
Tool = dict[str, Any] | Callable[..., Any]


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools. Raises InputError naming a tool without one, or a name that two share."""
    refuse(not isinstance(tools, list | tuple), f"tools: {tools!r:.80}: expected a list")
    schemas = [_function_schema(tool) if inspect.isroutine(tool) else _checked(tool) for tool in tools]
    names = [tool_name(schema) for schema in schemas]
    for name in names:
        refuse(names.count(name) > 1, f"tools: two have the name {name!r}; rename one")
    return schemas


def tool_name(schema: dict[str, Any]) -> str:
    """The name by which the model calls a tool."""
    return schema["function"]["name"]


def _function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        # transformers reads signature and docstring, which may hold anything.
        raise InputError(
            f"tools: {getattr(function, '__name__', function)!r}: no JSON schema can be made of it: {str(error)[:300]}"
        ) from None


def _checked(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    refuse(
        not isinstance(name, str) or not name,
        f"tools: {tool!r:.80}: expected a function, or a schema "
        '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}',
    )
    return dict(tool)
