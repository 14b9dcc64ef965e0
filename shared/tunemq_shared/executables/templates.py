"""Replace names in braces in arguments, such as ``{lr}``, by each trial's values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tunemq_shared.base.errors import TrainableError

#: Names that an argument may use besides parameters; a parameter of the same name takes precedence.
OURS: Final = {
    "trial_id": "the trial's id",
    "trial_name": "its name, as in tables",
    "trial_dir": "its folder",
    "experiment": "the name of the search",
    "config": "a JSON file with the trial's parameters",
    "checkpoint": "the folder with the checkpoint to continue from; empty at first",
    "checkpoint_dir": "the folder to put checkpoints into",
}

_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NOT_IN_VARIABLES: Final = re.compile(r"[^A-Za-z0-9_]")
_PARAMETER: Final = "TUNEMQ_PARAM_"


def names_in(text: str) -> list[str]:
    """The names in braces; ``{{`` and ``}}`` stand for braces.

    Raises:
        TrainableError: A brace has no counterpart.
    """
    names = []
    for piece in _PIECE.finditer(text):
        if piece[0] in {"{", "}"}:
            raise TrainableError(
                f"the argument {text!r} has a {piece[0]!r} without its partner; write {{name}} for "
                f"a parameter, and {piece[0] * 2!r} for the brace itself."
            )
        if piece[1] is not None:
            names.append(_dotted(piece[1]))
    return names


def check_names(texts: Iterable[str], known: Mapping[str, bool]) -> None:
    """Check that every name in the texts is known, or one of `OURS`.

    Args:
        texts: Texts with names in braces.
        known: The parameters; True for a group with unknown parameters in it.

    Raises:
        TrainableError: A name is unknown; lists the known ones.
    """
    parameters = sorted(known)
    allowed = {*parameters, *OURS}
    for text in texts:
        for name in names_in(text):
            is_open = any(opens and name.startswith(f"{group}.") for group, opens in known.items())
            if name not in allowed and not is_open:
                raise _unknown(text, name, parameters)


def render(text: str, values: Mapping[str, Any]) -> str:
    """Replace each name in the text by its value.

    Raises:
        TrainableError: A name is unknown, or its value cannot be written.
    """

    def written(piece: re.Match[str]) -> str:
        if piece[1] is None:
            return piece[0][0]
        name = _dotted(piece[1])
        if name not in values:
            raise _unknown(text, name, sorted(set(values) - set(OURS)))
        return text_of(values[name], name)

    names_in(text)
    return _PIECE.sub(written, text)


def text_of(value: Any, name: str) -> str:
    """Format a value for a program: a string as it is, any other value as JSON.

    Raises:
        TrainableError: JSON cannot represent it.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TrainableError(
            f"the parameter {name!r} is {value!r}, which cannot be written for a program "
            f"({error}); use numbers, text, true, false, null, and lists and dicts of these."
        ) from error


def parameters_of(config: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over all parameters by name, groups included: ``opt``, ``opt.lr``."""
    for key, value in config.items():
        name = f"{inside}{key}"
        yield name, value
        if isinstance(value, Mapping):
            yield from parameters_of(value, f"{name}.")


def variables_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of the parameters: ``TUNEMQ_PARAM_OPT_LR`` for ``opt.lr``.

    Raises:
        TrainableError: Two parameters would have the same variable.
    """
    variables: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, value in parameters_of(config):
        variable = variable_of(name)
        if variable in names:
            raise TrainableError(
                f"the parameters {names[variable]!r} and {name!r} would both be ${variable}; "
                "rename one of them."
            )
        names[variable] = name
        variables[variable] = text_of(value, name)
    return variables


def variable_of(name: str) -> str:
    """The environment variable of a parameter."""
    return _PARAMETER + _NOT_IN_VARIABLES.sub("_", name).upper()


def _dotted(name: str) -> str:
    """Normalise a name: tables write ``opt/lr`` for ``opt.lr``."""
    return name.strip().replace("/", ".")


def _unknown(text: str, name: str, parameters: list[str]) -> TrainableError:
    close = difflib.get_close_matches(name, [*parameters, *OURS], 1)
    hint = f" Did you mean {{{close[0]}}}?" if close else ""
    return TrainableError(
        f"the argument {text!r} names {{{name}}}, which is no parameter.{hint} There are "
        f"{', '.join(parameters) or 'no parameters'}; and of TuneMQ's: {', '.join(OURS)}. For the "
        "brace itself write {{."
    )
