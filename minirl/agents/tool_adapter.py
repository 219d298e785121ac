"""Load the code of --tools and --environment in a worker (`minirl.workers.child`), for `tool_loop`.

Standard library only: a worker starts quickly. Only the functions that describe tools import more. Exceptions of the
user's code pass through.
"""

from dataclasses import replace

from minirl.agents.tool_loop import of_environment, of_tools
from minirl.episodes.rollout_adapter import RolloutCode, loaded
from minirl.errors import InputError
from minirl.workers.conversation import Loaded
from minirl.workers.user_code import find_function, find_functions


def load_tools(source: str, names: str) -> Loaded | str:
    """Return the functions of --tools, or why they cannot be used."""
    return loaded(_of_tools(source, names))


def load_environment(source: str, name: str) -> Loaded | str:
    """Return the class of --environment, or why it cannot be used."""
    return loaded(_of_environment(source, name))


def describe_tools(source: str, names: str) -> Loaded | str:
    """Return `load_tools` with a description: {"tools": JSON schemas, "gives_reward"}. Imports transformers."""
    return _described(_of_tools(source, names))


def describe_environment(source: str, name: str) -> Loaded | str:
    """Return `load_environment` with a description, like `describe_tools`."""
    return _described(_of_environment(source, name))


def _of_tools(source: str, names: str) -> RolloutCode | str:
    found = find_functions(source, names.split(","))
    return found if isinstance(found, str) else of_tools(found)


def _of_environment(source: str, name: str) -> RolloutCode | str:
    found = find_function(source, name)
    return found if isinstance(found, str) else of_environment(found, name)


def _described(code: RolloutCode | str) -> Loaded | str:
    made = loaded(code)
    if isinstance(made, str) or isinstance(code, str):
        return made
    from minirl.data.tools import tool_schemas

    try:
        description = {"tools": tool_schemas(code.tools), "gives_reward": code.gives_reward}
    except InputError as error:
        return str(error)
    return replace(made, description=description)
